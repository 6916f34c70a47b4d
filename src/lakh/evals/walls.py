"""What stands around a cell: the contract that each rung of the ladder fills.

    bubblewrap.py   namespaces, read-only system, private /tmp of a size, seccomp
    landlock.py     file access and system calls refused by the kernel, no namespaces: for where those are not allowed
    container.py    docker or podman, in gVisor's kernel where it is installed
    NoWalls         --unsafe: rlimits only

A rung gives the command that starts the first process and what that process must know; it runs nothing by itself.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lakh.evals import inside
from lakh.evals.verdict import Limits

__all__ = [
    "ENVIRONMENT",
    "PROBE_TOOLS",
    "PYTHON_FLAGS",
    "TOGETHER",
    "NoWalls",
    "Start",
    "Walls",
    "inner_command",
    "interpreter",
    "next_uid",
]

NOBODY = 65534
TOGETHER = 2  # times the memory of one process, for all of a program
OWN_UIDS = range(0x30000000, 0x70000000)  # far above every range that systems hand out
UIDS_PER_PROCESS = 256

# Not -I: it would ignore PYTHONHASHSEED, and with it the order of sets would change from run to run.
# Columns of code are for tracebacks that nobody sees: without them there is less memory to copy for every program.
PYTHON_FLAGS = ("-s", "-S", "-P", "-B", "-X", "no_debug_ranges")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}

# The beginning of every rung's probe: what its check() asks with.
PROBE_TOOLS = """
import ctypes, os, signal, socket, time
def refused(call, *arguments):
    try:
        call(*arguments)
    except OSError:
        return True
    return False
def forks_without_end():
    children = []
    try:
        for _ in range(32):
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            children.append(child)
    finally:  # leave the place as it was: it is used again
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)
"""

_counter = itertools.count()


@dataclass(frozen=True)
class Start:
    command: Sequence[str]
    setup: dict[str, Any]
    """What the first process is told: see inside/zygote.py."""
    descriptors: Sequence[int] = ()
    """That the command inherits."""
    handed: Sequence[int] = ()
    """That go with the setup."""
    folder: str = "/"
    own_folder: str | None = None
    """Removed when the cell is closed."""
    environment: dict[str, str] = field(default_factory=lambda: ENVIRONMENT)
    frames: bool = False
    """The first process cannot be handed descriptors: it takes frames on stdin and answers on stdout (line.py)."""
    end_command: Sequence[str] = ()
    """Ends what the command has started, where the end of its line did not."""


class Walls(Protocol):
    @property
    def description(self) -> str: ...

    @property
    def no_commands(self) -> str | None:
        """Why programs of other languages cannot be compiled and run here; None where they can."""
        ...

    def opened(self, limits: Limits) -> contextlib.AbstractContextManager[Start]: ...

    def probe(self) -> str:
        """Python text with a function check() that tries these walls and raises where one does not hold."""
        ...


class NoWalls:
    """No sandbox: the program has the rights of whoever runs lakh."""

    description = "none (--unsafe: rlimits only)"
    no_commands = None

    @contextlib.contextmanager
    def opened(self, limits: Limits) -> Iterator[Start]:
        folder = tempfile.mkdtemp(prefix="lakh-eval-")
        try:
            setup = {"own_walls": False, "own_pids": False, "tmp": folder, "uids": [0, 0], "filter": ""}
            yield Start(inner_command(), setup, folder=folder, own_folder=folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def probe(self) -> str:
        return "def check():\n    assert True\n"


def interpreter() -> str:
    """The Python behind lakh's virtual environment: nothing that was installed beside lakh is seen inside."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def inner_command() -> list[str]:
    return [interpreter(), *PYTHON_FLAGS, *inside.command_line()]


def next_uid() -> int:
    """0 for an ordinary user (nothing to drop); for root, a uid that no other run has at this moment."""
    if os.geteuid() != 0:
        return 0
    wanted = OWN_UIDS.start + (os.getpid() * UIDS_PER_PROCESS + next(_counter) % UIDS_PER_PROCESS) % len(OWN_UIDS)
    return wanted if _is_mapped(wanted) else NOBODY


def _is_mapped(uid: int) -> bool:
    """Whether this uid exists here: a container may map only the first 65536."""
    try:
        lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    return any(int(first) <= uid < int(first) + int(size) for first, _, size in (line.split() for line in lines))
