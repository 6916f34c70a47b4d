"""Scores of parts of the rows, and the error of another release of the same configuration."""

from dataclasses import replace

import numpy as np
import pytest

from lakh.planner.calibration.fit import load_calibrations
from lakh.planner.calibration.measured_points import SHIPPED_POINTS, MeasuredPoint, read_points
from lakh.planner.validation.accuracy import unseen
from lakh.planner.validation.cross_validation import cross_validation_rows
from lakh.planner.validation.mape_interval import mape_interval
from lakh.planner.validation.part_scores import PARTS, part_scores, release_floor, release_spread


@pytest.fixture(scope="module")
def rows() -> tuple[MeasuredPoint, ...]:
    return read_points(SHIPPED_POINTS).kept


def test_parts_are_scored_on_unseen_rows_only(rows: tuple[MeasuredPoint, ...]) -> None:
    calibrations = load_calibrations()
    found = part_scores(rows, calibrations)
    fresh = [rows[i] for i in unseen(rows, calibrations)]
    for name, part in found.items():
        assert part["n"] == sum(PARTS[name](point) for point in fresh)
        assert 0 <= part["coverage"] <= 1
    assert found["Blackwell"]["n"] == found["Blackwell, dense"]["n"] + found["Blackwell, experts"]["n"] > 20
    # the figures of docs/how-to/planning.md
    assert found["Blackwell"]["mape"] == pytest.approx(0.079, abs=0.002)
    assert found["experts"]["mape"] == pytest.approx(0.088, abs=0.002)
    assert found["experts"]["releases"]["mape"] == pytest.approx(0.117, abs=0.002)
    assert found["experts"]["floor"]["mape"] == pytest.approx(0.070, abs=0.002)
    assert max(found["Blackwell"]["mape"], found["experts"]["mape"]) <= 0.10  # the targets
    for part in found.values():
        assert part["mape_low"] <= part["mape"] <= part["mape_high"]
        assert part["floor"] is None or part["floor"]["mape"] <= part["releases"]["mape"]


def test_another_release_predicts_a_row_by_the_mean_of_the_others(rows: tuple[MeasuredPoint, ...]) -> None:
    one = rows[0]
    twice = [replace(one, step_s=1.0), replace(one, step_s=2.0)]
    spread = release_spread(twice)
    assert spread == {"n": 2, "mape": pytest.approx(0.75), "max": pytest.approx(1.0)}
    assert release_spread([one, replace(one, config="another")]) is None
    assert release_spread([one, replace(one, source="another")]) is None


def test_the_floor_is_the_best_constant_of_each_configuration(rows: tuple[MeasuredPoint, ...]) -> None:
    one, other = rows[0], replace(rows[0], config="another")
    several = [replace(one, step_s=s) for s in (1.0, 2.0, 4.0)] + [replace(other, step_s=s) for s in (3.0, 3.0)]
    # 1 s, 2 s or 4 s for all three: errors of 0 + 1/2 + 3/4, 1 + 0 + 1/2, or 3 + 1 + 0
    assert release_floor(several) == {"n": 5, "mape": pytest.approx(1.25 / 5)}
    tried = [sum(abs(c / s - 1) for s in (1.0, 2.0, 4.0)) for c in np.linspace(0.5, 5, 1000)]
    assert min(tried) >= 1.25 - 1e-9
    assert release_floor([one, other]) is None


def test_the_interval_of_a_mean_error_resamples_configurations_together(rows: tuple[MeasuredPoint, ...]) -> None:
    one = replace(rows[0], step_s=1.0)
    errors = np.tile([0.0, 0.2], 20)
    apart = [replace(one, config=str(i)) for i in range(40)]
    together = [replace(one, config=str(i % 2)) for i in range(40)]
    low, high = mape_interval(apart, 1 + errors)
    assert 0.05 < low < 0.1 < high < 0.15
    assert mape_interval(together, 1 + errors) == (0.0, pytest.approx(0.2))  # two configurations, not forty rows
    assert mape_interval(apart, 1 + errors) == (low, high)


def test_a_part_can_be_cross_validated(rows: tuple[MeasuredPoint, ...]) -> None:
    tested = cross_validation_rows(rows, "Blackwell")
    assert {point.kind for point in tested} == {"Blackwell"}
    assert {point.source for point in tested} == {"Megatron-Bridge", "DGX Cloud benchmarking"}
    assert {point.source for point in cross_validation_rows(rows, "vTrain")} == {
        "vTrain multi-node", "vTrain single-node"
    }  # fmt: skip
