"""A control group for one cell: memory and processes of all that runs in it, held by the kernel.

The limits of processes (rlimits) are for each; only a group knows their sum. Groups may be made by root, and by users
to whom a part of the tree was given (systemd does for its sessions). Where none may be made, resident.py looks at the
sum from time to time instead.

    version 2   one folder: memory.max, memory.swap.max, pids.max, and memory.events tells of killings
    version 1   a folder in each of two trees: memory.limit_in_bytes, pids.max, and memory.oom_control

Version 2 lets a folder with processes have no controllers for its children, so the group becomes a sibling of ours, or
our child where that is allowed, or a child of the root. Knows paths and numbers; knows nothing of programs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Group", "Tree", "find"]

PREFIX = "lakh-eval-"
REMOVE_TIMEOUT_S = 2.0
_counter = itertools.count()


@dataclass(frozen=True)
class Tree:
    """Where groups can be made: a folder for memory, and one for processes (the same in version 2)."""

    version: int
    memory: Path
    pids: Path

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.memory,) if self.memory == self.pids else (self.memory, self.pids)

    def make(self, memory_MiB: int, processes: int) -> Group:
        """An empty group with these limits. OSError where the kernel refuses."""
        name = f"{PREFIX}{os.getpid()}-{next(_counter)}"
        group = Group(self.version, self.memory / name, self.pids / name)
        try:
            for folder in group.folders:
                folder.mkdir()
            limit = str(memory_MiB << 20)
            if self.version == 2:
                _write(group.memory / "memory.max", limit)
                with contextlib.suppress(OSError):  # a kernel without swap accounting has no such file
                    _write(group.memory / "memory.swap.max", "0")
            else:
                _write(group.memory / "memory.limit_in_bytes", limit)
                with contextlib.suppress(OSError):
                    _write(group.memory / "memory.memsw.limit_in_bytes", limit)
            _write(group.pids / "pids.max", str(processes))
        except OSError:
            group.remove()
            raise
        return group

    def sweep(self) -> None:
        """Remove groups whose maker is gone. They are empty: their processes went with it."""
        for folder in self.folders:
            for left in folder.glob(f"{PREFIX}*"):
                maker = left.name.removeprefix(PREFIX).partition("-")[0]
                if maker.isdigit() and not Path("/proc", maker).exists():
                    with contextlib.suppress(OSError):
                        left.rmdir()


@dataclass(frozen=True)
class Group:
    version: int
    memory: Path
    pids: Path

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.memory,) if self.memory == self.pids else (self.memory, self.pids)

    def take(self, pid: int) -> None:
        """Move a process and all below it in. Whoever is born below a member is one, so nobody slips through."""
        moved: set[int] = set()
        waiting = {pid}
        while waiting:
            for one in waiting:
                for folder in self.folders:
                    try:
                        _write(folder / "cgroup.procs", str(one))
                    except ProcessLookupError:
                        break  # it ended meanwhile
            moved |= waiting
            waiting = {child for one in moved for child in _children(one)} - moved

    def killings(self) -> int:
        """How many processes the kernel has ended here for want of memory."""
        file = self.memory / ("memory.events" if self.version == 2 else "memory.oom_control")
        try:
            lines = dict(line.split() for line in file.read_text(encoding="ascii").splitlines())
            return int(lines.get("oom_kill", 0))
        except (OSError, ValueError):
            return 0

    def remove(self) -> None:
        """Once all members are gone. What the kernel still holds after a moment is left to `sweep`."""
        deadline_s = time.monotonic() + REMOVE_TIMEOUT_S
        for folder in self.folders:
            while True:
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    if time.monotonic() > deadline_s:
                        break
                    time.sleep(0.005)


def find(own: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/proc/self/mounts")) -> Tree | None:
    """The tree in which this process may make groups that limit memory and processes; None where there is none."""
    try:
        ours = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
        mounted = [line.split() for line in mounts.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    two = next((Path(words[1]) for words in mounted if words[2] == "cgroup2"), None)
    for number, _, path in ours:
        if number == "0" and two is not None:
            for folder in _places(two, path):
                if _may_make_two(folder) and (tree := _proven(Tree(2, folder, folder))):
                    return tree
    one = {}
    for words in mounted:
        if words[2] == "cgroup":
            for controller in {"memory", "pids"} & set(words[3].split(",")):
                path = next((path for _, names, path in ours if controller in names.split(",")), "/")
                found = next((place for place in (_under(words[1], path), Path(words[1])) if _is_ours(place)), None)
                if found is not None:
                    one[controller] = found
    return _proven(Tree(1, one["memory"], one["pids"])) if len(one) == 2 else None


def _proven(tree: Tree) -> Tree | None:
    """The tree, if a process can be put into a group of it."""
    tree.sweep()
    try:
        group = tree.make(64, 4)
    except OSError:
        return None
    try:
        with subprocess.Popen(["/bin/sleep", "10"], stdin=subprocess.DEVNULL) as child:
            try:
                group.take(child.pid)
                members = [(folder / "cgroup.procs").read_text(encoding="ascii").split() for folder in group.folders]
            finally:
                child.kill()
        return tree if all(str(child.pid) in pids for pids in members) else None
    except OSError:
        return None
    finally:
        group.remove()


def _places(root: Path, path: str) -> Iterator[Path]:
    own = _under(str(root), path)
    if own != root:
        yield own.parent
    yield own
    yield root


def _under(root: str, path: str) -> Path:
    return Path(root, path.lstrip("/"))


def _may_make_two(folder: Path) -> bool:
    try:
        controllers = (folder / "cgroup.subtree_control").read_text(encoding="ascii").split()
    except OSError:
        return False
    return {"memory", "pids"} <= set(controllers) and _is_ours(folder)


def _is_ours(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK) and os.access(folder / "cgroup.procs", os.W_OK)


def _children(pid: int) -> set[int]:
    found: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for task in Path("/proc", str(pid), "task").iterdir():
            found |= {int(word) for word in (task / "children").read_text(encoding="ascii").split()}
    return found


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
