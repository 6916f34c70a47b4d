"""The rank processes of one attempt: start them, watch them, start lost replicas again, end them. Without torch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lakh import errors
from lakh.c3.directory_store import DirectoryStore
from lakh.errors import Interrupted, LakhError, PeerError, PeerLost, PeerTimeout
from lakh.trainer.launch.decision import LaunchDecision, decide, find_lost_replicas
from lakh.trainer.launch.fork_server import ForkedProcess, ForkServer, PythonCommand
from lakh.trainer.launch.rank import LAUNCHER_PID
from lakh.trainer.launch.restart_plan import RestartPlan, find_devices
from lakh.trainer.launch.stopped import StoppedProcesses
from lakh.trainer.observability.collective_records import board_path, find_absent
from lakh.trainer.recovery.joining import JoinRequests

__all__ = ["POLL_S", "RankForker", "RankProcesses", "last_json_line"]

POLL_S = 0.1
TERMINATE_GRACE_S = 5.0  # for ranks that wait for a dead peer inside a collective
KILL_TIMEOUT_S = 30.0  # how long the kernel may take to remove a killed rank
STOP_GRACE_S = 120.0  # for a run that was asked to stop and writes a checkpoint


@dataclass(frozen=True)
class RankForker:
    """Starts the ranks of one attempt."""

    server: ForkServer
    arguments: Sequence[str]
    """resume RUN_DIR, and settings."""
    rendezvous: Path
    logs: Path
    devices: Sequence[int]
    """The device of each rank, numbered as the local ranks of the first attempt."""
    attempt: int

    @property
    def ranks(self) -> int:
        return len(self.devices)

    def fork(
        self, rank: int, output: Path, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> ForkedProcess:
        variables = {
            **os.environ,
            "RANK": str(rank % self.ranks),
            "LOCAL_RANK": str(self.devices[rank] if rank < self.ranks else rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "LAKH_RENDEZVOUS": str(self.rendezvous),
            "LAKH_ATTEMPT": str(self.attempt),
            LAUNCHER_PID: str(self.server.pid),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),  # all ranks are on this machine
            **(environment or {}),
        }
        words = [*self.arguments, *arguments, "--json"]
        return self.server.fork(PythonCommand("lakh", words, variables, output, output.with_suffix(".err")))


class RankProcesses:
    """The processes of one attempt."""

    def __init__(
        self,
        forker: RankForker,
        arguments: Sequence[str],
        reason: str,
        detected_s: float,
        stopped_timeout_s: float,
    ) -> None:
        self.timed_out: dict[int, str] = {}
        """Ranks that were killed here because they did not respond, and the reason."""
        self._forker, self._joined = forker, 0
        self.outputs = [forker.logs / f"rank-{rank:05d}.{forker.attempt}.out" for rank in range(forker.ranks)]
        environment = {"LAKH_RESTART_REASON": reason, "LAKH_RESTART_DETECTED_S": str(detected_s or "")}
        self.processes = [forker.fork(rank, output, arguments, environment) for rank, output in enumerate(self.outputs)]
        self._stopped = StoppedProcesses([process.pid for process in self.processes], stopped_timeout_s)
        self._requests = JoinRequests(DirectoryStore(f"{forker.rendezvous}.members"))

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_all()

    def watch(
        self,
        signals: Sequence[int],
        restarts_left: int,
        plan: RestartPlan,
        on_stop: Callable[[str], None],
    ) -> tuple[LaunchDecision, int]:
        """Wait until there is something to do. Passes the `signals` received so far, and new ones, on to the ranks.

        Returns the decision and how many restarts are left.
        """
        passed_on, deadline_s = 0, float("inf")
        while True:
            codes = [process.poll() for process in self.processes]
            decision = decide(
                codes,
                stopping=bool(signals),
                restarts_left=restarts_left,
                elastic=plan.replicas is not None,
                timed_out=self.timed_out,
            )
            if decision.action != "wait":
                waited = codes[decision.rank] in (PeerError.exit_code, -signal.SIGABRT)
                is_hang = plan.replicas is None and (waited or decision.rank in self.timed_out)
                return self._name_absent(decision) if is_hang else decision, restarts_left
            if plan.replicas is not None and not signals:
                lost = find_lost_replicas(codes, plan.replicas) if restarts_left > 0 else ()
                if lost and self._has_devices(lost, on_gpus=plan.on_gpus):
                    self._start_again(lost)
                    restarts_left -= 1
                self._end_joiners_without_members(codes)
            for rank in self._stopped.find_overdue(time.monotonic()):
                self.timed_out[rank] = f"rank {rank} was stopped by a signal for {self._stopped.timeout_s:g} s"
                self.processes[rank].kill()
            if len(signals) > 1:
                on_stop("stopping now, without a checkpoint")
                for process in self.processes:
                    process.kill()  # no-op for one that has ended
                reason = "stopped at the second request, without a checkpoint"
                return LaunchDecision("stopped", 0, reason), restarts_left
            if len(signals) > passed_on:
                passed_on = len(signals)
                on_stop("saving a checkpoint, then stopping; again to stop now")
                deadline_s = time.monotonic() + STOP_GRACE_S
                for process in self.processes:
                    process.send_signal(signals[0])  # the rank says what stopped it
            if time.monotonic() > deadline_s:
                return LaunchDecision("stopped", 0, f"did not stop within {STOP_GRACE_S:g} s"), restarts_left
            time.sleep(POLL_S)

    def _has_devices(self, ranks: Sequence[int], *, on_gpus: bool) -> bool:
        """Whether the devices of these ranks can be used again."""
        usable = find_devices(self._forker.rendezvous, self._forker.devices, on_gpus=on_gpus)
        return all(self._forker.devices[rank] in usable for rank in ranks)

    def _start_again(self, ranks: Sequence[int]) -> None:
        """Start ranks that join the others at a step boundary."""
        self._joined += 1
        for rank in ranks:
            output = self._forker.logs / f"rank-{rank:05d}.{self._forker.attempt}-{self._joined}.out"
            self.outputs[rank] = output
            self.processes[rank] = self._forker.fork(rank, output, environment={"LAKH_JOIN_AS": str(rank)})
            self._stopped.replace(rank, self.processes[rank].pid)

    def _end_joiners_without_members(self, codes: Sequence[int | None]) -> None:
        """Kill ranks that wait to join when all others have ended."""
        running = {rank for rank, code in enumerate(codes) if code is None}
        if self._joined and running <= {request.member for request in self._requests.waiting()}:
            for rank in running:
                self.processes[rank].kill()

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
                process.wait(KILL_TIMEOUT_S)

    def _name_absent(self, decision: LaunchDecision) -> LaunchDecision:
        """The decision about a rank that hung or waited in vain, with the ranks that did not enter a collective."""
        absent = find_absent(board_path(self._forker.rendezvous))
        return dataclasses.replace(decision, reason=f"{decision.reason}; {absent}") if absent else decision

    def result(self, rank: int) -> dict[str, Any]:
        return last_json_line(self.outputs[rank])

    def error(self, decision: LaunchDecision) -> LakhError:
        """The error that the rank reported, or one about its exit."""
        document = last_json_line(self.outputs[decision.rank]).get("error")
        where = f"rank {decision.rank}"
        if isinstance(document, dict) and "where" in document:
            return errors.from_dict(document)
        log = self.outputs[decision.rank].with_suffix(".err")
        if decision.action == "stopped":
            return Interrupted(where, decision.reason, f"continue with: lakh {shlex.join(self._forker.arguments[:2])}")
        if decision.rank in self.timed_out:
            todo = "continue it sooner (kill -CONT), or set train.peer_timeout_s; lakh resume continues the run"
            return PeerTimeout(where, decision.reason, todo)
        code = self.processes[decision.rank].returncode
        if code is not None and code < 0:
            return PeerLost(where, decision.reason, f"see {log}; lakh resume continues from the last checkpoint")
        return LakhError(where, decision.reason, f"see {log}")


def last_json_line(path: Path) -> dict[str, Any]:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    with contextlib.suppress(ValueError, IndexError):
        document = json.loads(lines[-1])
        if isinstance(document, dict):
            return document
    return {}
