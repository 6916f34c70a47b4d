"""Fixtures of the benchmarks' tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lakh.planner.calibration.measured_points import MeasuredPoints, read_points

Files = dict[str, str | bytes]


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[str, Files], Path]:
    """Write a folder of files: tree("proj", {"a/b.py": "x = 1\\n"})."""

    def write(name: str, files: Files) -> Path:
        root = tmp_path / name
        for path, content in files.items():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.encode() if isinstance(content, str) else content)
        return root

    return write


@pytest.fixture(scope="session")
def points(shared_data: Callable[[str, str], Path]) -> MeasuredPoints:
    return read_points(shared_data("planner/points.csv", "published measurements of training speed"))
