"""A cell: one set of walls with the first process inside, kept warm for one program after another.

A program goes in and its verdict comes back over the cell's line (line.py). The cell is used again only while it
reports itself clean; otherwise it is closed, which ends everything in it, and a new one is started.

All that runs in a cell is one control group where groups may be made (cgroup.py); elsewhere the sum of memory is looked
at now and then, and containers bring a group of their own.

Not for two threads at one time. Every wait has its limit: START_TIMEOUT_S, the program's wall limit, EXIT_TIMEOUT_S.
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

from lakh.errors import Interrupted
from lakh.evals.cgroup import Group, Tree
from lakh.evals.line import Frames, Line, Lost, Packets
from lakh.evals.resident import below, resident_MiB
from lakh.evals.task import Commands, Program
from lakh.evals.verdict import Limits, Verdict, decide
from lakh.evals.walls import TOGETHER, Start, Walls

__all__ = ["Cell", "CellLost", "CellTooLarge"]

START_TIMEOUT_S = 60.0  # for bubblewrap and Python to start, on a machine that swaps
REPORT_TIMEOUT_S = 30.0  # beyond the program's own wall limit
EXIT_TIMEOUT_S = 10.0
TICK_S = 0.2  # how soon a run notices that it is to stop
OWN_PROCESSES = 8  # beside the program's: walls, first process, examiner, zygote
OWN_MEMORY_MiB = 256


class CellLost(Exception):
    """The first process is gone, or says nothing; the words are what it last complained about."""


class CellTooLarge(Exception):
    """All processes together hold more memory than they may."""


class Cell:
    def __init__(self, walls: Walls, limits: Limits, stopping: threading.Event, groups: Tree | None = None) -> None:
        self._limits, self._stopping = limits, stopping
        self._line: Line | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._group: Group | None = None
        self._start: Start | None = None
        try:
            with walls.opened(limits) as start:
                self._start = start
                if groups is not None and not start.frames:
                    memory_MiB = TOGETHER * limits.memory_MiB + limits.tmp_MiB + OWN_MEMORY_MiB
                    self._group = groups.make(memory_MiB, limits.processes + OWN_PROCESSES)
                self._line = self._open(start)
                self._receive(time.monotonic() + START_TIMEOUT_S)
        except OSError as error:
            self.close()
            raise CellLost(f"cannot start: {error}") from None
        except Lost:
            words = self._complaint()
            self.close()
            raise CellLost(words) from None
        except BaseException:
            self.close()
            raise

    def fits(self, limits: Limits) -> bool:
        """Whether a program with these limits may run here: some were set when the cell was built."""
        same = self._limits
        return (limits.tmp_MiB, limits.memory_MiB, limits.processes) == (
            same.tmp_MiB,
            same.memory_MiB,
            same.processes,
        )

    def run(self, program: Program | Commands, limits: Limits) -> tuple[Verdict, bool]:
        """The verdict, and whether the cell may be used again."""
        nonce = secrets.token_hex(16)
        assert self._line is not None
        try:
            self._line.order(_order(isinstance(program, Commands), limits), _documents(program, nonce))
            report, said = self._receive(time.monotonic() + limits.wall_s + REPORT_TIMEOUT_S, limits)
        except Lost:
            self._refuse_excess(limits)
            raise CellLost(self._complaint()) from None
        verdict = decide(report, said, nonce, limits)
        if not verdict.passed:
            self._refuse_excess(limits)
        return verdict, bool(report["clean"])

    def close(self) -> None:
        """Leave nothing behind. The line's end makes the first process end, and all with it."""
        if self._line is not None:
            self._line.close()
        process = self._process
        if process is not None:
            try:
                process.wait(EXIT_TIMEOUT_S)  # bubblewrap ends when the last process inside is gone
            except subprocess.TimeoutExpired:
                self._end_by_force(process)
            if process.stderr:
                process.stderr.close()
        if self._group is not None:
            self._group.remove()
        if self._start is not None and self._start.own_folder:
            shutil.rmtree(self._start.own_folder, ignore_errors=True)

    def _end_by_force(self, process: subprocess.Popen[bytes]) -> None:
        assert self._start is not None
        if self._start.end_command:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(self._start.end_command, capture_output=True, timeout=EXIT_TIMEOUT_S, check=False)
        # Those inside first: with the first of them all end, and bubblewrap waits for that.
        for pid in below(process.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_TIMEOUT_S)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_TIMEOUT_S)

    def _open(self, start: Start) -> Line:
        line = None if start.frames else Packets()
        self._line = line  # so that it is closed whatever happens next
        self._process = process = subprocess.Popen(
            start.command,
            stdin=subprocess.PIPE if line is None else line.theirs.fileno(),
            stdout=subprocess.PIPE if line is None else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=start.environment,
            cwd=start.folder,
            pass_fds=start.descriptors,
            start_new_session=True,
        )
        if self._group is not None:
            self._group.take(process.pid)  # its children come in with it; they fork nobody before the set-up
        if line is None:
            assert process.stdin is not None
            assert process.stdout is not None
            frames = Frames(os.dup(process.stdin.fileno()), os.dup(process.stdout.fileno()))
            process.stdin.close()
            process.stdout.close()
            frames.setup(start.setup, start.handed)
            return frames
        line.setup(start.setup, start.handed)
        return line

    def _receive(self, deadline_s: float, limits: Limits | None = None) -> tuple[dict[str, Any], bytes]:
        assert self._line is not None
        assert self._process is not None
        while True:
            left_s = deadline_s - time.monotonic()
            if self._stopping.is_set():
                raise Interrupted("sandbox", "stopped while a program was running", "run the same command again")
            if left_s <= 0:
                raise CellLost("no report from inside in time")
            found = self._line.receive(min(left_s, TICK_S))
            if found is not None:
                return found
            if limits is not None:
                self._refuse_excess(limits, look=True)

    def _refuse_excess(self, limits: Limits, *, look: bool = False) -> None:
        """CellTooLarge where the kernel had to end a process of ours; without a group, where a look finds too much."""
        largest_MiB = TOGETHER * limits.memory_MiB
        if self._group is not None:
            too_large = self._group.killings() > 0
        else:
            too_large = look and self._process is not None and resident_MiB(self._process.pid) > largest_MiB
        if too_large:
            if self._process is not None:
                self._end_by_force(self._process)  # the line's end would wait for a program that waits itself
            raise CellTooLarge(f"all processes together hold more than {largest_MiB} MiB")

    def _complaint(self) -> str:
        """The last line that was said on stderr, once the process has ended."""
        if self._line is not None:
            self._line.close()
        if self._process is None or self._process.stderr is None:
            return "cannot start"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        os.set_blocking(self._process.stderr.fileno(), False)
        lines = (self._process.stderr.read() or b"").decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:300] if lines else "no answer from inside"


@functools.lru_cache(maxsize=256)
def _order(of_commands: bool, limits: Limits) -> dict[str, Any]:
    """To be read only: programs with the same limits share it."""
    if of_commands:
        return {"mode": "commands", "limits": asdict(limits) | {"by_data": True}}
    return {"mode": "python", "limits": asdict(limits)}


def _documents(program: Program | Commands, nonce: str) -> Sequence[bytes]:
    if isinstance(program, Commands):
        order = asdict(program) | {"nonce": nonce}
        order["files"] = {name: text.replace(program.nonce_mark, nonce) for name, text in program.files.items()}
        return [json.dumps(order).encode()]
    test = {"nonce": nonce, "reference": program.reference, "names": program.names, "test": program.test}
    return [program.source.encode("utf-8", "surrogatepass"), json.dumps(test).encode()]
