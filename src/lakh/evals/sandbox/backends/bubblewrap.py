"""Isolation with bubblewrap: namespaces for processes, network, IPC, host name and mounts, and a seccomp filter.

Of the host's files only the system folders and the Python that runs lakh are visible, read-only, without the packages
installed beside it. Packages that the user names are in /packages. /tmp is private and of limited size, there is no
/proc, and /dev has four harmless nodes.

The kernel exempts root from the limit on processes, under whatever name a user namespace gives it. Hence two setups:

    ordinary user   bubblewrap makes a user namespace in which the program runs as nobody
    root            no user namespace, so that a Python under /root (mode 700) can be bound at all. Candidate and
                    examiner each change to a uid that no other process has before they read a line of a program. Of
                    root's capabilities only those that this step needs, and SIGKILL to such a process, are kept.

Python is bound at its own path: a build with a shared libpython carries that path in its binary.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from lakh.errors import UserError
from lakh.evals.sandbox import isolation, seccomp
from lakh.evals.sandbox.packages import SandboxPackages
from lakh.evals.sandbox.verdict import SandboxLimits
from lakh.evals.sandboxed import messages

__all__ = ["Bubblewrap", "command"]

SYSTEM_FOLDERS = ("/usr", "/bin", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/alternatives")
MADE_FOLDERS = ("/dev", "/etc", "/nix")
PACKAGES = "/packages"
LANGUAGE_SETTINGS = ("java-*", "R")  # in /etc on Debian: a JVM does not start without them, R finds no packages
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class Bubblewrap:
    no_commands = None

    def __init__(self, packages: SandboxPackages | None = None) -> None:
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            found = "bubblewrap is not installed: there is no bwrap on the PATH"
            raise UserError("sandbox", found, "install it (apt-get install bubblewrap)")
        self._bwrap, self._filter, self._packages = bwrap, seccomp.filter_bytes(), packages

    @property
    def description(self) -> str:
        way = "uid dropped from root" if os.geteuid() == 0 else "user namespace"
        return f"bubblewrap+rlimits{'+seccomp' if self._filter else ''} ({way})"

    @contextlib.contextmanager
    def launch(self, limits: SandboxLimits) -> Iterator[isolation.SandboxLaunch]:
        folders = [PACKAGES] if self._packages else []
        setup = isolation.setup_message(
            tmp="/tmp", pid_namespace=True, packages=self._packages, package_folders=folders
        )
        descriptors = [] if self._filter is None else [messages.memory_file(self._filter)]
        try:
            for descriptor in descriptors:
                os.lseek(descriptor, 0, os.SEEK_SET)
            prefix = command(
                self._bwrap, tmp_bytes=limits.tmp_MiB << 20, seccomp_fds=descriptors, packages=self._packages
            )
            words = [*prefix, "--", *isolation.python_command()]
            yield isolation.SandboxLaunch(words, setup, inherited_fds=descriptors)
        finally:
            messages.close(*descriptors)

    def probe(self) -> str:
        return _PROBE.replace("VISIBLE", repr(_visible(self._packages))).replace("FILTERED", str(bool(self._filter)))


def command(
    bwrap: str, *, tmp_bytes: int, seccomp_fds: Sequence[int], packages: SandboxPackages | None = None
) -> list[str]:
    """Everything before the `--`."""
    arguments = [bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += ["--as-pid-1", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL"]
    if os.geteuid() == 0:
        arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_KILL"]
    else:
        arguments += ["--unshare-user", "--uid", str(isolation.NOBODY), "--gid", str(isolation.NOBODY)]
    for folder in MADE_FOLDERS:  # explicitly: bubblewrap would make them accessible to root only
        arguments += ["--dir", folder]
    for folder in (*SYSTEM_FOLDERS, *_language_settings()):
        arguments += ["--ro-bind-try", folder, folder]
    for device in DEVICES:
        arguments += ["--dev-bind", device, device]
    arguments += ["--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", "/tmp"]
    prefix = _python_prefix()
    if not any(prefix.is_relative_to(folder) for folder in SYSTEM_FOLDERS):
        for parent in reversed(prefix.parents[:-1]):  # explicitly, as above
            arguments += ["--dir", str(parent)]
        arguments += ["--ro-bind", str(prefix), str(prefix)]
    for folder in map(str, isolation.package_folders()):
        arguments += ["--tmpfs", folder, "--remount-ro", folder]
    if packages:
        arguments += ["--dir", PACKAGES]
        for entry in packages.entries:
            arguments += ["--ro-bind", str(entry), f"{PACKAGES}/{entry.name}"]
    arguments += ["--remount-ro", "/", "--chdir", "/tmp"]
    for descriptor in seccomp_fds:
        arguments += ["--seccomp", str(descriptor)]
    return arguments


def _language_settings() -> list[str]:
    return [str(path) for pattern in LANGUAGE_SETTINGS for path in Path("/etc").glob(pattern)]


def _python_prefix() -> Path:
    return Path(sys.base_prefix).resolve()


def _visible(packages: SandboxPackages | None) -> set[str]:
    """Names that may be in the sandbox's root folder."""
    return {Path(path).parts[1] for path in (*SYSTEM_FOLDERS, *MADE_FOLDERS, "/tmp", _python_prefix())} | (
        {Path(PACKAGES).name} if packages else set()
    )


_PROBE = (
    isolation.PROBE_HELPERS
    + """READ_ONLY = ("/probe", "/usr/probe", "/dev/probe")
def check():
    assert set(os.listdir("/")) <= VISIBLE, "folders of the host are visible"
    assert refused(open, "/etc/passwd"), "the host's users are visible"
    assert os.getsid(0) == 1, "sees processes of the host"  # its session began in process 1 of a new namespace
"""
    + isolation.PROBE_NAMESPACES
)
