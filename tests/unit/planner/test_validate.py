"""The shipped calibration is what the published rows give; its held-out error is within its bars."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lakh.errors import DataError, UserError
from lakh.planner.validation import accuracy
from lakh.planner.calibration.fit import KINDS, KNOBS, MAX_KNOBS, _told_apart, calibrated, is_held_out, load, to_toml
from lakh.planner.calibration.measured_points import Points
from lakh.planner.validation.accuracy import calibrate, predictions, score, table, transfer


@pytest.fixture(scope="module")
def refitted(points: Points) -> dict:
    pytest.importorskip("scipy", reason="install the planner's extra: pip install 'lakh[plan]'")
    return calibrate(points.kept)


def held_out(points: Points, source: str) -> list:
    return [p for p in points.kept if p.source.startswith(source) and is_held_out(p.config)]


def test_calibrating_again_gives_the_shipped_numbers(refitted: dict) -> None:
    shipped = load()
    assert set(refitted) == set(shipped) == set(KINDS)
    for kind, one in refitted.items():
        for name in KNOBS:  # least squares on another processor may differ in the last digits
            assert getattr(one.fractions, name) == pytest.approx(getattr(shipped[kind].fractions, name), rel=0.02)
        assert one.fitted == shipped[kind].fitted


@pytest.mark.parametrize("kind", list(KINDS))
def test_at_most_twelve_numbers_per_gpu_type_all_within_physical_bounds(kind: str) -> None:
    one = load()[kind]
    assert one.knobs <= MAX_KNOBS == 12
    assert len(KINDS[kind].free) + len(KINDS[kind].codes) <= MAX_KNOBS
    for name, knob in KNOBS.items():
        assert knob.low * (1 - 1e-6) <= getattr(one.fractions, name) <= knob.high * (1 + 1e-6)


def test_no_held_out_configuration_was_fitted() -> None:
    assert not [digest for one in load().values() for digest in one.fitted if is_held_out(digest)]


def test_the_split_holds_out_about_three_in_ten(points: Points) -> None:
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
def test_held_out_errors_are_within_their_bars(
    points: Points, source: str, kind: str, mape: float, median: float
) -> None:
    rows = [p for p in held_out(points, source) if p.kind == kind]
    found = score(rows, predictions(rows))
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
def test_fitted_on_one_source_the_others_are_near(points: Points, source: str, kind: str, bar: float) -> None:
    pytest.importorskip("scipy", reason="install the planner's extra: pip install 'lakh[plan]'")
    rows = [p for p in points.kept if p.kind == kind]
    assert transfer(rows, source)[f"{kind}, all"].mape <= bar


def test_layouts_of_one_cluster_are_put_in_order(points: Points) -> None:
    rows = held_out(points, "vTrain multi-node")
    tau = score(rows, predictions(rows)).kendall_tau
    assert tau is not None
    assert tau >= 0.9


def test_a_program_is_told_from_the_gpu_only_beside_another_one() -> None:
    """Where every row has a program with a factor, the most frequent one is the measure of the others."""
    codes = KINDS["H100"].codes
    assert "nemo" in codes
    assert _told_apart(codes, Counter({"nemo": 9, "maxtext": 2})) == ("maxtext",)
    assert _told_apart(codes, Counter({"nemo": 9, "maxtext": 2, "llm-foundry": 1})) == ("nemo", "maxtext")


def test_releases_of_one_layout_are_not_put_in_order(points: Points) -> None:
    early = next(p for p in points.kept if p.source == "vTrain multi-node")
    late = replace(early, step_s=early.step_s / 2)
    assert score([early, late], np.array([1.0, 2.0])).kendall_tau is None
    other = replace(late, layout={**late.layout, "eager": 1.0})
    assert score([early, other], np.array([1.0, 2.0])).kendall_tau == -1.0


def test_scores_by_hand(points: Points) -> None:
    rows = list(points.kept[:4])
    measured = np.array([p.step_s for p in rows])
    found = score(rows, measured * [1.1, 0.9, 1.0, 1.2])
    assert found.mape == pytest.approx(0.1)
    assert found.median_ape == pytest.approx(0.1)
    assert found.bias == pytest.approx(0.05)
    assert score(rows, measured).kendall_tau == 1.0
    assert score(rows, 1 / measured).kendall_tau == -1.0
    assert set(table(rows, measured, lambda p: p.source)) == {"vTrain multi-node"}


def test_counted_bytes_lie_near_measured_peaks(points: Points) -> None:
    """Nothing of the memory count is fitted; programs differ in what they keep of the logits."""
    found = validate.peaks(points.kept)
    assert found["nanotron"]["n"] == 18
    assert found["nanotron"]["mape"] <= 0.12
    assert found["torchtitan"]["n"] == 10
    assert found["torchtitan"]["mape"] <= 0.14


def test_what_no_fit_has_seen_is_known_by_its_digest(points: Points) -> None:
    fresh = {points.kept[i].id for i in validate.unseen(points.kept)}
    assert fresh == {p.id for p in points.kept if is_held_out(p.config) or p.kind == "V100"}


def test_a_gpu_without_measurements_says_whose_numbers_it_uses() -> None:
    assert "fractions of H100" in calibrated("H200")[1]
    assert calibrated("abacus")[1] == "uncalibrated: priors only"


def test_a_calibration_file_survives_itself_and_damage_is_told(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(to_toml(load(), "again"))
    assert load(file) == load()
    file.write_text("[A100]\nknobs = 1\n")
    with pytest.raises(DataError, match="is not a calibration"):
        load(file)
    with pytest.raises(UserError, match="no such file"):
        load(tmp_path / "none.toml")
