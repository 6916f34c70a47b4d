"""A cell: one set of walls with the first process inside, kept warm for one program after another.

A program's texts go in as sealed memory files, its verdict comes back over a pipe of its own. The cell is used again
only while it reports itself clean; otherwise it is closed, which ends everything in it, and a new one is started.

Not for two threads at one time. Every wait has its limit: START_TIMEOUT_S, the program's wall limit, EXIT_TIMEOUT_S.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lakh.errors import Interrupted
from lakh.evals.resident import resident_MiB
from lakh.evals.task import Commands, Program
from lakh.evals.verdict import Limits, Verdict, decide
from lakh.evals.walls import Walls

__all__ = ["Cell", "CellLost", "CellTooLarge"]

START_TIMEOUT_S = 60.0  # for bubblewrap and Python to start, on a machine that swaps
REPORT_TIMEOUT_S = 30.0  # beyond the program's own wall limit
EXIT_TIMEOUT_S = 10.0
TICK_S = 0.2  # how soon a run notices that it is to stop
PACKET_BYTES = 1 << 16
TOGETHER = 2  # times the memory of one process, for all of a program


class CellLost(Exception):
    """The first process is gone, or says nothing; the words are what it last complained about."""


class CellTooLarge(Exception):
    """All processes together hold more memory than they may."""


class Cell:
    def __init__(self, walls: Walls, tmp_MiB: int, stopping: threading.Event) -> None:
        self.tmp_MiB = tmp_MiB
        self._stopping = stopping
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with walls.opened(tmp_MiB << 20) as start:
                self._own_folder = start.own_folder
                self._process = subprocess.Popen(
                    start.command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env=start.environment,
                    cwd=start.folder,
                    pass_fds=start.descriptors,
                    start_new_session=True,
                )
                theirs.close()
                self._send(start.setup, start.handed)
                self._receive(time.monotonic() + START_TIMEOUT_S)
        except OSError as error:
            theirs.close()
            self.close()
            raise CellLost(f"cannot start: {error}") from None
        except BaseException:
            self.close()
            raise

    def run(self, program: Program | Commands, limits: Limits) -> tuple[Verdict, bool]:
        """The verdict, and whether the cell may be used again."""
        nonce = secrets.token_hex(16)
        hear, say = os.pipe()
        files: list[int] = []
        try:
            for document in _documents(program, nonce):
                files.append(_sealed(document))
            extra = {"by_data": True} if isinstance(program, Commands) else {}
            mode = "commands" if isinstance(program, Commands) else "python"
            self._send({"mode": mode, "limits": asdict(limits) | extra}, [*files, say])
        finally:
            for descriptor in (*files, say):
                os.close(descriptor)
        try:
            largest_MiB = TOGETHER * limits.memory_MiB
            report = self._receive(time.monotonic() + limits.wall_s + REPORT_TIMEOUT_S, largest_MiB)
            os.set_blocking(hear, False)
            said = b""
            with contextlib.suppress(BlockingIOError):
                while block := os.read(hear, 8192):
                    said += block
        finally:
            os.close(hear)
        return decide(report, said, nonce, limits), bool(report["clean"])

    def close(self) -> None:
        """Leave nothing behind. The line's end makes the first process end, and all with it."""
        self._line.close()
        process = getattr(self, "_process", None)
        if process is None:
            return
        try:
            process.wait(EXIT_TIMEOUT_S)  # bubblewrap ends when the last process inside is gone
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_TIMEOUT_S)
        if process.stderr:
            process.stderr.close()
        if self._own_folder:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    def _send(self, document: dict[str, Any], descriptors: Sequence[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self._line.sendmsg([json.dumps(document).encode()], rights)
        except OSError:
            raise CellLost(self._complaint()) from None

    def _receive(self, deadline_s: float, largest_MiB: int | None = None) -> dict[str, Any]:
        while True:
            left_s = deadline_s - time.monotonic()
            if self._stopping.is_set():
                raise Interrupted("sandbox", "stopped while a program was running", "run the same command again")
            if left_s <= 0:
                raise CellLost("no report from inside in time")
            self._line.settimeout(min(left_s, TICK_S))
            try:
                data = self._line.recv(PACKET_BYTES)
            except TimeoutError:
                if largest_MiB is not None and resident_MiB(self._process.pid) > largest_MiB:
                    raise CellTooLarge(f"all processes together hold more than {largest_MiB} MiB") from None
                continue
            except OSError:
                data = b""
            if not data:
                raise CellLost(self._complaint())
            document: dict[str, Any] = json.loads(data)
            return document

    def _complaint(self) -> str:
        """The last line that was said on stderr, once the process has ended."""
        self._line.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        lines = (self._process.stderr.read() or b"").decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:300] if lines else "no answer from inside"


def _documents(program: Program | Commands, nonce: str) -> list[bytes]:
    if isinstance(program, Commands):
        order = asdict(program) | {"nonce": nonce}
        order["files"] = {name: text.replace(program.nonce_mark, nonce) for name, text in program.files.items()}
        return [json.dumps(order).encode()]
    test = {"nonce": nonce, "reference": program.reference, "names": program.names, "test": program.test}
    return [program.source.encode("utf-8", "surrogatepass"), json.dumps(test).encode()]


def _sealed(data: bytes) -> int:
    """A memory file that nobody can change any more."""
    descriptor = os.memfd_create("sealed", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor
