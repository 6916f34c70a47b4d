"""Whether a checkpoint is written behind the steps, which costs a copy of the state in host memory, or waited for.

`choose_background` is pure; `free_host_bytes` asks the system. A machine whose memory cannot be asked about counts as
having enough: saves then fail as everything does where memory is short.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["choose_background", "free_host_bytes"]

SHARE = 0.6
"""Of the free memory that copies may take: the files that are written pass through the rest, and batches are read ahead
into it."""


def choose_background(wanted: str, *, copy_bytes: int, free_bytes: int | None) -> tuple[bool, str]:
    """Whether saves go on behind the steps, and the reason. `copy_bytes`: of all ranks of this machine."""
    if wanted != "auto":
        return wanted == "on", "asked for"
    if free_bytes is None:
        return True, "how much host memory is free cannot be told here"
    size = f"a copy of the state takes {copy_bytes / 1e9:.2f} GB of {free_bytes / 1e9:.2f} GB of free host memory"
    if copy_bytes > SHARE * free_bytes:
        return False, f"{size}, more than {SHARE:.0%}"
    return True, size


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process can still get: of the machine, and of the control group that it is in."""
    found = [value for value in (_machine(root), _group(root)) if value is not None]
    return min(found, default=None)


def _machine(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    words = fields.get("MemAvailable", "").split()
    return 1024 * int(words[0]) if words else None


def _group(root: Path) -> int | None:
    """Of a container: its limit less what it uses and could not give back, as it could its files in memory."""
    folder = root / "sys/fs/cgroup"
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(limit) - int(used) + sum(int(stat.get(name, 0)) for name in ("active_file", "inactive_file"))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return None
