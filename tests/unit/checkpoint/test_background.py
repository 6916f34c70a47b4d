"""Checkpoints are written in the background if a copy of the state fits into host memory."""

from pathlib import Path

import pytest

from lakh.checkpoint import choose_background, free_host_bytes

GB = 10**9


@pytest.mark.parametrize(
    ("wanted", "copy_bytes", "free_bytes", "background", "text"),
    [
        ("auto", 3 * GB, 10 * GB, True, "a copy of the state takes 3.00 GB of 10.00 GB of free host memory"),
        ("auto", 7 * GB, 10 * GB, False, "takes 7.00 GB of 10.00 GB of free host memory, more than 60%"),
        ("auto", 7 * GB, None, True, "is unknown"),
        ("on", 7 * GB, 1 * GB, True, "requested"),
        ("off", 0, 10 * GB, False, "requested"),
    ],
)
def test_free_memory_decides_unless_the_setting_does(
    wanted: str, copy_bytes: int, free_bytes: int | None, background: bool, text: str
) -> None:
    found, reason = choose_background(wanted, copy_bytes=copy_bytes, free_bytes=free_bytes)
    assert found is background
    assert text in reason


def test_free_memory_is_the_minimum_of_machine_and_container(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 2000 kB\nMemAvailable:    1000 kB\n")
    assert free_host_bytes(tmp_path) == 1_024_000
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for name, content in {
        "memory.max": "900",
        "memory.current": "700",
        "memory.stat": "inactive_file 30\nactive_file 20",
    }.items():
        (group / name).write_text(content + "\n")
    assert free_host_bytes(tmp_path) == 250
    (group / "memory.max").write_text("max\n")
    assert free_host_bytes(tmp_path) == 1_024_000


def test_this_machine_reports_free_memory() -> None:
    assert (free_host_bytes() or 0) > 0
