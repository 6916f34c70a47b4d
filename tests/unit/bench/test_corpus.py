"""What `lakh bench corpus` measures on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from bench.corpus import build
from bench.corpus.build import bench_corpus, make_records
from bench.harness import ProcessUsage

from lakh.errors import UserError


def code(number: int) -> str:
    return "".join(f"def function_{number}_{line}(a, b):\n    return a * {line} + b\n\n" for line in range(30))


def texts(folder: Path) -> list[str]:
    return [text for path in sorted(folder.glob("*.parquet")) for text in pq.read_table(path)["content"].to_pylist()]


def test_records_grow_by_repeated_and_changed_copies(tree: Callable[..., Path], tmp_path: Path) -> None:
    root = tree("proj", {f"m{number}.py": code(number) for number in range(20)})
    words, work = [str(root)], tmp_path / "work"
    size = make_records(words, work, "small", 5_000)
    assert 5_000 <= size < 10_000
    assert make_records(words, work, "large", 120_000) >= 120_000
    first = texts(work / "large")
    assert len(set(first)) > 20  # some copies are changed
    assert len(set(first)) < len(first)  # and some are not
    make_records(words, tmp_path / "again", "large", 120_000)
    assert texts(tmp_path / "again" / "large") == first


@pytest.mark.slow
def test_stages_and_builds_are_measured_whole(tree: Callable[..., Path], tmp_path: Path) -> None:
    root = tree("proj", {f"m{number}.py": code(number) for number in range(20)})
    sizes = {"sample": 0.02, "full": 0.05, "memory": 0.1}
    rows = bench_corpus([str(root)], tmp_path, sizes_mb=sizes, parts=("stages", "sample"), log=lambda text: None)
    stages = [row["stage"] for row in rows]
    assert stages[-1] == "end to end, sample"
    assert {"parse", "analyse", "quality", "secrets", "order"} < set(stages)
    assert all(row["cpu_s"] > 0 and row["peak_rss_bytes"] > 0 and row["ratio_to_datatrove"] is None for row in rows)


def test_a_ratio_compares_the_same_input_only(
    tree: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree("proj", {f"m{number}.py": code(number) for number in range(20)})
    monkeypatch.setattr(build, "_measure", lambda command: ProcessUsage(1.0, 1.0, 1))
    sizes = {"sample": 0.02, "full": 0.05, "memory": 0.1}
    parts = ("peer", "sample", "full")
    rows = bench_corpus([str(root)], tmp_path, sizes_mb=sizes, parts=parts, log=lambda text: None)
    ratios = {row["stage"]: row["ratio_to_datatrove"] for row in rows}
    assert ratios["end to end, sample"] is not None
    assert ratios["end to end, full"] is None


def test_sources_far_too_small_for_what_is_asked_are_refused(tree: Callable[..., Path], tmp_path: Path) -> None:
    source = tree("tiny", {"a.py": code(0)})
    with pytest.raises(UserError, match="choose larger sources"):
        make_records([str(source)], tmp_path / "work", "sample", 1e9)


def test_sources_without_code_are_refused(tree: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="hold no code"):
        make_records([str(tree("proj", {"a.png": b"x"}))], tmp_path / "work", "small", 1000)
