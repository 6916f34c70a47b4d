"""Isolation without namespaces: the kernel refuses file access (landlock) and system calls (seccomp).

For machines where bubblewrap is missing or may not make namespaces. Needs no package and no privileges.

Isolated: only the system folders and Python can be read, without installed packages, and nothing can be written, /tmp
included. No sockets, no signals to other processes, no changes of their limits. Nothing that a program starts can leave
its process group, which is killed. As root, each process changes to a uid of its own.

Not isolated: names and sizes of the host's files are visible, and there is no PID namespace. For an ordinary user the
limit on processes counts all processes of that user, so it is set above the number that ran when the worker started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from lakh.errors import UserError
from lakh.evals.sandbox import isolation, seccomp
from lakh.evals.sandbox.packages import SandboxPackages
from lakh.evals.sandbox.verdict import SandboxLimits

__all__ = ["Landlock"]

CREATE_RULESET, ADD_RULE = 444, 445  # the same numbers on every architecture
VERSION_FLAG, PATH_BENEATH = 1, 1
MIN_ABI = 3  # the first that also refuses truncation (Linux 6.2)
# Rights: execute 1, write file 2, read file 4, read dir 8, then remove, make, refer, truncate, ioctl up to 1 << 15.
READ, READ_FILE, READ_DIR = 1 | 4 | 8, 4, 8
READ_AND_RUN_FILE = 1 | 4
READABLE_FOLDERS = ("/usr", "/bin", "/lib", "/lib64", "/nix/store", "/etc/alternatives")
READABLE_FILES = ("/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class Landlock:
    no_commands = "this sandbox has no /tmp to compile in"

    def __init__(self, packages: SandboxPackages | None = None) -> None:
        abi = _syscall(CREATE_RULESET, None, 0, VERSION_FLAG)
        if abi < MIN_ABI:
            found = "landlock is not available" if abi < 0 else f"landlock has version {abi} and {MIN_ABI} is needed"
            raise UserError("sandbox", found, "use Linux 6.2 or newer with landlock enabled")
        seccomp_filter = seccomp.filter_bytes(without_namespaces=True)
        if seccomp_filter is None:
            raise UserError("sandbox", "landlock needs a seccomp filter", "use x86_64 or aarch64")
        self._abi, self._filter, self._packages = abi, seccomp_filter, packages

    @property
    def description(self) -> str:
        way = "uid dropped from root" if os.geteuid() == 0 else "same uid"
        return f"landlock+seccomp+rlimits (version {self._abi}, nothing writable, {way})"

    @contextlib.contextmanager
    def launch(self, limits: SandboxLimits) -> Iterator[isolation.SandboxLaunch]:
        rights = (1 << (15 if self._abi < 5 else 16)) - 1
        attributes = struct.pack("<QQ", rights, 0)[: 8 if self._abi < 4 else 16]
        ruleset = _syscall(CREATE_RULESET, attributes, len(attributes), 0)
        if ruleset < 0:
            raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
        os.set_inheritable(ruleset, False)
        package_folders = [self._packages.linked()] if self._packages else []
        try:
            hidden = isolation.package_folders()
            for folder in {Path(path).resolve() for path in (*READABLE_FOLDERS, sys.base_prefix)}:
                _allow_except(ruleset, folder, hidden)
            for package_folder in package_folders:
                _allow(ruleset, package_folder, READ)
            for entry in self._packages.entries if self._packages else ():
                _allow(ruleset, str(entry), READ if entry.is_dir() else READ_AND_RUN_FILE)
            for file in READABLE_FILES:
                _allow(ruleset, file, READ_FILE | (2 if file == "/dev/null" else 0))
            setup = isolation.setup_message(
                tmp=None, pid_namespace=False, seccomp_filter=self._filter, use_landlock=True,
                processes_before=0 if os.geteuid() == 0 else _threads_of(os.getuid()),
                packages=self._packages, package_folders=package_folders,
            )  # fmt: skip
            yield isolation.SandboxLaunch(
                isolation.python_command(), setup, setup_fds=(ruleset,), removes=package_folders
            )
        except BaseException:
            for package_folder in package_folders:
                shutil.rmtree(package_folder, ignore_errors=True)
            raise
        finally:
            os.close(ruleset)

    def probe(self) -> str:
        home = os.path.expanduser("~")  # noqa: PTH111 - Path's raises for a user without one
        return _PROBE.replace("HOME", repr(home)).replace("FILE", repr(__file__))


def _allow_except(ruleset: int, path: Path, hidden: Sequence[Path]) -> None:
    """Allow a tree without the hidden folders: rules only add rights, so their siblings are allowed one by one."""
    if path in hidden:
        return
    if not any(folder.is_relative_to(path) for folder in hidden):
        _allow(ruleset, str(path), READ if path.is_dir() else READ_AND_RUN_FILE)
        return
    _allow(ruleset, str(path), READ_DIR)  # the import system lists folders; names below are visible, contents are not
    for child in path.iterdir():
        if not child.is_symlink():
            _allow_except(ruleset, child, hidden)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not every system has every folder
    try:
        rule = struct.pack("<Qi", rights, descriptor)
        if _syscall(ADD_RULE, ruleset, PATH_BENEATH, rule, 0) != 0:
            raise OSError(ctypes.get_errno(), f"landlock rule for {path}")
    finally:
        os.close(descriptor)


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    converted = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return int(libc.syscall(ctypes.c_long(number), *converted))


def _threads_of(uid: int) -> int:
    """Processes and threads that a user has now."""
    count = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if folder.stat().st_uid == uid:
                    count += len(list((folder / "task").iterdir()))
    return count


_PROBE = (
    isolation.PROBE_HELPERS
    + """def check():
    assert refused(open, "/etc/passwd"), "the host's users can be read"
    assert refused(open, FILE), "files outside the system folders can be read"
    assert refused(os.listdir, "/proc"), "/proc can be read"
    assert refused(os.listdir, HOME), "the home folder can be read"
    for path in ("/probe", "/usr/probe", "/dev/shm/probe", "/tmp/probe", "/var/tmp/probe"):
        assert refused(open, path, "w"), "can write to " + path
    assert refused(os.mkdir, "/tmp/probe"), "can make a folder"
    assert os.getuid() != 0 and os.geteuid() != 0, "runs as root"
    assert refused(os.setuid, 0), "can become root"
    assert refused(socket.socket), "reaches a network"
    assert refused(os.kill, os.getppid(), 0), "can send signals to others"
    assert refused(os.chmod, "/tmp", 0o700), "can change modes"
    assert refused(os.setsid), "can leave its process group"
"""
)
