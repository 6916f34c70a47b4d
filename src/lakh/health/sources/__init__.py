"""Sources of readings: `read_node` asks all of them. A counter that the machine does not have gives no reading."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

from lakh.health.checks import HealthReading
from lakh.health.sources.kernel_log import read_kernel_log
from lakh.health.sources.linux import read_clock, read_disk, read_linux
from lakh.health.sources.nvml import read_gpus

__all__ = ["read_node"]


def read_node(folder: str | Path, *, expected_gpus: int | None = None, root: str | Path = "/") -> list[HealthReading]:
    """All readings of this machine. `folder`: where runs write; `root`: another root of /sys and /proc, for tests."""
    return list(_read_all(Path(folder), expected_gpus, Path(root)))


def _read_all(folder: Path, expected_gpus: int | None, root: Path) -> Iterator[HealthReading]:
    node = socket.gethostname()
    yield from read_gpus(node, expected_gpus)
    yield from read_linux(node, root)
    yield from read_kernel_log(node)
    yield from read_disk(node, folder)
    yield from read_clock(node, folder)
