"""Error bars cover what they state: 80 % of rows that neither the fit nor the band has seen."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from lakh.planner.calibration.error_bands import (
    LEAST_ROWS,
    ErrorBand,
    configuration_kind,
    conformal_band,
    conformal_bands,
    with_fallback,
)
from lakh.planner.calibration.fit import is_held_out, load_calibrations
from lakh.planner.calibration.measured_points import MeasuredPoint, MeasuredPoints
from lakh.planner.validation.accuracy import coverage, with_bands


def test_a_band_covers_new_rows_of_any_distribution() -> None:
    rng = np.random.default_rng(1)
    for draw in (lambda n: rng.lognormal(0.1, 0.3, n), lambda n: 1 + rng.standard_cauchy(n), lambda n: rng.random(n)):
        inside = []
        for _ in range(200):
            band = conformal_band(draw(50))
            assert band is not None
            new = draw(200)
            inside.append(((new >= band.low) & (new <= band.high)).mean())
        assert np.mean(inside) == pytest.approx(0.8, abs=0.03)


def test_a_kind_with_few_rows_uses_the_hull_of_its_gpu_type_and_its_kind() -> None:
    kinds = ["one node"] * LEAST_ROWS + ["experts"] * 3
    own = conformal_bands(kinds, np.linspace(0.8, 1.2, len(kinds)))
    assert "experts" not in own
    pooled = {"experts": ErrorBand(0.9, 1.5, 40), "all": ErrorBand(0.7, 1.3, 100)}
    bands = with_fallback(own, pooled)
    assert bands["one node"] == own["one node"]
    assert (bands["experts"].low, bands["experts"].high) == (own["all"].low, 1.5)
    assert with_fallback({}, pooled)["low precision"] == pooled["all"]
    assert with_fallback({}, {}) == {}
    assert conformal_band(np.ones(LEAST_ROWS - 1)) is None


def test_kinds_of_configurations() -> None:
    assert configuration_kind(0, 0, 8, 8) == "one node"
    assert configuration_kind(0, 0, 16, 8) == "several nodes"
    assert configuration_kind(0, 1, 16, 8) == "low precision"
    assert configuration_kind(8, 1, 16, 8) == "experts"


@pytest.mark.slow
def test_eighty_percent_of_unseen_rows_are_inside_the_bar(points: MeasuredPoints) -> None:
    """Bands from one half of the held-out configurations, tested on the other half, over several splits."""
    shipped = load_calibrations()
    held_out = [point for point in points.kept if is_held_out(point.config)]

    def half(point: MeasuredPoint, split: int) -> bool:
        return hashlib.sha256(f"{split} {point.config}".encode()).digest()[0] % 2 == 0

    shares = []
    for split in range(6):
        first = [point for point in held_out if half(point, split)]
        second = [point for point in held_out if not half(point, split)]
        shares.append(coverage(second, with_bands(first, shipped))["all"])
    assert np.mean(shares) == pytest.approx(0.8, abs=0.04)
    found = coverage(held_out, shipped)
    assert found["all"] == pytest.approx(0.8, abs=0.04)
    assert found["left_out"] == pytest.approx(0.8, abs=0.04)
