"""Start processes as forks of one that has imported torch, so that ranks start in milliseconds. Imports torch only in
the fork server.

    server = ForkServer.start(["lakh.trainer.loop"], log, pass_fds=[lock])
    process = server.fork(PythonCommand("lakh", ["resume", run_dir], environment, stdout, stderr))
    process.poll()

The imports of a rank take seconds of CPU time, and every rank of every attempt would pay for them. The fork server pays
once, and its forks share the memory. It has no threads of its own and never touches a GPU, so a fork may initialise
CUDA. It ignores SIGINT and SIGTERM, because the launcher decides when work ends, and it is the parent of its forks: it
reports their exit codes and delivers signals to them, so that no signal reaches a process id that was used again. If
it dies, its forks get SIGTERM, and they count as killed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lakh.child_process import Channel, ChannelClosed, die_with_parent
from lakh.errors import PeerLost
from lakh.trainer.tuning.memory import keep_freed_memory

__all__ = ["ForkServer", "ForkedProcess", "PythonCommand"]

POLL_S = 0.05
FORK_TIMEOUT_S = 30.0
END_TIMEOUT_S = 30.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class PythonCommand:
    """`python -m MODULE ARGUMENTS`."""

    module: str
    arguments: Sequence[str]
    environment: dict[str, str]
    stdout: Path
    stderr: Path


class ForkServer:
    """The launcher's side: starts the server and speaks with it."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self.pid = process.pid
        self._process, self._channel = process, channel
        self._forks: dict[int, ForkedProcess] = {}
        self.is_ready = False
        """Whether its imports are done."""

    @staticmethod
    def start(preload: Sequence[str], log: Path, *, pass_fds: Sequence[int] = ()) -> ForkServer:
        """Start a server that imports the modules `preload`. Returns at once; poll `is_alive` until `is_ready`."""
        ours, theirs = Channel.pair()
        code = "from lakh.trainer.launch.fork_server import _serve; _serve()"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid()), *preload],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno(), *pass_fds],
                start_new_session=True,  # Ctrl-C in the terminal reaches only the launcher
            )
        theirs.close()
        return ForkServer(process, ours)

    def is_alive(self) -> bool:
        """Whether the server runs. Takes note of what it has reported."""
        try:
            while self._channel.poll():
                self._take_note(*self._channel.receive())
        except ChannelClosed:
            for fork in self._forks.values():
                fork.returncode = -signal.SIGKILL
            self._forks.clear()
            return False
        return True

    def fork(self, command: PythonCommand) -> ForkedProcess:
        """Start a process; the server must be ready. Raises PeerLost if the server dies."""
        try:
            self._channel.send(("fork", command, 0))
            while True:
                kind, pid, code = self._channel.receive(FORK_TIMEOUT_S)
                if kind == "forked":
                    break
                self._take_note(kind, pid, code)
        except (ChannelClosed, TimeoutError) as error:
            self.is_alive()
            raise PeerLost("the fork server of the ranks", str(error), "lakh resume continues the run") from None
        self._forks[pid] = ForkedProcess(self, pid)
        return self._forks[pid]

    def _take_note(self, kind: str, pid: int, code: int) -> None:
        if kind == "ready":
            self.is_ready = True
        elif kind == "exited" and pid in self._forks:
            self._forks.pop(pid).returncode = code

    def send_signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(ChannelClosed):  # then the process has ended, or is about to
            self._channel.send(("signal", pid, number))

    def close(self) -> None:
        """End the server; forks that still run get SIGTERM."""
        self._channel.close()
        if not self.is_ready:  # it would first finish its imports, and it has no forks yet
            self._process.kill()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ForkedProcess:
    """One fork, with the methods of subprocess.Popen that the launcher uses."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self._server.is_alive()
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        deadline_s = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            self._server.send_signal(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# --- in the server --------------------------------------------------------------------------------------------------


def _serve() -> None:
    descriptor, launcher_pid, *preload = sys.argv[1:]
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    die_with_parent(int(launcher_pid), signal.SIGKILL)
    keep_freed_memory()
    for module in preload:
        with contextlib.suppress(ImportError):  # a fork that needs it raises the error where it can report it
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # the collector would write to pages that the forks share
    command = _answer_requests(Channel(int(descriptor)))
    if command is None:
        return
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    _become(command)


def _answer_requests(channel: Channel) -> PythonCommand | None:
    """Fork, deliver signals and report exits until the launcher closes the channel; in a fork, returns its command."""
    forks: set[int] = set()
    with contextlib.suppress(ChannelClosed):
        channel.send(("ready", 0, 0))
        while True:
            while forks and (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                forks.discard(ended[0])
                channel.send(("exited", ended[0], os.waitstatus_to_exitcode(ended[1])))
            if not channel.poll(POLL_S):
                continue
            kind, content, number = channel.receive()
            if kind == "signal" and content in forks:
                os.kill(content, number)
            if kind == "fork":
                signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # a fork takes them when it has its handlers
                pid = os.fork()
                if pid == 0:
                    channel.close()
                    command: PythonCommand = content
                    return command
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
                forks.add(pid)
                channel.send(("forked", pid, 0))
    return None


def _become(command: PythonCommand) -> None:
    """Turn this process into `command`, in a session of its own."""
    os.setsid()
    for path, stream in ((command.stdout, 1), (command.stderr, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(command.environment)
    sys.argv = [command.module, *command.arguments]
    runpy.run_module(command.module, run_name="__main__", alter_sys=True)
