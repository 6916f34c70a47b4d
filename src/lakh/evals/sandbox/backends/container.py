"""Isolation in a container, through the command line of docker or podman.

No network, a read-only image, a private /tmp of limited size, a PID namespace, limits on memory and processes by
control group, no capabilities but those that drop root. Inside, each process changes to a uid of its own and loads the
seccomp filter.

    gvisor    the runtime runsc: a user-space kernel handles system calls instead of the host's
    docker    the default runtime of docker or podman

Nothing is pulled: the image has to exist. It is $LAKH_EVAL_IMAGE, by default python:X.Y-slim of our own version; it
only needs a python3 of 3.11 or newer. A start takes about a second, once per worker. Who may use docker is root on the
host. The container is removed when its worker is closed, or when lakh dies, because that closes its stdin.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator

from lakh.errors import UserError
from lakh.evals import sandboxed
from lakh.evals.sandbox import isolation, seccomp
from lakh.evals.sandbox.verdict import SandboxLimits

__all__ = ["Container", "command", "find"]

ENGINES = ("docker", "podman")
INFO_TIMEOUT_S = 20.0
UIDS = range(20_000, 60_000)  # in the container; a rootless engine maps only the first 65,536
GVISOR_THREADS = 256  # its kernel is a program with many threads, which count too
_counter = itertools.count()


class Container:
    no_commands = "the image of a container has no tools of other languages"

    def __init__(self, *, gvisor: bool) -> None:
        engine = find()
        if engine is None:
            found = "there is no docker and no podman on the PATH"
            raise UserError("sandbox", found, "install podman or docker (apt-get install podman)")
        if gvisor and not _has_runsc(engine):
            raise UserError("sandbox", f"{engine} has no runtime runsc", "install gVisor (apt-get install runsc)")
        self._engine, self._gvisor, self._filter = engine, gvisor, seccomp.filter_bytes() or b""
        ours = f"python:{sys.version_info[0]}.{sys.version_info[1]}-slim"
        self._image = os.environ.get("LAKH_EVAL_IMAGE") or ours

    @property
    def description(self) -> str:
        name = "gvisor" if self._gvisor else "docker"
        filtered = "+seccomp" if self._filter else ""
        return f"{name}+rlimits{filtered}+cgroup ({self._engine}, image {self._image}, uid dropped from root)"

    @contextlib.contextmanager
    def launch(self, limits: SandboxLimits) -> Iterator[isolation.SandboxLaunch]:
        uid = UIDS.start + (os.getpid() * 64 + 2 * next(_counter)) % len(UIDS)
        setup = isolation.setup_message(
            uids=(uid, uid + 1), tmp="/tmp", pid_namespace=True, seccomp_filter=self._filter
        )
        name = f"lakh-eval-{os.getpid()}-{secrets.token_hex(4)}"
        yield isolation.SandboxLaunch(
            command(self._engine, self._image, name, limits, gvisor=self._gvisor),
            setup,
            environment=dict(os.environ),  # the engine's command needs its own settings, such as the daemon's address
            over_pipes=True,
            kill_command=(self._engine, "rm", "-f", name),
        )

    def probe(self) -> str:
        return _PROBE.replace("FILE", repr(__file__)).replace("FILTERED", str(bool(self._filter)))


def find() -> str | None:
    return next((name for name in ENGINES if shutil.which(name)), None)


def command(engine: str, image_name: str, name: str, limits: SandboxLimits, *, gvisor: bool) -> list[str]:
    """The whole command line. The first process reads requests from stdin."""
    arguments = [engine]
    if gvisor and engine == "podman":
        arguments += ["--runtime", "runsc", "--runtime-flag", "network=none"]
    arguments += ["run", "--rm", "-i", "--name", name, "--pull", "never", "--log-driver", "none"]
    if gvisor and engine == "docker":
        arguments += ["--runtime", "runsc"]
    arguments += ["--network", "none", "--read-only", "--hostname", "sandbox", "--user", "0:0", "--workdir", "/"]
    arguments += ["--cap-drop", "ALL", "--cap-add", "SETUID", "--cap-add", "SETGID", "--cap-add", "KILL"]
    arguments += ["--security-opt", "no-new-privileges"]
    arguments += ["--tmpfs", f"/tmp:rw,nosuid,nodev,mode=1777,size={limits.tmp_MiB}m"]
    memory_MiB, processes = isolation.total_limits(limits)
    arguments += ["--memory", f"{memory_MiB}m", "--memory-swap", f"{memory_MiB}m"]
    arguments += ["--pids-limit", str(processes + (GVISOR_THREADS if gvisor else 0))]
    for limit in ("nofile=1024:1024", "nproc=1024:1024", "core=0:0"):  # an engine's defaults may exceed its own rights
        arguments += ["--ulimit", limit]
    for key, value in isolation.ENVIRONMENT.items():
        if key != "PATH":  # the image's own PATH finds its Python
            arguments += ["--env", f"{key}={value}"]
    python = ("python3", *isolation.PYTHON_FLAGS, *sandboxed.command_line(start="relay", as_text=True))
    return [*arguments, image_name, *python]


def _has_runsc(engine: str) -> bool:
    if engine == "podman":
        return shutil.which("runsc") is not None
    info = [engine, "info", "--format", "{{json .Runtimes}}"]
    try:
        done = subprocess.run(info, capture_output=True, text=True, timeout=INFO_TIMEOUT_S, check=False)
        return done.returncode == 0 and "runsc" in (json.loads(done.stdout) or {})
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return False


_PROBE = (
    isolation.PROBE_HELPERS
    + """READ_ONLY = ("/probe", "/usr/probe", "/etc/probe")
def check():
    assert not os.path.exists(FILE), "files of the host are visible"
    assert os.getpid() < 64, "sees processes of the host"
"""
    + isolation.PROBE_NAMESPACES
)
