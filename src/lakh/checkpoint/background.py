"""Whether to write checkpoints in the background, which needs a copy of the state in host memory."""

from __future__ import annotations

from pathlib import Path

__all__ = ["choose_background", "free_host_bytes"]

SHARE = 0.6
"""Share of the free memory that copies may take; the page cache and prefetched batches need the rest."""


def choose_background(wanted: str, *, copy_bytes: int, free_bytes: int | None) -> tuple[bool, str]:
    """Whether to save in the background, and the reason. `copy_bytes`: of all ranks of this machine."""
    if wanted != "auto":
        return wanted == "on", "requested"
    if free_bytes is None:
        return True, "the amount of free host memory is unknown"
    size = f"a copy of the state takes {copy_bytes / 1e9:.2f} GB of {free_bytes / 1e9:.2f} GB of free host memory"
    if copy_bytes > SHARE * free_bytes:
        return False, f"{size}, more than {SHARE:.0%}"
    return True, size


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """Memory available to this process: the minimum of the machine and of its control group; None if unknown."""
    found = [value for value in (_machine(root), _group(root)) if value is not None]
    return min(found, default=None)


def _machine(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    available = fields.get("MemAvailable", "").split()
    return 1024 * int(available[0]) if available else None


def _group(root: Path) -> int | None:
    """The limit of a container minus its usage, not counting the page cache."""
    folder = root / "sys/fs/cgroup"
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(limit) - int(used) + sum(int(stat.get(name, 0)) for name in ("active_file", "inactive_file"))
    except (OSError, ValueError):  # no control group, or "max": no limit
        return None
