"""A control group (version 2) for one worker: the kernel limits memory and processes of everything in it together.

rlimits are per process; only a group limits the sum. Root can make groups, and so can users who own a part of the tree
(systemd gives its sessions one). Elsewhere, also with version 1, the sum is polled (resident_memory.py).

Children of a folder with processes in it have no controllers, so the group is a sibling of our own if possible.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ControlGroup", "ControlGroupParent", "find"]

PREFIX = "lakh-eval-"
REMOVE_TIMEOUT_S = 2.0
_counter = itertools.count()


@dataclass(frozen=True)
class ControlGroupParent:
    """A folder in which groups can be made."""

    folder: Path

    def make(self, memory_MiB: int, processes: int) -> ControlGroup:
        """An empty group with these limits. OSError if the kernel refuses."""
        group = ControlGroup(self.folder / f"{PREFIX}{os.getpid()}-{next(_counter)}")
        try:
            group.folder.mkdir()
            _write(group.folder / "memory.max", str(memory_MiB << 20))
            with contextlib.suppress(OSError):  # a kernel without swap accounting has no such file
                _write(group.folder / "memory.swap.max", "0")
            _write(group.folder / "pids.max", str(processes))
        except OSError:
            group.remove()
            raise
        return group

    def sweep(self) -> None:
        """Remove groups that a dead process of ours left behind. They are empty: their processes died with it."""
        for left in self.folder.glob(f"{PREFIX}*"):
            maker = left.name.removeprefix(PREFIX).partition("-")[0]
            if maker.isdigit() and not Path("/proc", maker).exists():
                with contextlib.suppress(OSError):
                    left.rmdir()


@dataclass(frozen=True)
class ControlGroup:
    folder: Path

    def add(self, pid: int) -> None:
        """Move a process and all its descendants in. Children of a member are members, so none is missed."""
        moved: set[int] = set()
        waiting = {pid}
        while waiting:
            for one in waiting:
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    _write(self.folder / "cgroup.procs", str(one))
            moved |= waiting
            waiting = {child for one in moved for child in _children(one)} - moved

    def oom_kills(self) -> int:
        """How many processes of the group the kernel has killed because of its memory limit."""
        try:
            lines = (self.folder / "memory.events").read_text(encoding="ascii").splitlines()
            return int(dict(line.split() for line in lines).get("oom_kill", 0))
        except (OSError, ValueError):
            return 0

    def remove(self) -> None:
        """Call once all members are gone. What the kernel still holds after a moment is left to `sweep`."""
        deadline_s = time.monotonic() + REMOVE_TIMEOUT_S
        while time.monotonic() < deadline_s:
            try:
                self.folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.005)


def find(own: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/proc/self/mounts")) -> ControlGroupParent | None:
    """Where this process can make groups that limit memory and processes; None if it cannot."""
    try:
        paths = [line.split(":", 2)[2] for line in own.read_text(encoding="utf-8").splitlines() if line[:3] == "0::"]
        mounted = [line.split() for line in mounts.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    root = next((Path(fields[1]) for fields in mounted if fields[2] == "cgroup2"), None)
    if root is None or not paths:
        return None
    ours = root / paths[0].lstrip("/")
    candidates = map(ControlGroupParent, ([ours.parent] if ours != root else []) + [ours, root])
    return next((parent for parent in candidates if _has_controllers(parent.folder) and _works(parent)), None)


def _has_controllers(folder: Path) -> bool:
    try:
        controllers = (folder / "cgroup.subtree_control").read_text(encoding="ascii").split()
    except OSError:
        return False
    writable = os.access(folder, os.W_OK | os.X_OK) and os.access(folder / "cgroup.procs", os.W_OK)
    return writable and {"memory", "pids"} <= set(controllers)


def _works(parent: ControlGroupParent) -> bool:
    """Whether a process can be put into a group there."""
    parent.sweep()
    try:
        group = parent.make(64, 4)
    except OSError:
        return False
    try:
        with subprocess.Popen(["/bin/sleep", "10"], stdin=subprocess.DEVNULL) as child:
            try:
                group.add(child.pid)
                return str(child.pid) in (group.folder / "cgroup.procs").read_text(encoding="ascii").split()
            finally:
                child.kill()
    except OSError:
        return False
    finally:
        group.remove()


def _children(pid: int) -> set[int]:
    found: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for task in Path("/proc", str(pid), "task").iterdir():
            found |= {int(word) for word in (task / "children").read_text(encoding="ascii").split()}
    return found


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)  # never creates the file
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
