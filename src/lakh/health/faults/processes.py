"""Kill, stop, disconnect and limit the processes of a run, from outside (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["cut_links", "descendants", "kill_all", "limit_file_size"]

SYS_PIDFD_GETFD = 438  # the same number on every architecture (linux/include/uapi/asm-generic/unistd.h)
_ESTABLISHED = "01"


def descendants(pid: int) -> list[int]:
    """The processes below `pid`, parents first."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            children[int(stat.read_text().rpartition(")")[2].split()[1])].append(int(stat.parent.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children[waiting.pop()]
        found += below
        waiting += below
    return found


def kill_all(pid: int) -> list[int]:
    """SIGKILL a process and everything below it, at once. Returns their ids."""
    pids = [pid, *descendants(pid)]
    for one in pids:  # first stop them all, so that none starts another or notices that a child is gone
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGSTOP)
    pids += [one for one in descendants(pid) if one not in pids]
    for one in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    return pids


def cut_links(pid: int) -> int:
    """Shut down every TCP connection of a process, as a cut cable does. Returns how many there were.

    Takes copies of its sockets (pidfd_getfd), which needs the right to trace it.
    """
    inodes = _connected_inodes(pid)
    cut = 0
    handle = os.pidfd_open(pid)
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = entry.readlink().name
                if target.startswith("socket:[") and target[8:-1] in inodes:
                    cut += _shut_down(handle, int(entry.name))
    finally:
        os.close(handle)
    return cut


def _connected_inodes(pid: int) -> set[str]:
    """The inodes of established TCP connections in the network namespace of a process."""
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _ESTABLISHED:
                    found.add(fields[9])
    return found


def _shut_down(handle: int, descriptor: int) -> int:
    copy = ctypes.CDLL(None, use_errno=True).syscall(SYS_PIDFD_GETFD, handle, descriptor, 0)
    if copy < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    with socket.socket(fileno=copy) as connection:
        connection.shutdown(socket.SHUT_RDWR)
    return 1


@contextlib.contextmanager
def limit_file_size(pids: Sequence[int], limit_bytes: int) -> Iterator[None]:
    """Inside the block these processes cannot write files beyond `limit_bytes`, as on a full disk."""
    before = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            before[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit_bytes, before[pid][1]))
    try:
        yield
    finally:
        for pid, limits in before.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
