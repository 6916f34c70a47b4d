"""A warm worker: one isolated process tree that runs one program after another.

A worker is used again only while it reports itself clean; otherwise it is closed, which ends everything in it. All its
processes are in one control group if groups can be made (cgroup.py); elsewhere their memory is polled. For one thread
at a time. Every wait has a limit: START_TIMEOUT_S, the program's wall limit, EXIT_TIMEOUT_S.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lakh.child_process import ChannelClosed, exit_reason
from lakh.errors import Interrupted
from lakh.evals.sandbox.cgroup import ControlGroup, ControlGroupParent
from lakh.evals.sandbox.channel import PipeChannel, SandboxChannel, SocketChannel
from lakh.evals.sandbox.isolation import TOTAL_MEMORY_FACTOR, IsolationBackend, SandboxLaunch, total_limits
from lakh.evals.sandbox.program import NONCE, CommandProgram, Program
from lakh.evals.sandbox.resident_memory import IdleWatch, descendants, resident_MiB
from lakh.evals.sandbox.verdict import SandboxLimits, SandboxVerdict, decide

__all__ = ["SandboxWorker", "WorkerIdle", "WorkerLost", "WorkerOutOfMemory"]

START_TIMEOUT_S = 60.0  # for bubblewrap and Python to start, on a machine that swaps
RESPONSE_TIMEOUT_S = 30.0  # beyond the program's own wall limit
EXIT_TIMEOUT_S = 10.0
TICK_S = 0.2  # how soon a stop is noticed, and how often memory is polled


class WorkerLost(Exception):
    """The first process is gone or does not respond; the text is its last line on stderr."""


class WorkerOutOfMemory(Exception):
    """All processes together use more memory than they may."""


class WorkerIdle(Exception):
    """All processes sleep."""


class SandboxWorker:
    def __init__(
        self, backend: IsolationBackend, limits: SandboxLimits, stopping: threading.Event,
        groups: ControlGroupParent | None = None, *, has_packages: bool = False, only_commands: bool = False,
    ) -> None:  # fmt: skip
        """`only_commands` leaves the import of packages to the programs: commands start an interpreter of their own."""
        self._limits, self._stopping, self._has_packages = limits, stopping, has_packages
        self._only_commands = only_commands
        self._own_MiB = 0  # of imported packages, in each process before any program
        self._channel: SandboxChannel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._group: ControlGroup | None = None
        self._launch: SandboxLaunch | None = None
        try:
            with backend.launch(limits) as launch:
                self._launch = launch
                if groups is not None and not launch.over_pipes:
                    self._group = groups.make(*total_limits(limits))
                self._start(launch)
                self._receive(time.monotonic() + START_TIMEOUT_S)
                if has_packages and not only_commands and self._group is None and self._process is not None:
                    self._own_MiB = resident_MiB(self._process.pid)
        except OSError as error:
            self.close()
            raise WorkerLost(f"cannot start: {error}") from None
        except ChannelClosed:
            reason = self._last_error()
            self.close()
            raise WorkerLost(reason) from None
        except BaseException:
            self.close()
            raise

    def fits(self, limits: SandboxLimits, *, of_commands: bool) -> bool:
        """Whether such a program with these limits can run here: some are set when the worker starts."""
        if self._only_commands and not of_commands:
            return False
        return all(getattr(limits, key) == getattr(self._limits, key) for key in ("tmp_MiB", "memory_MiB", "processes"))

    def run(self, program: Program | CommandProgram, limits: SandboxLimits) -> tuple[SandboxVerdict, bool]:
        """The verdict, and whether the worker can be used again."""
        nonce = secrets.token_hex(16)
        assert self._channel is not None
        try:
            request = _request(isinstance(program, CommandProgram), limits, self._has_packages)
            self._channel.send_request(request, self._texts(program, nonce))
            deadline_s = time.monotonic() + limits.wall_s + RESPONSE_TIMEOUT_S
            response, outcome = self._receive(deadline_s, idle_s=limits.idle_s)
        except ChannelClosed:
            self._check_memory()
            raise WorkerLost(self._last_error()) from None
        verdict = decide(response, outcome, nonce, limits)
        if not verdict.passed:
            self._check_memory()
        return verdict, bool(response["clean"])

    def close(self) -> None:
        """End everything in the worker. Closing the channel ends the first process, and the others with it."""
        if self._channel is not None:
            self._channel.close()
        process = self._process
        if process is not None:
            try:
                process.wait(EXIT_TIMEOUT_S)  # bubblewrap exits when the last process in it is gone
            except subprocess.TimeoutExpired:
                self._kill(process)
            if process.stderr:
                process.stderr.close()
        if self._group is not None:
            self._group.remove()
        for folder in self._launch.removes if self._launch is not None else ():
            shutil.rmtree(folder, ignore_errors=True)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        assert self._launch is not None
        if self._launch.kill_command:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(self._launch.kill_command, capture_output=True, timeout=EXIT_TIMEOUT_S, check=False)
        # Descendants first: bubblewrap waits for the processes in it, and its own end would orphan them.
        for pid in descendants(process.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_TIMEOUT_S)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_TIMEOUT_S)

    def _start(self, launch: SandboxLaunch) -> None:
        # Not child_process.ChildProcess: its kill reaches one process, and a worker is a tree (see _kill).
        stdin = subprocess.PIPE
        if not launch.over_pipes:
            self._channel = channel = SocketChannel()
            stdin = channel.remote.fileno()
        self._process = process = subprocess.Popen(
            launch.command,
            stdin=stdin,
            stdout=subprocess.PIPE if launch.over_pipes else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=launch.environment,
            cwd=launch.folder,
            pass_fds=launch.inherited_fds,
            start_new_session=True,
        )
        if self._group is not None:
            self._group.add(process.pid)  # and its children: they fork nothing before they get the setup
        if process.stdin is not None and process.stdout is not None:
            self._channel = PipeChannel(os.dup(process.stdin.fileno()), os.dup(process.stdout.fileno()))
            process.stdin.close()
            process.stdout.close()
        assert self._channel is not None
        setup = launch.setup | {"package_modules": []} if self._only_commands else launch.setup
        self._channel.send_setup(setup, launch.setup_fds)

    def _receive(self, deadline_s: float, *, idle_s: float | None = None) -> tuple[dict[str, Any], bytes]:
        """`idle_s` is for a program: its memory is polled, and it may sleep so long."""
        assert self._channel is not None
        assert self._process is not None
        watch = None
        if idle_s is not None and self._launch is not None and not self._launch.over_pipes:
            watch = IdleWatch(self._process.pid, idle_s)
        while True:
            left_s = deadline_s - time.monotonic()
            if self._stopping.is_set():
                raise Interrupted("sandbox", "stopped while a program was running", "run the same command again")
            if left_s <= 0:
                raise WorkerLost("no response in time")
            try:
                return self._channel.receive(min(left_s, TICK_S))
            except TimeoutError:
                if idle_s is not None:
                    self._check_memory(poll=True)
                if watch is not None and watch.is_idle(time.monotonic()):
                    self._kill(self._process)
                    raise WorkerIdle(f"slept for {idle_s:g} s") from None

    def _check_memory(self, *, poll: bool = False) -> None:
        """Raise WorkerOutOfMemory if the group had an OOM kill or, without a group, if polling finds too much."""
        limit_MiB = TOTAL_MEMORY_FACTOR * self._limits.memory_MiB
        assert self._process is not None
        if self._group is not None:
            too_much = self._group.oom_kills() > 0
        else:
            too_much = poll and resident_MiB(self._process.pid) > limit_MiB + self._own_MiB
        if too_much:
            self._kill(self._process)  # closing the channel would wait for a program that sleeps
            raise WorkerOutOfMemory(f"all processes together hold more than {limit_MiB} MiB")

    def _texts(self, program: Program | CommandProgram, nonce: str) -> Sequence[bytes]:
        if isinstance(program, CommandProgram):
            assert self._launch is not None
            files = {name: text.replace(NONCE, nonce) for name, text in program.files.items()}
            folders = self._launch.setup["package_folders"]
            environment = program.environment | ({"PYTHONPATH": ":".join(folders)} if folders else {})
            document = {"files": files, "commands": program.commands, "environment": environment, "nonce": nonce}
            document["failure"] = program.failure
            return [json.dumps(document).encode()]
        test = {"nonce": nonce, "reference": program.reference, "names": program.names, "test": program.test}
        return [program.source.encode("utf-8", "surrogatepass"), json.dumps(test).encode()]

    def _last_error(self) -> str:
        """The last line on stderr, after the process has ended."""
        if self._channel is not None:
            self._channel.close()
        if self._process is None or self._process.stderr is None:
            return "cannot start"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        os.set_blocking(self._process.stderr.fileno(), False)
        lines = (self._process.stderr.read() or b"").decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:300] if lines else f"no response: {exit_reason(self._process.returncode)}"


@functools.lru_cache(maxsize=256)
def _request(of_commands: bool, limits: SandboxLimits, has_packages: bool) -> dict[str, Any]:
    """Shared by programs with the same limits: do not modify."""
    limit_data = of_commands or has_packages
    return {"mode": "commands" if of_commands else "python", "limits": asdict(limits) | {"limit_data": limit_data}}
