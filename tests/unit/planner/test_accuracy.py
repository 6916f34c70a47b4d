"""The shipped calibration follows from the published rows; its held-out error is within its limits."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lakh.errors import DataError, UserError
from lakh.planner.calibration.fit import (
    FIT_SETTINGS,
    MAX_PARAMETERS,
    PARAMETERS,
    _identifiable,
    calibration_for,
    is_held_out,
    load_calibrations,
    to_toml,
)
from lakh.planner.calibration.measured_points import MeasuredPoints
from lakh.planner.validation import accuracy
from lakh.planner.validation.accuracy import accuracy_score, calibrate, predictions, score_by, transfer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def refitted(points: MeasuredPoints) -> dict:
    pytest.importorskip("scipy", reason="install the planner's extra: pip install 'lakh[plan]'")
    return calibrate(points.kept)


def held_out(points: MeasuredPoints, source: str) -> list:
    return [p for p in points.kept if p.source.startswith(source) and is_held_out(p.config)]


@pytest.mark.slow
def test_calibrating_again_gives_the_shipped_numbers(refitted: dict) -> None:
    shipped = load_calibrations()
    assert set(refitted) == set(shipped) == set(FIT_SETTINGS)
    for kind, one in refitted.items():
        for name in PARAMETERS:  # least squares on another processor may differ in the last digits
            assert getattr(one.efficiency, name) == pytest.approx(getattr(shipped[kind].efficiency, name), rel=0.02)
        assert one.fitted == shipped[kind].fitted


@pytest.mark.parametrize("kind", list(FIT_SETTINGS))
def test_at_most_twelve_numbers_per_gpu_type_all_within_physical_bounds(kind: str) -> None:
    one = load_calibrations()[kind]
    assert one.num_parameters <= MAX_PARAMETERS == 12
    assert len(FIT_SETTINGS[kind].free) + len(FIT_SETTINGS[kind].programs) <= MAX_PARAMETERS
    for name, parameter in PARAMETERS.items():
        assert parameter.low * (1 - 1e-6) <= getattr(one.efficiency, name) <= parameter.high * (1 + 1e-6)


def test_the_host_time_of_old_and_new_programs_agrees() -> None:
    """Sources that say nothing about the host leave its time at one prior for all programs, old ones included."""
    shipped = load_calibrations()
    prior = PARAMETERS["host_us"].prior
    for kind in ("A100", "H100"):  # most rows of A100 are from programs before fused attention, none of H100
        assert shipped[kind].efficiency.host_us == pytest.approx(prior, rel=0.06)


def test_no_held_out_configuration_was_fitted() -> None:
    assert not [digest for one in load_calibrations().values() for digest in one.fitted if is_held_out(digest)]


def test_the_split_holds_out_about_three_in_ten(points: MeasuredPoints) -> None:
    configs = {p.config for p in points.kept}
    assert 0.25 < sum(map(is_held_out, configs)) / len(configs) < 0.35


@pytest.mark.parametrize(
    ("source", "kind", "mape", "median"),
    [
        ("vTrain multi-node", "A100", 0.06, 0.03),
        ("Megatron-Core 0.8", "H100", 0.08, 0.08),
        ("Megatron-Bridge", "H100", 0.08, 0.08),
        ("DGX", "Blackwell", 0.08, 0.08),
        ("llm-foundry", "A100", 0.08, 0.08),
        ("llm-foundry", "H100", 0.08, 0.08),
        ("Llama 3", "H100", 0.07, 0.07),  # within 3 points of its 43 % MFU
    ],
)
def test_held_out_errors_are_within_their_limits(
    points: MeasuredPoints, source: str, kind: str, mape: float, median: float
) -> None:
    rows = [p for p in held_out(points, source) if p.kind == kind]
    found = accuracy_score(rows, predictions(rows))
    assert found.mape <= mape
    assert found.median_ape <= median


@pytest.mark.parametrize(
    ("source", "kind", "bar"),
    [
        ("vTrain", "A100", 0.12),
        ("Megatron-Bridge", "H100", 0.12),
        ("llm-foundry", "H100", 0.12),
        ("llm-foundry", "A100", 0.12),
        ("DGX", "H100", 0.12),
        ("Megatron-Bridge", "Blackwell", 0.12),
        ("DGX", "Blackwell", 0.12),
    ],
)
def test_a_fit_on_one_source_predicts_the_others(points: MeasuredPoints, source: str, kind: str, bar: float) -> None:
    pytest.importorskip("scipy", reason="install the planner's extra: pip install 'lakh[plan]'")
    rows = [p for p in points.kept if p.kind == kind]
    assert transfer(rows, source)[f"{kind}, all"]["mape"] <= bar


def test_layouts_of_one_cluster_are_ranked_correctly(points: MeasuredPoints) -> None:
    rows = held_out(points, "vTrain multi-node")
    tau = accuracy_score(rows, predictions(rows)).kendall_tau
    assert tau is not None
    assert tau >= 0.9


def test_a_program_has_a_factor_only_if_rows_of_another_program_exist() -> None:
    """Where every row has a program with a factor, the most frequent one is the reference for the others."""
    programs = FIT_SETTINGS["H100"].programs
    assert "nemo" in programs
    assert _identifiable(programs, Counter({"nemo": 9, "maxtext": 2})) == ("maxtext",)
    assert _identifiable(programs, Counter({"nemo": 9, "maxtext": 2, "llm-foundry": 1})) == ("nemo", "maxtext")


def test_releases_of_one_layout_are_not_ranked(points: MeasuredPoints) -> None:
    early = next(p for p in points.kept if p.source == "vTrain multi-node")
    late = replace(early, step_s=early.step_s / 2)
    assert accuracy_score([early, late], np.array([1.0, 2.0])).kendall_tau is None
    other = replace(late, plan=replace(late.plan, eager=1.0))
    assert accuracy_score([early, other], np.array([1.0, 2.0])).kendall_tau == -1.0


def test_scores_by_hand(points: MeasuredPoints) -> None:
    rows = list(points.kept[:4])
    measured = np.array([p.step_s for p in rows])
    found = accuracy_score(rows, measured * [1.1, 0.9, 1.0, 1.2])
    assert found.mape == pytest.approx(0.1)
    assert found.median_ape == pytest.approx(0.1)
    assert found.bias == pytest.approx(0.05)
    assert accuracy_score(rows, measured).kendall_tau == 1.0
    assert accuracy_score(rows, 1 / measured).kendall_tau == -1.0
    assert set(score_by(rows, measured, lambda p: p.source)) == {"vTrain multi-node"}


def test_counted_memory_is_close_to_measured_peaks(points: MeasuredPoints) -> None:
    """Memory is not fitted; programs differ in how many copies of the logits they keep."""
    found = accuracy.memory_errors(points.kept)
    assert found["nanotron"]["n"] == 18
    assert found["nanotron"]["mape"] <= 0.12
    assert found["torchtitan"]["n"] == 10
    assert found["torchtitan"]["mape"] <= 0.14


def test_unseen_rows_are_identified_by_their_digest(points: MeasuredPoints) -> None:
    fresh = {points.kept[i].id for i in accuracy.unseen(points.kept)}
    assert fresh == {p.id for p in points.kept if is_held_out(p.config) or p.kind == "V100"}


def test_a_gpu_without_measurements_names_the_related_gpu() -> None:
    assert "efficiencies of H100" in calibration_for("H200")[1]
    assert calibration_for("abacus")[1] == "uncalibrated: priors only"


def test_a_calibration_file_round_trips_and_damage_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(to_toml(load_calibrations(), "again"))
    assert load_calibrations(file) == load_calibrations()
    file.write_text("[A100]\nknobs = 1\n")
    with pytest.raises(DataError, match="is not a calibration"):
        load_calibrations(file)
    with pytest.raises(UserError, match="no such file"):
        load_calibrations(tmp_path / "none.toml")
