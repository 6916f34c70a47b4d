"""Downsampled curves are small and keep every spike."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lakh.dashboard.curves import bucket_means, downsample, running_means

VALUES = st.lists(st.floats(width=32), min_size=1, max_size=400)


@given(VALUES, st.integers(10, 100))
def test_downsampling_keeps_order_minimum_and_maximum(values: list[float], most: int) -> None:
    kept = downsample(np.array(values), most)
    assert len(kept) <= most
    assert list(kept) == sorted(set(kept))
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) == len(values):
        assert min(finite) in np.array(values)[kept]
        assert max(finite) in np.array(values)[kept]
    else:
        assert not np.isfinite(np.array(values)[kept]).all()  # a value that is not finite is kept


def test_one_spike_in_a_million_points_is_kept() -> None:
    values = np.sin(np.arange(1_000_000) / 1e5)
    values[654_321] = 9.0
    values[654_322] = np.nan
    kept = downsample(values, 600)
    assert len(kept) <= 600
    assert 654_322 in kept
    values[654_322] = 0.0
    assert 654_321 in downsample(values, 600)


@given(VALUES, st.integers(1, 50))
def test_means_are_between_minimum_and_maximum(values: list[float], most: int) -> None:
    x, y = bucket_means(np.arange(len(values), dtype=float), np.array(values), most)
    finite = [value for value in values if math.isfinite(value)]
    assert len(x) == len(y) <= max(1, most)
    if finite:
        room = 1e-6 * max(1.0, *(abs(value) for value in finite))  # of rounding sums of large numbers
        assert all(min(finite) - room <= mean <= max(finite) + room for mean in y)
    else:
        assert len(y) == 0


def test_the_mean_of_a_flat_curve_is_the_curve() -> None:
    x, y = bucket_means(np.arange(100.0), np.full(100, 3.0), 10)
    assert list(y) == [3.0] * 10
    assert x[0] == 4.5


@given(st.lists(st.one_of(st.floats(-1e9, 1e9), st.just(math.nan)), max_size=60), st.integers(1, 9))
def test_running_means_cover_every_finite_value_and_both_ends(values: list[float], width: int) -> None:
    x, y = running_means(np.arange(len(values), dtype=float), np.array(values), width)
    finite = [value for value in values if math.isfinite(value)]
    assert len(x) == len(y) == len(finite)
    if finite:
        assert (y[0], y[-1]) == (finite[0], finite[-1])
        room = 1e-6 * max(1.0, *map(abs, finite))
        assert all(min(finite) - room <= mean <= max(finite) + room for mean in y)


def test_one_huge_value_does_not_affect_later_means() -> None:
    values = np.array([1.0, 1e300, *[2.0] * 20])
    assert running_means(np.arange(22.0), values, 5)[1][-10:].tolist() == [2.0] * 10
