"""Each row is predicted by fits that saw neither it nor its near duplicates; the interval of tau covers tau."""

from dataclasses import replace

import numpy as np
import pytest

from lakh.errors import UserError
from lakh.planner.calibration.fit import Calibration, calibration_for
from lakh.planner.calibration.measured_points import MeasuredPoint, MeasuredPoints
from lakh.planner.validation import cross_validation
from lakh.planner.validation.accuracy import plan_pairs
from lakh.planner.validation.cross_validation import FOLDS, cross_validate, near_duplicate_key, tau_interval

SOURCE = "vTrain multi-node"


@pytest.fixture
def rows(points: MeasuredPoints) -> list[MeasuredPoint]:
    return [p for p in points.kept if p.source == SOURCE]


@pytest.mark.slow
def test_no_fit_sees_the_rows_it_predicts_or_their_near_duplicates(
    points: MeasuredPoints, rows: list[MeasuredPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[tuple[set[str], set[str]]] = []

    def fit(seen: list[MeasuredPoint], kind: str, start: object) -> Calibration:
        judged.append(({near_duplicate_key(p) for p in seen}, {p.config for p in seen}))
        return calibration_for(kind)[0]

    counted = []

    def predict(out: list[MeasuredPoint], *_: object) -> np.ndarray:
        seen_keys, seen_configs = judged[-1]
        assert not seen_keys & {near_duplicate_key(p) for p in out}
        assert not seen_configs & {p.config for p in out}
        counted.extend(p.id for p in out)
        return np.array([p.step_s for p in out])

    monkeypatch.setattr(cross_validation, "fit", fit)
    monkeypatch.setattr(cross_validation, "predict", predict)
    found = cross_validate(points.kept, SOURCE, repeats=2)
    assert sorted(counted) == sorted(2 * [p.id for p in rows])
    assert len(judged) == 2 * FOLDS
    assert found.score.n == len(rows)
    assert found.score.mape == pytest.approx(0, abs=1e-9)
    assert (found.score.kendall_tau, found.tau_low, found.tau_high, found.wrong) == (1.0, 1.0, 1.0, ())


def test_rows_that_differ_only_in_micro_batch_are_near_duplicates(rows: list[MeasuredPoint]) -> None:
    first = rows[0]
    assert near_duplicate_key(first) == near_duplicate_key(replace(first, plan=replace(first.plan, micro_batch=64.0)))
    assert near_duplicate_key(first) != near_duplicate_key(replace(first, plan=replace(first.plan, tp=16.0)))
    assert len({near_duplicate_key(p) for p in rows}) == 18


def test_a_pair_in_the_wrong_order_names_the_faster_row_first(rows: list[MeasuredPoint]) -> None:
    slow, fast = rows[0], replace(rows[0], id="fast", step_s=rows[0].step_s / 2, plan=replace(rows[0].plan, tp=2.0))
    (wrong,) = cross_validation._misranked([slow, fast], plan_pairs([slow, fast], np.array([1.0, 1.5])))
    assert (wrong.faster, wrong.slower) == ("fast", slow.id)
    assert wrong.measured_gap == pytest.approx(1.0)
    assert wrong.predicted_gap == pytest.approx(1 / 1.5 - 1)


def test_the_interval_of_tau_contains_it_and_narrows_with_more_rows(rows: list[MeasuredPoint]) -> None:
    first = rows[0]

    def interval(count: int) -> tuple[float, float]:
        many = [replace(first, step_s=1.0 + i, plan=replace(first.plan, tp=float(i))) for i in range(count)]
        guess = np.array([p.step_s for p in many])
        guess[::5] *= 1.5  # some are judged too slow
        pairs = plan_pairs(many, guess)
        low, high = tau_interval(many, pairs, resamples=400)
        assert low is not None
        assert high is not None
        assert low <= pairs.agreement.mean() <= high
        return low, high

    (wide_low, wide_high), (low, high) = interval(10), interval(60)
    assert high - low < wide_high - wide_low
    assert tau_interval(rows[:1], plan_pairs(rows[:1], np.array([1.0]))) == (None, None)


def test_a_source_without_enough_rows_is_refused(points: MeasuredPoints) -> None:
    with pytest.raises(UserError, match="names no source"):
        cross_validate(points.kept, "nobody")
    with pytest.raises(UserError, match="groups of near duplicates"):
        cross_validate(points.kept, "Llama 3")
