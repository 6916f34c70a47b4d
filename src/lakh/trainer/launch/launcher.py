"""Starting the ranks of a run on this machine, watching them, and starting them again when one dies.

Each attempt gets a fresh rendezvous file, so no rank ever meets an address of the attempt before (restarts over a
shared store do). No torch here: the launcher stays small and answers at once.

What a rank's end means, decided by `decide`:
    all ranks exit 0               the run is done
    2, 65 or 1                     the same would happen again: stop, and pass the rank's own error on
    75 or death by a signal        where the others go on without it (survive.py), nothing, as long as one of them
                                   does; else worth another attempt, while attempts are left
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Literal

from lakh import errors, storage
from lakh.errors import Interrupted, LakhError, PeerLost
from lakh.spec import Run

__all__ = ["LaunchDecision", "LaunchResult", "can_continue_without_ranks", "decide", "launch"]

POLL_S = 0.1
TERMINATE_GRACE_S = 5.0  # for survivors of a dead peer: they are stuck in a collective
STOP_GRACE_S = 120.0  # for a run that was asked to stop: it writes a checkpoint first


@dataclass(frozen=True)
class LaunchDecision:
    action: Literal["wait", "done", "restart", "fail", "stopped"]
    rank: int
    reason: str


@dataclass(frozen=True)
class LaunchResult:
    attempts: int
    result: dict[str, object]  # what the lowest rank that ended well printed as its last line


def decide(
    exit_codes: Sequence[int | None], *, stopping: bool, restarts_left: int, elastic: bool = False
) -> LaunchDecision:
    """What to do, given each rank's exit code (None while it runs, negative for a signal).

    `elastic`: the other ranks go on without one that is lost.
    """
    ended = {rank: code for rank, code in enumerate(exit_codes) if code is not None}
    bad = {rank: code for rank, code in ended.items() if code != 0}
    well = [rank for rank, code in ended.items() if code == 0]
    if elastic and bad and all(code < 0 or code == 75 for code in bad.values()):
        lost = f"without rank(s) {', '.join(map(str, sorted(bad)))}"
        if len(ended) < len(exit_codes) and not stopping:
            return LaunchDecision("wait", min(bad), f"going on {lost}")
        if well and len(ended) == len(exit_codes):
            return LaunchDecision("done", min(well), f"ended well {lost}")
    if not bad:
        done = len(ended) == len(exit_codes)
        return LaunchDecision("done" if done else "wait", 0, "all ranks ended well" if done else "ranks are running")
    if stopping:
        finished = len(ended) == len(exit_codes)
        return LaunchDecision("stopped" if finished else "wait", min(bad), "stopped on request")
    # A rank that names the cause counts before one that only lost its peer, and a signal before an exit code.
    rank, code = min(bad.items(), key=lambda item: (item[1] == 75, item[1] >= 0, item[0]))
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    reason = f"rank {rank} {how}"
    if code >= 0 and code != 75:
        return LaunchDecision("fail", rank, reason)
    if restarts_left <= 0:
        return LaunchDecision("fail", rank, f"{reason} and no restarts are left")
    return LaunchDecision("restart", rank, reason)


def can_continue_without_ranks(run: Run, ranks: int) -> tuple[bool, str]:
    """Whether a run that was launched here goes on without a rank that dies, and the reason."""
    if ranks < 2:
        return False, "one rank has nobody to go on"
    if run.train.backend != "c3":
        return False, f"the ranks talk over {run.train.backend}, which ends with a rank"
    copies = run.mesh.resolve(ranks).dp_replicate
    if copies != ranks:
        return False, f"{ranks} ranks hold {copies} copies of the model: a lost rank takes its part with it"
    return True, f"each of the {ranks} ranks holds the whole model"


def launch(
    arguments: Sequence[str],
    run_dir: str | Path,
    *,
    ranks: int,
    max_restarts: int,
    first_attempt_arguments: Sequence[str] = (),
    inherited_fds: Sequence[int] = (),
    elastic: bool = False,
) -> LaunchResult:
    """Run `lakh ARGUMENTS` as `ranks` processes until they end well. `first_attempt_arguments` is left out of restarts.

    `inherited_fds`: descriptors that the ranks inherit. `elastic`: ranks that die are the other ranks' business, as long
    as one of them goes on.
    """
    logs = Path(run_dir) / "logs"
    storage.make_dir(logs)
    reason = ""
    with _SignalCounter() as signals, tempfile.TemporaryDirectory(prefix="lakh-rendezvous-") as meeting:
        for attempt in range(max_restarts + 1):
            extra = [] if attempt else list(first_attempt_arguments)
            words = [*arguments, *extra]
            group = _RankProcesses(words, Path(meeting) / str(attempt), logs, ranks, attempt, reason, inherited_fds)
            with group:
                decision = group.watch(signals, restarts_left=max_restarts - attempt, elastic=elastic)
            if decision.action == "done":
                return LaunchResult(attempt + 1, group.result(decision.rank))
            if decision.action in ("fail", "stopped"):
                raise group.error(decision)
            reason = decision.reason
    raise AssertionError("unreachable: the last attempt ends in done, fail or stopped")


class _RankProcesses:
    """The processes of one attempt."""

    def __init__(
        self,
        arguments: list[str],
        meeting: Path,
        logs: Path,
        ranks: int,
        attempt: int,
        reason: str,
        inherited_fds: Sequence[int],
    ) -> None:
        self.files: list[IO[bytes]] = []
        self.outputs = [logs / f"rank-{rank:05d}.{attempt}.out" for rank in range(ranks)]
        self.processes: list[subprocess.Popen[bytes]] = []
        command = [sys.executable, "-m", "lakh", *arguments, "--json"]
        for rank, output in enumerate(self.outputs):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "LAKH_RENDEZVOUS": str(meeting),
                "LAKH_ATTEMPT": str(attempt),
                "LAKH_RESTART_REASON": reason,
                "LAKH_LAUNCHER_PID": str(os.getpid()),
                "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),  # all ranks are on this machine
            }
            out, err = output.open("wb"), output.with_suffix(".err").open("wb")
            self.files += [out, err]
            # A session of its own: Ctrl-C in the terminal reaches the launcher alone, which passes it on once.
            self.processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    pass_fds=inherited_fds,
                    start_new_session=True,
                )
            )

    def __enter__(self) -> _RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_all()
        for file in self.files:
            file.close()

    def watch(self, signals: _SignalCounter, *, restarts_left: int, elastic: bool) -> LaunchDecision:
        passed_on, deadline_s = 0, float("inf")
        while True:
            codes = [process.poll() for process in self.processes]
            decision = decide(codes, stopping=signals.count > 0, restarts_left=restarts_left, elastic=elastic)
            if decision.action != "wait":
                return decision
            if signals.count > passed_on:
                passed_on = signals.count
                deadline_s = time.monotonic() + STOP_GRACE_S
                for process in self.processes:
                    with contextlib.suppress(ProcessLookupError):
                        process.send_signal(signal.SIGTERM)
            if signals.count > 2:
                return LaunchDecision("stopped", 0, "stopped at once, at the third request")
            if time.monotonic() > deadline_s:
                return LaunchDecision("stopped", 0, f"did not stop within {STOP_GRACE_S:g} s")
            time.sleep(POLL_S)

    def _end_all(self) -> None:
        running = [process for process in self.processes if process.poll() is None]
        for process in running:
            process.terminate()
        deadline_s = time.monotonic() + TERMINATE_GRACE_S
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - time.monotonic()))
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()

    def result(self, rank: int) -> dict[str, object]:
        return _last_document(self.outputs[rank]) or {}

    def error(self, decision: LaunchDecision) -> LakhError:
        """The error that the rank itself reported, in its own words; else what we saw from outside."""
        document = (_last_document(self.outputs[decision.rank]) or {}).get("error")
        where = f"rank {decision.rank}"
        if isinstance(document, dict) and "where" in document:
            return errors.from_dict(document)
        log = self.outputs[decision.rank].with_suffix(".err")
        if decision.action == "stopped":
            return Interrupted(where, decision.reason, "lakh resume goes on from the last checkpoint")
        code = self.processes[decision.rank].returncode
        if code is not None and code < 0:
            return PeerLost(where, decision.reason, f"see {log}; lakh resume goes on from the last checkpoint")
        return LakhError(where, decision.reason, f"see {log}")


class _SignalCounter:
    """Counts SIGINT and SIGTERM while the launcher watches, instead of dying of them."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> _SignalCounter:
        self._before = {n: signal.signal(n, self._note) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def _last_document(path: Path) -> dict[str, object] | None:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    with contextlib.suppress(ValueError, IndexError):
        document = json.loads(lines[-1])
        return document if isinstance(document, dict) else None
    return None
