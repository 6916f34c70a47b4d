"""Runs one program behind walls and says how it ended.

`Sandbox.choose()` tries the walls on a program that attempts to get out, and refuses to go on where they do not hold:
code that a model wrote never runs unprotected unless `unsafe=True` says so. What was chosen is in `description`, which
goes into every result.

The CPU limit is the real one: it gives the same verdict on a slow, loaded machine as on a fast one. The wall limit is a
generous backstop for programs that sleep.

Not limited here: the memory of all processes of one program together (each has its own limit, and their number is
limited), and disk traffic. A cgroup would do both.

Knows nothing of benchmarks or models. Safe to use from many threads; a thread must outlive the run it started.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from lakh.config import require_positive
from lakh.errors import ConfigError, Interrupted, UserError
from lakh.evals import bubblewrap, seccomp
from lakh.evals.task import Program

__all__ = ["Kind", "Limits", "Sandbox", "Verdict"]

Kind = Literal["passed", "failed", "timeout", "memory", "output", "sandbox_error"]

START_TIMEOUT_S = 60.0  # for bubblewrap and Python to start, on a machine that swaps
EXIT_TIMEOUT_S = 10.0
TICK_S = 0.2  # how soon a run notices that it is to stop
ANSWER_BYTES = 1 << 16
UNSAFE_HINT = "or accept the risk with --unsafe"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    cpu_s: int = 10
    """CPU seconds of one process."""
    wall_s: float = 60.0
    """Wall-clock seconds of the whole program: a backstop."""
    memory_MiB: int = 1024
    """Address space of one process."""
    file_MiB: int = 16
    """Size of one file."""
    tmp_MiB: int = 64
    """Size of /tmp."""
    processes: int = 16
    """Processes and threads at one time, the harness among them."""
    output_KiB: int = 1024
    """What may be written to stdout and stderr together."""

    def __post_init__(self) -> None:
        require_positive(self, "cpu_s", "memory_MiB", "file_MiB", "tmp_MiB", "processes", "output_KiB")
        if not 0 < self.wall_s < 86_400:
            raise ConfigError("wall_s", f"{self.wall_s} is out of range", "choose a number of seconds below a day")


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: Kind
    detail: str = ""
    cpu_s: float = 0.0
    wall_s: float = 0.0

    @property
    def passed(self) -> bool:
        return self.kind == "passed"


class Sandbox:
    """Made by `choose`. Close it, or use it as a context manager, to stop what still runs."""

    def __init__(self, bwrap: str | None) -> None:
        self._bwrap = bwrap
        self._seccomp = seccomp.filter_bytes() if bwrap else None
        self._harness = (Path(__file__).parent / "harness.py").read_text(encoding="utf-8")
        self._stopping = threading.Event()

    @staticmethod
    def choose(*, unsafe: bool = False) -> Sandbox:
        """The walls that hold on this machine; an error where none do and `unsafe` is not given."""
        if unsafe:
            sandbox = Sandbox(None)
            verdict = sandbox.run(Program("", "assert True"))
            if not verdict.passed:
                raise UserError("unsafe run", f"cannot start Python ({verdict.detail})", "check the installation")
            return sandbox
        if not sys.platform.startswith("linux"):
            raise UserError("sandbox", f"there is none for {sys.platform}", f"run this on Linux, {UNSAFE_HINT}")
        bwrap = bubblewrap.find()
        if bwrap is None:
            todo = f"install it (apt-get install bubblewrap), {UNSAFE_HINT}"
            raise UserError("sandbox", "bubblewrap is not installed: there is no bwrap on the PATH", todo)
        sandbox = Sandbox(bwrap)
        sandbox._prove()
        return sandbox

    @property
    def description(self) -> str:
        if self._bwrap is None:
            return "none (--unsafe: rlimits only)"
        way = "uid dropped from root" if os.geteuid() == 0 else "user namespace"
        return f"bubblewrap+rlimits{'+seccomp' if self._seccomp else ''} ({way})"

    def run(self, program: Program, limits: Limits | None = None) -> Verdict:
        """Run one program to its end. When this returns, nothing that the program started is left alive."""
        limits = limits or Limits()
        with contextlib.ExitStack() as stack:
            command, descriptors, folder = stack.enter_context(self._walls(limits))
            uid = bubblewrap.next_uid() if self._bwrap else 0
            order = {"source": program.source, "test": program.test, "uid": uid, "limits": asdict(limits)}
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=bubblewrap.ENVIRONMENT,
                    cwd=folder,
                    pass_fds=descriptors,
                    start_new_session=True,
                )
            except OSError as error:
                return Verdict("sandbox_error", f"cannot start: {error}")
            try:
                deadline_s = time.monotonic() + START_TIMEOUT_S + limits.wall_s
                answer, complaint = self._converse(process, marshal.dumps(order), deadline_s)
            finally:
                self._end(process)
        if self._stopping.is_set():
            raise Interrupted("sandbox", "stopped while a program was running", "run the same command again")
        return _read_verdict(answer, complaint)

    def stop(self) -> None:
        """End every program that still runs, soon; later ones do not start."""
        self._stopping.set()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @contextlib.contextmanager
    def _walls(self, limits: Limits) -> Iterator[tuple[list[str], tuple[int, ...], str]]:
        """The command, the descriptors it inherits, and the folder it starts in."""
        inner = [bubblewrap.interpreter(), *bubblewrap.PYTHON_FLAGS, "-c", self._harness]
        if self._bwrap is None:
            folder = tempfile.mkdtemp(prefix="lakh-unsafe-")
            try:
                yield inner, (), folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return
        tmp_bytes = limits.tmp_MiB << 20
        if self._seccomp is None:
            yield [*bubblewrap.command(self._bwrap, tmp_bytes=tmp_bytes, seccomp_fd=None), "--", *inner], (), "/"
            return
        descriptor = os.memfd_create("seccomp")
        try:
            os.write(descriptor, self._seccomp)
            os.lseek(descriptor, 0, os.SEEK_SET)
            outer = bubblewrap.command(self._bwrap, tmp_bytes=tmp_bytes, seccomp_fd=descriptor)
            yield [*outer, "--", *inner], (descriptor,), "/"
        finally:
            os.close(descriptor)

    def _converse(self, process: subprocess.Popen[bytes], order: bytes, deadline_s: float) -> tuple[bytes, bytes]:
        """Hand over the order and take the answer. Stdin stays open: the harness lives as long as it does."""
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        received = {process.stdout: b"", process.stderr: b""}
        os.set_blocking(process.stdin.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdin, selectors.EVENT_WRITE)
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(process.stderr, selectors.EVENT_READ)
            while process.stdout in selector.get_map():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._stopping.is_set():
                    break
                for key, _ in selector.select(min(left_s, TICK_S)):
                    if key.fileobj is process.stdin:
                        try:
                            order = order[os.write(process.stdin.fileno(), order) :]
                        except BrokenPipeError:
                            order = b""
                        if not order:
                            selector.unregister(process.stdin)
                        continue
                    pipe = process.stdout if key.fileobj is process.stdout else process.stderr
                    block = os.read(pipe.fileno(), ANSWER_BYTES)
                    received[pipe] = (received[pipe] + block)[:ANSWER_BYTES]
                    if not block:
                        selector.unregister(pipe)
        return received[process.stdout], received[process.stderr]

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Whatever happened, leave nothing behind. Closing stdin ends the harness, and it is process 1 of its own."""
        if process.stdin:
            with contextlib.suppress(OSError):
                process.stdin.close()
        if self._bwrap is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_TIMEOUT_S)
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()

    def _prove(self) -> None:
        """Run a program that tries the walls; it passes only where all of them hold."""
        probe = _PROBE.replace("VISIBLE", repr(bubblewrap.visible())).replace("FILTERED", str(bool(self._seccomp)))
        verdict = self.run(Program(probe, "check()"), Limits(cpu_s=5, wall_s=30, processes=8))
        if verdict.passed:
            return
        if verdict.kind == "sandbox_error":
            raise UserError(
                "sandbox",
                f"bubblewrap cannot start here ({verdict.detail})",
                "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, or bwrap's AppArmor profile; in a "
                f"container, more privileges) and have bubblewrap 0.7 or newer, {UNSAFE_HINT}",
            )
        todo = f"report it with the output of lakh doctor, {UNSAFE_HINT}"
        raise UserError("sandbox", f"its self-test ended as {verdict.kind} ({verdict.detail})", todo)


