"""The bubblewrap command line: which walls stand around the harness.

Namespaces of its own for processes, network, IPC, host name and mounts; of the host's files only the system folders and
the Python that runs lakh, read-only; a private /tmp of limited size; no /proc, and of /dev only four harmless nodes.

Two ways in, because the kernel exempts root from the limit on processes, under whatever name a user namespace gives it:

    ordinary user   bubblewrap makes a user namespace, inside which we are nobody
    root            no user namespace: the walls are built by root, so that a Python under /root (mode 700) can be
                    bound at all, and the harness then becomes a uid of its own that nobody else has, before it reads a
                    line of the program. Of root's capabilities only the two needed for that step are let in.

Python is bound at its own path, not at a neutral one: a build with a shared libpython carries that path in its binary.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from pathlib import Path

__all__ = ["command", "find", "interpreter", "next_uid", "visible"]

NOBODY = 65534
OWN_UIDS = range(0x30000000, 0x70000000)  # far above every range that systems hand out
UIDS_PER_PROCESS = 256

SYSTEM_FOLDERS = ("/usr", "/bin", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/alternatives")
MADE_FOLDERS = ("/dev", "/etc", "/nix")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

# Not -I: it would ignore PYTHONHASHSEED, and with it the order of sets would change from run to run.
PYTHON_FLAGS = ("-s", "-S", "-P", "-B")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}

_counter = itertools.count()


def find() -> str | None:
    return shutil.which("bwrap")


def interpreter() -> str:
    """The Python behind lakh's virtual environment: nothing that was installed beside lakh is seen inside."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def next_uid() -> int:
    """0 for an ordinary user (nothing to drop); for root, a uid that no other run has at this moment."""
    if os.geteuid() != 0:
        return 0
    wanted = OWN_UIDS.start + (os.getpid() * UIDS_PER_PROCESS + next(_counter) % UIDS_PER_PROCESS) % len(OWN_UIDS)
    return wanted if _is_mapped(wanted) else NOBODY


def command(bwrap: str, *, tmp_bytes: int, seccomp_fd: int | None) -> list[str]:
    """Everything before the `--`; what follows runs inside."""
    words = [bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--as-pid-1", "--die-with-parent", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL"]
    if os.geteuid() == 0:
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    for folder in MADE_FOLDERS:  # made by hand: bubblewrap would close them to all but root
        words += ["--dir", folder]
    for folder in SYSTEM_FOLDERS:
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


def _is_mapped(uid: int) -> bool:
    """Whether this uid exists here: a container may map only the first 65536."""
    try:
        lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    return any(int(first) <= uid < int(first) + int(size) for first, _, size in (line.split() for line in lines))
