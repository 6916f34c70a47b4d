"""Fixtures of the benchmarks' tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lakh.planner.calibration.measured_points import MeasuredPoints, read_points


@pytest.fixture(scope="session")
def points(shared_data: Callable[[str, str], Path]) -> MeasuredPoints:
    return read_points(shared_data("planner/points.csv", "published measurements of training speed"))
