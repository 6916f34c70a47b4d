"""Xids of NVIDIA's driver in the kernel log (/dev/kmsg, which needs permission, else `dmesg`)."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable

from lakh.health.checks import XID_LEVELS, HealthReading

__all__ = ["count_xids", "read_kernel_log"]

DMESG_TIMEOUT_S = 10.0
# NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")


def read_kernel_log(node: str) -> list[HealthReading]:
    """Counts of Xids since boot, by level and PCI address; nothing where the log cannot be read."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, timeout=DMESG_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return count_xids(done.stdout.decode(errors="replace").splitlines(), node)


def count_xids(lines: Iterable[str], node: str) -> list[HealthReading]:
    """Readings xid_watch, xid_drain and xid_rma; 0 for the node where the log has none."""
    counts: Counter[tuple[str, str]] = Counter({(node, level): 0 for level in ("watch", "drain", "rma")})
    for line in lines:
        for address, number in _XID.findall(line):
            if (level := XID_LEVELS.get(int(number))) is not None:
                counts[f"pci {address}", level] += 1
    return [HealthReading(device, node, f"xid_{level}", count) for (device, level), count in counts.items()]
