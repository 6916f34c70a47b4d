"""The third rung: a container, by the command line of docker or podman; in gVisor's kernel where that is installed.

For machines where neither namespaces nor landlock may be used by us, but a container service runs. No network, a
read-only image, a private /tmp of a size, a PID namespace, limits on memory and processes by control group, no
capabilities but those that drop root; inside, each process becomes a uid of its own and gets the seccomp filter.

    gvisor    the runtime runsc: system calls are answered by a kernel in user space, not by the host's
    docker    whatever runtime docker or podman has by default

Nothing is pulled: the image has to be there. It is $LAKH_EVAL_IMAGE, by default python:X.Y-slim of our own version; all
that is needed of it is a python3 of 3.11 or newer. A start takes a second, which a cell pays once.

Costs of trust: whoever may use docker is root. The container is removed when its cell is closed, or when lakh dies: its
stdin ends then.
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
from lakh.evals import inside, seccomp
from lakh.evals.verdict import Limits
from lakh.evals.walls import ENVIRONMENT, PROBE_TOOLS, PYTHON_FLAGS, TOGETHER, Start

__all__ = ["Container", "command", "find", "image"]

ENGINES = ("docker", "podman")
ASK_TIMEOUT_S = 20.0
UIDS = range(20_000, 60_000)  # inside; a rootless engine maps only the first 65,536
OWN_PROCESSES = 8  # relay, first, examiner, zygote
GVISOR_THREADS = 256  # its kernel is a program with many threads, which count too
OWN_MEMORY_MiB = 256
_counter = itertools.count()


class Container:
    no_commands = "the image of a container has no tools of other languages"

    def __init__(self, engine: str, *, gvisor: bool) -> None:
        self._engine, self._gvisor = engine, gvisor
        self._image = image()
        self._filter = seccomp.filter_bytes() or b""

    @staticmethod
    def here(*, gvisor: bool) -> Container:
        """A UserError where there is no engine, or no runsc for it."""
        engine = find()
        if engine is None:
            found = "there is no docker and no podman on the PATH"
            raise UserError("sandbox", found, "install podman or docker (apt-get install podman)")
        if gvisor and not _has_runsc(engine):
            raise UserError("sandbox", f"{engine} has no runtime runsc", "install gVisor (apt-get install runsc)")
        return Container(engine, gvisor=gvisor)

    @property
    def description(self) -> str:
        name = "gvisor" if self._gvisor else "docker"
        seccomp_too = "+seccomp" if self._filter else ""
        return f"{name}+rlimits{seccomp_too}+cgroup ({self._engine}, image {self._image}, uid dropped from root)"

    @contextlib.contextmanager
    def opened(self, limits: Limits) -> Iterator[Start]:
        first = UIDS.start + (os.getpid() * 64 + 2 * next(_counter)) % len(UIDS)
        setup = {
            "own_walls": False,
            "own_pids": True,
            "tmp": "/tmp",
            "uids": [first, first + 1],
            "filter": self._filter.hex(),
        }
        name = f"lakh-eval-{os.getpid()}-{secrets.token_hex(4)}"
        words = command(self._engine, self._image, name, limits, gvisor=self._gvisor)
        # The engine's own command needs its environment: where its service listens, and as whom.
        yield Start(
            words, setup, environment=dict(os.environ), frames=True, end_command=(self._engine, "rm", "-f", name)
        )

    def probe(self) -> str:
        return _PROBE.replace("FILE", repr(__file__)).replace("FILTERED", str(bool(self._filter)))


def find() -> str | None:
    return next((name for name in ENGINES if shutil.which(name)), None)


def image() -> str:
    return os.environ.get("LAKH_EVAL_IMAGE") or f"python:{sys.version_info[0]}.{sys.version_info[1]}-slim"


def command(engine: str, image_name: str, name: str, limits: Limits, *, gvisor: bool) -> list[str]:
    """The whole command line; the first process inside takes orders on stdin."""
    words = [engine]
    if gvisor and engine == "podman":
        words += ["--runtime", "runsc", "--runtime-flag", "network=none"]
    words += ["run", "--rm", "-i", "--name", name, "--pull", "never", "--log-driver", "none"]
    if gvisor and engine == "docker":
        words += ["--runtime", "runsc"]
    words += ["--network", "none", "--read-only", "--hostname", "sandbox", "--user", "0:0", "--workdir", "/"]
    words += ["--cap-drop", "ALL", "--cap-add", "SETUID", "--cap-add", "SETGID", "--cap-add", "KILL"]
    words += ["--security-opt", "no-new-privileges"]
    words += ["--tmpfs", f"/tmp:rw,nosuid,nodev,mode=1777,size={limits.tmp_MiB}m"]
    memory_MiB = TOGETHER * limits.memory_MiB + limits.tmp_MiB + OWN_MEMORY_MiB
    words += ["--memory", f"{memory_MiB}m", "--memory-swap", f"{memory_MiB}m"]
    processes = limits.processes + OWN_PROCESSES + (GVISOR_THREADS if gvisor else 0)
    words += ["--pids-limit", str(processes)]
    for limit in (
        "nofile=1024:1024",
        "nproc=1024:1024",
        "core=0:0",
    ):  # engines ask for more than they may have themselves
        words += ["--ulimit", limit]
    for key, value in ENVIRONMENT.items():
        if key != "PATH":  # the image knows where its Python is
            words += ["--env", f"{key}={value}"]
    return [*words, image_name, "python3", *PYTHON_FLAGS, *inside.command_line(start="relay", as_text=True)]


def _has_runsc(engine: str) -> bool:
    if engine == "podman":
        return shutil.which("runsc") is not None
    asked = [engine, "info", "--format", "{{json .Runtimes}}"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False)
        return done.returncode == 0 and "runsc" in (json.loads(done.stdout) or {})
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return False


_PROBE = (
    PROBE_TOOLS
    + """def check():
    assert not os.path.exists(FILE), "files of the host are visible"
    assert os.listdir("/tmp") == [], "/tmp is not private"
    for path in ("/probe", "/usr/probe", "/etc/probe", os.path.join(os.path.dirname(os.__file__), "probe")):
        assert refused(open, path, "w"), "can write to " + path
    with open("/tmp/probe", "w") as file:
        file.write("x")
    os.remove("/tmp/probe")
    assert os.getuid() != 0 and os.geteuid() != 0, "runs as root"
    assert refused(os.setuid, 0), "can become root"
    assert refused(socket.socket) or {name for _, name in socket.if_nameindex()} <= {"lo"}, "reaches a network"
    assert os.getpid() < 64, "sees processes of the host"
    assert not FILTERED or ctypes.CDLL(None).unshare(0x10000000) != 0, "can make user namespaces"
    assert refused(forks_without_end), "the number of processes is not limited"
"""
)
