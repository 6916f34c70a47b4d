"""The contract of an isolation backend, and what all backends share.

A backend gives the command that starts a worker's first process and the setup message for that process. It runs
nothing itself. Sandbox.choose tries the backends in order of preference.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lakh.evals import sandboxed
from lakh.evals.sandbox.packages import SandboxPackages
from lakh.evals.sandbox.verdict import SandboxLimits

__all__ = [
    "ENVIRONMENT",
    "PROBE_HELPERS",
    "PROBE_NAMESPACES",
    "PYTHON_FLAGS",
    "IsolationBackend",
    "SandboxLaunch",
    "interpreter",
    "next_uid",
    "package_folders",
    "python_command",
    "setup_message",
    "total_limits",
]

NOBODY = 65534
PRIVATE_UIDS = range(0x30000000, 0x70000000)  # far above every range that systems assign
UIDS_PER_PROCESS = 256
TOTAL_MEMORY_FACTOR = 2  # all processes of a program together, in units of one process's limit
OWN_PROCESSES = 8  # besides the program's: relay or bubblewrap, first process, examiner, zygote
OWN_MEMORY_MiB = 256

# Not -I: it would ignore PYTHONHASHSEED, and the order of sets would change from run to run.
# no_debug_ranges: these tracebacks are not shown, and without column tables there is less memory to copy per fork.
PYTHON_FLAGS = ("-s", "-S", "-P", "-B", "-X", "no_debug_ranges")
# One thread per library: the zygote forks after it has imported packages, and threads do not survive a fork.
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

# The first part of every backend's self-test.
PROBE_HELPERS = """
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
                try:
                    os.execv("/bin/sleep", ["sleep", "60"])  # holds less memory than a copy of all packages
                except OSError:
                    time.sleep(60)
                os._exit(0)
            children.append(child)
    finally:  # the worker is used again
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)
"""
# Checks shared by the backends with namespaces. READ_ONLY: paths; FILTERED: whether a seccomp filter is loaded.
PROBE_NAMESPACES = """
    assert os.listdir("/tmp") == [], "/tmp is not private"
    for path in (*READ_ONLY, os.path.join(os.path.dirname(os.__file__), "probe")):
        assert refused(open, path, "w"), "can write to " + path
    with open("/tmp/probe", "w") as file:
        file.write("x")
    os.remove("/tmp/probe")
    assert os.getuid() != 0 and os.geteuid() != 0, "runs as root"
    assert refused(os.setuid, 0), "can become root"
    assert refused(socket.socket) or {name for _, name in socket.if_nameindex()} <= {"lo"}, "reaches a network"
    assert not FILTERED or ctypes.CDLL(None).unshare(0x10000000) != 0, "can make user namespaces"
    assert refused(forks_without_end), "the number of processes is not limited"
"""

_counter = itertools.count()


@dataclass(frozen=True)
class SandboxLaunch:
    """How to start the first process of a worker."""

    command: Sequence[str]
    setup: dict[str, Any]
    """The first message on the channel: see setup_message."""
    inherited_fds: Sequence[int] = ()
    """Descriptors that the command inherits."""
    setup_fds: Sequence[int] = ()
    """Descriptors sent with the setup message."""
    folder: str = "/"
    removes: Sequence[str] = ()
    """Folders that are removed when the worker is closed."""
    environment: dict[str, str] = field(default_factory=lambda: ENVIRONMENT)
    over_pipes: bool = False
    """No descriptor can be passed: messages go over stdin and stdout (channel.PipeChannel)."""
    kill_command: Sequence[str] = ()
    """Ends what the command started if closing the channel did not."""


class IsolationBackend(Protocol):
    @property
    def description(self) -> str:
        """Name and mechanisms; part of every result."""
        ...

    @property
    def no_commands(self) -> str | None:
        """Why programs of other languages cannot run here; None where they can."""
        ...

    def launch(self, limits: SandboxLimits) -> AbstractContextManager[SandboxLaunch]: ...

    def probe(self) -> str:
        """Python source with a function check() that tries to get out and raises if anything is not isolated."""
        ...


def setup_message(
    *, tmp: str | None, pid_namespace: bool, uids: Sequence[int] | None = None, seccomp_filter: bytes = b"",
    use_landlock: bool = False, processes_before: int = 0, packages: SandboxPackages | None = None,
    package_folders: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """What the first process needs: uids of candidate and examiner (0: keep ours) and what each child has to apply.

    `package_folders` are where the packages lie in the sandbox.
    """
    return {
        "uids": [next_uid(), next_uid()] if uids is None else list(uids),
        "tmp": tmp,
        "pid_namespace": pid_namespace,
        "seccomp_filter": seccomp_filter.hex(),
        "use_landlock": use_landlock,
        "processes_before": processes_before,
        "package_folders": list(package_folders),
        "package_modules": list(packages.modules) if packages else [],
    }


def total_limits(limits: SandboxLimits) -> tuple[int, int]:
    """Memory in MiB and number of processes of a whole worker, its own processes and /tmp included."""
    memory_MiB = TOTAL_MEMORY_FACTOR * limits.memory_MiB + limits.tmp_MiB + OWN_MEMORY_MiB
    return memory_MiB, limits.processes + OWN_PROCESSES


def interpreter() -> str:
    """The Python below lakh's virtual environment: packages installed next to lakh are not visible in the sandbox."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def package_folders() -> list[Path]:
    """Folders of installed packages beside the interpreter's own modules. Some packages bring benchmarks' answers."""
    prefix = Path(sys.base_prefix).resolve()
    patterns = ("lib*/python3*/site-packages", "lib*/python3*/dist-packages")
    found = {path for root in (prefix, Path("/usr"), Path("/usr/local")) for one in patterns for path in root.glob(one)}
    return sorted(path.resolve() for path in found if path.is_dir())


def python_command() -> list[str]:
    return [interpreter(), *PYTHON_FLAGS, *sandboxed.command_line()]


def next_uid() -> int:
    """0 for an ordinary user (nothing to drop); for root, a uid that no other process has at this moment."""
    if os.geteuid() != 0:
        return 0
    uid = PRIVATE_UIDS.start + (os.getpid() * UIDS_PER_PROCESS + next(_counter) % UIDS_PER_PROCESS) % len(PRIVATE_UIDS)
    return uid if _is_mapped(uid) else NOBODY


def _is_mapped(uid: int) -> bool:
    """Whether this uid exists here: a container may map only the first 65536."""
    try:
        lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    return any(int(first) <= uid < int(first) + int(size) for first, _, size in (line.split() for line in lines))
