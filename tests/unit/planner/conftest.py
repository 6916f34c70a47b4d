"""Published measurements for the planner's tests."""

from pathlib import Path

import pytest

from lakh.planner.calibration.measured_points import MeasuredPoints, read_points


@pytest.fixture(scope="session")
def points_file(shared_data) -> Path:
    return shared_data("planner/points.csv", "published measurements of training speed")


@pytest.fixture(scope="session")
def points(points_file: Path) -> MeasuredPoints:
    return read_points(points_file)
