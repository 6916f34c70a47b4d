"""The bubblewrap command line: which walls stand around the harness.

Namespaces of its own for processes, network, IPC, host name and mounts; of the host's files only the system folders and
the Python that runs lakh, read-only; a private /tmp of limited size; no /proc, and of /dev only four harmless nodes.

Two ways in, because the kernel exempts root from the limit on processes, under whatever name a user namespace gives it:

    ordinary user   bubblewrap makes a user namespace, inside which we are nobody
    root            no user namespace: the walls are built by root, so that a Python under /root (mode 700) can be
                    bound at all; candidate and examiner then each become a uid of their own that nobody else has,
                    before they read a line of a program. Of root's capabilities only those needed for that step, and
                    for ending such a process, are let in.

Python is bound at its own path, not at a neutral one: a build with a shared libpython carries that path in its binary.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from lakh.evals import seccomp
from lakh.evals.verdict import Limits
from lakh.evals.walls import NOBODY, PROBE_TOOLS, Start, inner_command, next_uid

__all__ = ["Bubblewrap", "command", "find", "visible"]

SYSTEM_FOLDERS = ("/usr", "/bin", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/alternatives")
MADE_FOLDERS = ("/dev", "/etc", "/nix")
JAVA_SETTINGS = "java-*"  # Debian keeps what a JVM cannot start without there
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class Bubblewrap:
    no_commands = None

    def __init__(self, bwrap: str) -> None:
        self._bwrap = bwrap
        self._filter = seccomp.filter_bytes()

    @property
    def description(self) -> str:
        way = "uid dropped from root" if os.geteuid() == 0 else "user namespace"
        return f"bubblewrap+rlimits{'+seccomp' if self._filter else ''} ({way})"

    @contextlib.contextmanager
    def opened(self, limits: Limits) -> Iterator[Start]:
        tmp_bytes = limits.tmp_MiB << 20
        setup = {"own_walls": False, "own_pids": True, "tmp": "/tmp", "uids": [next_uid(), next_uid()], "filter": ""}
        if self._filter is None:
            words = command(self._bwrap, tmp_bytes=tmp_bytes, seccomp_fd=None)
            yield Start([*words, "--", *inner_command()], setup)
            return
        descriptor = os.memfd_create("seccomp")
        try:
            os.write(descriptor, self._filter)
            os.lseek(descriptor, 0, os.SEEK_SET)
            words = command(self._bwrap, tmp_bytes=tmp_bytes, seccomp_fd=descriptor)
            yield Start([*words, "--", *inner_command()], setup, descriptors=(descriptor,))
        finally:
            os.close(descriptor)

    def probe(self) -> str:
        return _PROBE.replace("VISIBLE", repr(visible())).replace("FILTERED", str(bool(self._filter)))


def find() -> str | None:
    return shutil.which("bwrap")


def command(bwrap: str, *, tmp_bytes: int, seccomp_fd: int | None) -> list[str]:
    """Everything before the `--`; what follows runs inside."""
    words = [bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--as-pid-1", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL"]
    if os.geteuid() == 0:
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_KILL"]
    else:
        words += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    for folder in MADE_FOLDERS:  # made by hand: bubblewrap would close them to all but root
        words += ["--dir", folder]
    for folder in (*SYSTEM_FOLDERS, *map(str, Path("/etc").glob(JAVA_SETTINGS))):
        words += ["--ro-bind-try", folder, folder]
    for device in DEVICES:
        words += ["--dev-bind", device, device]
    words += ["--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", "/tmp"]
    words += _bind_python(Path(sys.base_prefix).resolve())
    words += ["--remount-ro", "/", "--chdir", "/tmp"]
    if seccomp_fd is not None:
        words += ["--seccomp", str(seccomp_fd)]
    return words


def visible() -> set[str]:
    """Names that may stand in the root folder inside."""
    paths = (*SYSTEM_FOLDERS, *MADE_FOLDERS, "/tmp", str(Path(sys.base_prefix).resolve()))
    return {Path(path).parts[1] for path in paths}


def _bind_python(prefix: Path) -> list[str]:
    if any(prefix.is_relative_to(folder) for folder in SYSTEM_FOLDERS):
        return []
    words = []
    for parent in reversed(prefix.parents[:-1]):  # likewise
        words += ["--dir", str(parent)]
    return [*words, "--ro-bind", str(prefix), str(prefix)]


_PROBE = (
    PROBE_TOOLS
    + """def check():
    assert set(os.listdir("/")) <= VISIBLE, "folders of the host are visible"
    assert os.listdir("/tmp") == [], "/tmp is not private"
    assert refused(open, "/etc/passwd"), "the host's users are visible"
    for path in ("/probe", "/usr/probe", "/dev/probe", os.path.join(os.path.dirname(os.__file__), "probe")):
        assert refused(open, path, "w"), "can write to " + path
    with open("/tmp/probe", "w") as file:
        file.write("x")
    os.remove("/tmp/probe")
    assert os.getuid() != 0 and os.geteuid() != 0, "runs as root"
    assert refused(os.setuid, 0), "can become root"
    assert refused(socket.socket) or {name for _, name in socket.if_nameindex()} <= {"lo"}, "reaches a network"
    assert os.getpid() < 8, "sees processes of the host"
    assert not FILTERED or ctypes.CDLL(None).unshare(0x10000000) != 0, "can make user namespaces"
    assert refused(forks_without_end), "the number of processes is not limited"
"""
)
