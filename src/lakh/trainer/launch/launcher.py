"""Start the ranks of a run on this machine, watch them, and restart them when one dies. Independent of torch.

Each attempt uses a fresh rendezvous file, so that no rank sees addresses of an earlier attempt. `decide` interprets the
exit codes of the ranks:

    all ranks exit 0                the run is done
    2, 65 or 1                      it would fail again: stop, and report the rank's error
    75 or death by a signal         if the others can continue without it (recovery/elastic.py), keep waiting;
                                    else restart all ranks, while restarts are left

A rank that a signal has stopped (SIGSTOP) is alive and silent. Its peers give up after train.peer_timeout_s; where
there are none, the launcher kills it.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Literal

from lakh import errors, storage
from lakh.child_process import exit_reason
from lakh.errors import Interrupted, LakhError, PeerError, PeerLost, PeerTimeout
from lakh.spec import Mesh, Training
from lakh.trainer.launch.rank import LAUNCHER_PID
from lakh.trainer.launch.stopped import StoppedProcesses
from lakh.trainer.recovery.signals import handle_stop_signals

__all__ = ["LaunchDecision", "LaunchResult", "can_continue_without_ranks", "decide", "launch"]

POLL_S = 0.1
PEERS_FIRST_S = 30.0  # peers know in which collective they wait for a stopped rank: their error comes first
TERMINATE_GRACE_S = 5.0  # for ranks that wait for a dead peer inside a collective
STOP_GRACE_S = 120.0  # for a run that was asked to stop and writes a checkpoint


@dataclass(frozen=True)
class LaunchDecision:
    action: Literal["wait", "done", "restart", "fail", "stopped"]
    rank: int
    reason: str


@dataclass(frozen=True)
class LaunchResult:
    attempts: int
    result: dict[str, Any]
    """The result of the lowest rank that succeeded."""


def decide(
    exit_codes: Sequence[int | None],
    *,
    stopping: bool,
    restarts_left: int,
    elastic: bool = False,
    timed_out: Mapping[int, str] = MappingProxyType({}),
) -> LaunchDecision:
    """What to do, given each rank's exit code (None while it runs, negative for a signal).

    `elastic`: the other ranks continue without a lost one. `timed_out`: ranks that the launcher killed, and why.
    """
    ended = {rank: code for rank, code in enumerate(exit_codes) if code is not None}
    failed = {rank: code for rank, code in ended.items() if code != 0}
    succeeded = [rank for rank, code in ended.items() if code == 0]
    all_ended = len(ended) == len(exit_codes)
    if elastic and failed and all(code < 0 or code == PeerError.exit_code for code in failed.values()):
        lost = f"without rank(s) {', '.join(map(str, sorted(failed)))}"
        if not all_ended and not stopping:
            return LaunchDecision("wait", min(failed), f"continuing {lost}")
        if succeeded and all_ended:
            return LaunchDecision("done", min(succeeded), f"finished {lost}")
    if not failed:
        return LaunchDecision("done", 0, "all ranks finished") if all_ended else LaunchDecision("wait", 0, "running")
    if stopping:
        return LaunchDecision("stopped" if all_ended else "wait", min(failed), "stopped on request")
    # A rank with an error of its own counts before one that lost its peer, and a signal before an exit code.
    rank, code = min(failed.items(), key=lambda item: (item[1] == PeerError.exit_code, item[1] >= 0, item[0]))
    reason = f"rank {rank} was {exit_reason(code)}" if code < 0 else f"rank {rank} ended with {exit_reason(code)}"
    reason = timed_out.get(rank, reason)
    if code >= 0 and code != PeerError.exit_code:
        return LaunchDecision("fail", rank, reason)
    if restarts_left <= 0:
        return LaunchDecision("fail", rank, f"{reason} and no restarts are left")
    return LaunchDecision("restart", rank, reason)


def can_continue_without_ranks(settings: Training, mesh: Mesh, ranks: int) -> tuple[bool, str]:
    """Whether a run launched here can continue when a rank dies, and the reason."""
    if ranks < 2:
        return False, "there is only one rank"
    if settings.backend != "c3":
        return False, f"the backend {settings.backend} cannot continue without a rank"
    replicas = mesh.resolve(ranks).dp_replicate
    if replicas != ranks:
        return False, f"{ranks} ranks hold {replicas} replicas of the model: a lost rank takes its part with it"
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
    peer_timeout_s: float = float("inf"),
    on_stop: Callable[[str], None] | None = None,
) -> LaunchResult:
    """Run `lakh ARGUMENTS` as `ranks` processes until they succeed.

    `first_attempt_arguments` are not passed on restarts. `elastic`: keep waiting when ranks die, as long as one runs.
    `peer_timeout_s`: kill a rank that was stopped by a signal for this long and that no peer waits for.
    `on_stop` is called with what happens next, as soon as SIGINT or SIGTERM asks to stop. A second request stops at
    once, without a checkpoint.
    """
    logs = Path(run_dir) / "logs"
    storage.make_dir(logs)
    reason, detected_s = "", 0.0
    signals: list[int] = []
    with handle_stop_signals(signals.append), tempfile.TemporaryDirectory(prefix="lakh-rendezvous-") as folder:
        for attempt in range(max_restarts + 1):
            command = [*arguments, *(() if attempt else first_attempt_arguments)]
            rendezvous = Path(folder) / str(attempt)
            with _RankProcesses(command, rendezvous, logs, ranks, attempt, reason, detected_s, inherited_fds) as group:
                timeout_s = peer_timeout_s + (PEERS_FIRST_S if ranks > 1 else 0.0)
                stopped = StoppedProcesses([process.pid for process in group.processes], timeout_s)
                restarts_left = max_restarts - attempt
                decision = group.watch(
                    signals, stopped, restarts_left=restarts_left, elastic=elastic, on_stop=on_stop or _ignore
                )
                detected_s = time.time()
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
        rendezvous: Path,
        logs: Path,
        ranks: int,
        attempt: int,
        reason: str,
        detected_s: float,
        inherited_fds: Sequence[int],
    ) -> None:
        self.files: list[IO[bytes]] = []
        self.timed_out: dict[int, str] = {}
        """Ranks that were killed here because they did not respond, and the reason."""
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
                "LAKH_RENDEZVOUS": str(rendezvous),
                "LAKH_ATTEMPT": str(attempt),
                "LAKH_RESTART_REASON": reason,
                "LAKH_RESTART_DETECTED_S": str(detected_s or ""),
                LAUNCHER_PID: str(os.getpid()),
                "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),  # all ranks are on this machine
            }
            out, err = output.open("wb"), output.with_suffix(".err").open("wb")
            self.files += [out, err]
            # A session of its own: Ctrl-C in the terminal reaches only the launcher, which passes it on once.
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

    def watch(
        self,
        signals: Sequence[int],
        stopped: StoppedProcesses,
        *,
        restarts_left: int,
        elastic: bool,
        on_stop: Callable[[str], None],
    ) -> LaunchDecision:
        """Wait until there is something to do. Passes the `signals` received so far, and new ones, on to the ranks."""
        passed_on, deadline_s = 0, float("inf")
        while True:
            codes = [process.poll() for process in self.processes]
            decision = decide(
                codes,
                stopping=bool(signals),
                restarts_left=restarts_left,
                elastic=elastic,
                timed_out=self.timed_out,
            )
            if decision.action != "wait":
                return decision
            for rank in stopped.find_overdue(time.monotonic()):
                self.timed_out[rank] = f"rank {rank} was stopped by a signal for {stopped.timeout_s:g} s"
                self.processes[rank].kill()
            if len(signals) > 1:
                on_stop("stopping now, without a checkpoint")
                for process in self.processes:
                    process.kill()  # no-op for one that has ended
                return LaunchDecision("stopped", 0, "stopped at the second request, without a checkpoint")
            if len(signals) > passed_on:
                passed_on = len(signals)
                on_stop("saving a checkpoint, then stopping; again to stop now")
                deadline_s = time.monotonic() + STOP_GRACE_S
                for process in self.processes:
                    with contextlib.suppress(ProcessLookupError):
                        process.send_signal(signal.SIGTERM)
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

    def result(self, rank: int) -> dict[str, Any]:
        return _last_json_line(self.outputs[rank])

    def error(self, decision: LaunchDecision) -> LakhError:
        """The error that the rank reported, or one about its exit."""
        document = _last_json_line(self.outputs[decision.rank]).get("error")
        where = f"rank {decision.rank}"
        if isinstance(document, dict) and "where" in document:
            return errors.from_dict(document)
        log = self.outputs[decision.rank].with_suffix(".err")
        if decision.action == "stopped":
            return Interrupted(where, decision.reason, "lakh resume continues from the last checkpoint")
        if decision.rank in self.timed_out:
            todo = "continue it sooner (kill -CONT), or set train.peer_timeout_s; lakh resume continues the run"
            return PeerTimeout(where, decision.reason, todo)
        code = self.processes[decision.rank].returncode
        if code is not None and code < 0:
            return PeerLost(where, decision.reason, f"see {log}; lakh resume continues from the last checkpoint")
        return LakhError(where, decision.reason, f"see {log}")


def _ignore(text: str) -> None:
    pass


def _last_json_line(path: Path) -> dict[str, Any]:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    with contextlib.suppress(ValueError, IndexError):
        document = json.loads(lines[-1])
        if isinstance(document, dict):
            return document
    return {}
