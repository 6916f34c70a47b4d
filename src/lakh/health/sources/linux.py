"""Counters of the Linux kernel: network links, host memory, disk, and the clock beside the storage's clock."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from lakh.health.checks import HealthReading

__all__ = ["read_clock", "read_disk", "read_linux"]


def read_linux(node: str, root: Path = Path("/")) -> Iterator[HealthReading]:
    """Links (Ethernet and InfiniBand), free memory, and memory errors (EDAC)."""
    for link in sorted((root / "sys/class/net").glob("*")):
        if link.name == "lo":
            continue
        yield from _counter(node, link.name, "link_downs", [link / "carrier_down_count"])
        yield from _counter(
            node, link.name, "link_errors", [link / f"statistics/{side}_errors" for side in ("rx", "tx")]
        )
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        name, counters = f"{port.parent.parent.name}/{port.name}", port / "counters"
        yield from _counter(node, name, "link_downs", [counters / "link_downed"])
        yield from _counter(node, name, "link_errors", [counters / "symbol_error", counters / "port_rcv_errors"])
    for controller in sorted((root / "sys/devices/system/edac/mc").glob("mc*")):
        yield from _counter(node, controller.name, "host_ue", [controller / "ue_count"])
        yield from _counter(node, controller.name, "host_ce", [controller / "ce_count"])
    yield from _free_memory(node, root / "proc/meminfo")


def read_disk(node: str, folder: Path) -> Iterator[HealthReading]:
    """Free space of the disk below `folder`, and whether it can be written."""
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        if found.f_blocks:
            yield HealthReading("disk", node, "disk_free_share", found.f_bavail / found.f_blocks)
        yield HealthReading("disk", node, "disk_read_only", float(bool(found.f_flag & os.ST_RDONLY)))


def read_clock(node: str, folder: Path) -> Iterator[HealthReading]:
    """Seconds between this machine's clock and that of the storage below `folder`, by a new file's time stamp."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        before_s = time.time()
        file.write(b"clock")
        file.flush()
        stamped_s = os.fstat(file.fileno()).st_mtime
        after_s = time.time()
        yield HealthReading("clock", node, "clock_skew_s", max(0.0, before_s - stamped_s, stamped_s - after_s))


def _counter(node: str, device: str, metric: str, files: list[Path]) -> Iterator[HealthReading]:
    """The sum of the counters that exist."""
    values = []
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            values.append(int(file.read_text()))
    if values:
        yield HealthReading(device, node, metric, sum(values))


def _free_memory(node: str, file: Path) -> Iterator[HealthReading]:
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError, ZeroDivisionError):
        sizes = {
            line.split(":")[0]: int(line.split()[1]) for line in file.read_text().splitlines() if line.endswith("kB")
        }
        yield HealthReading("memory", node, "memory_free_share", sizes["MemAvailable"] / sizes["MemTotal"])
