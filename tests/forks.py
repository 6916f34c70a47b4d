"""Processes of tests that import torch, as forks of one that has imported it: a rank starts in milliseconds.

    ranks = [forks.start("lakh", "train", recipe, "--json", RANK=str(rank), WORLD_SIZE="2") for rank in range(2)]
    done = ranks[0].finish(timeout_s=60)    # with its exit code, stdout and stderr

Each is `python -m MODULE` in a process and a session of its own, with its own environment and output.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from lakh.trainer.launch.fork_server import ForkedProcess, ForkServer, PythonCommand
from lakh.trainer.launch.launcher import PRELOAD, wait_until_ready

__all__ = ["Fork", "Forks"]

ROOT = Path(__file__).resolve().parents[1]
END_TIMEOUT_S = 60.0
start_server = ForkServer.start  # tests replace ForkServer.start by Forks.server, which needs the original


@dataclass(frozen=True)
class Fork:
    process: ForkedProcess
    stdout: Path
    stderr: Path

    def finish(self, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Wait for its end. A process that takes longer is killed, and the test fails."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise
        return subprocess.CompletedProcess([], code, self.stdout.read_text(), self.stderr.read_text())

    def end(self) -> None:
        """Kill it if it runs."""
        self.process.kill()
        self.process.wait(END_TIMEOUT_S)


class Forks:
    """Starts the fork server when it is first needed, and again if a test has killed it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, itertools.count()
        self._server: ForkServer | None = None

    def server(self) -> ForkServer:
        """A server that is alive. Launchers may close it; it stays."""
        if self._server is None or not self._server.is_alive():
            with pytest.MonkeyPatch.context() as patch:  # its forks find the modules of tests and bench
                patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
                self._server = start_server(PRELOAD, self._folder / "server.log")
            self._server.close = lambda: None  # type: ignore[method-assign]
        return self._server

    def start(self, module: str, *arguments: str, **environment: str) -> Fork:
        """`python -m MODULE ARGUMENTS` with these variables added to the environment."""
        server, number = self.server(), next(self._numbers)
        wait_until_ready(server, ())
        stdout, stderr = (self._folder / f"{name}-{number}" for name in ("stdout", "stderr"))
        command = PythonCommand(module, arguments, {**os.environ, **environment}, stdout, stderr)
        return Fork(server.fork(command), stdout, stderr)

    def close(self) -> None:
        if self._server is not None:
            ForkServer.close(self._server)