_PROBE = """
import ctypes, os, socket, time
def refused(call, *arguments):
    try:
        call(*arguments)
    except OSError:
        return True
    return False
def forks_without_end():
    for _ in range(32):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
def check():
    assert set(os.listdir("/")) <= VISIBLE, "folders of the host are visible"
    assert os.listdir("/tmp") == [], "/tmp is not private"
    assert refused(open, "/etc/passwd"), "the host's users are visible"
    for path in ("/probe", "/usr/probe", "/dev/probe", os.path.join(os.path.dirname(os.__file__), "probe")):
        assert refused(open, path, "w"), "can write to " + path
    with open("/tmp/probe", "w") as file:
        file.write("x")
    assert os.getuid() != 0 and os.geteuid() != 0, "runs as root"
    assert refused(os.setuid, 0), "can become root"
    assert refused(socket.socket) or {name for _, name in socket.if_nameindex()} <= {"lo"}, "reaches a network"
    assert os.getpid() < 4, "sees processes of the host"
    assert not FILTERED or ctypes.CDLL(None).unshare(0x10000000) != 0, "can make user namespaces"
    assert refused(forks_without_end), "the number of processes is not limited"
"""


def _read_verdict(answer: bytes, complaint: bytes) -> Verdict:
    kind, cpu_s, wall_s, detail = ([*answer.decode("ascii", "replace").rstrip("\n").split("\t", 3)] + [""] * 4)[:4]
    if kind in get_args(Kind):
        with contextlib.suppress(ValueError):
            return Verdict(kind, detail, float(cpu_s), float(wall_s))  # type: ignore[arg-type]
    lines = complaint.decode("utf-8", "replace").strip().splitlines()
    return Verdict("sandbox_error", lines[-1][:300] if lines else "no answer from inside")
