"""Start the ranks of a run on this machine, watch them, and restart them when one dies. Independent of torch.

The ranks are forks of one process that has imported torch (fork_server.py), so a restart does not import it again. Each
attempt uses a fresh rendezvous file, so that no rank sees addresses of an earlier attempt. decision.py interprets the
exit codes of the ranks:

    all ranks exit 0                the run is done
    2, 65 or 1                      it would fail again: stop, and report the rank's error
    75 or death by a signal         if the others can continue without it (recovery/elastic.py), start its replica
                                    again, which joins the others; else restart all ranks, while restarts are left

A rank that a signal has stopped (SIGSTOP) is alive and silent. Its peers give up after train.peer_timeout_s; where
there are none, the launcher kills it.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lakh import storage
from lakh.errors import Interrupted, PeerLost, PeerTimeout
from lakh.trainer.launch.fork_server import ForkServer
from lakh.trainer.launch.rank_processes import POLL_S, RankForker, RankProcesses
from lakh.trainer.launch.restart_plan import RestartPlan, find_devices
from lakh.trainer.recovery.signals import handle_stop_signals, stop_cause
from lakh.trainer.run_folder import publish_rendezvous

__all__ = ["PRELOAD", "LaunchResult", "launch", "wait_until_ready"]

PRELOAD = ("lakh.cli.train", "lakh.trainer.loop", "torch._dynamo")  # what each rank imports; optimizers need the last
PEERS_FIRST_S = 30.0  # peers know in which collective they wait for a stopped rank: their error comes first
IMPORT_TIMEOUT_S = 600.0  # a shared file system may take minutes to deliver torch to many nodes


@dataclass(frozen=True)
class LaunchResult:
    attempts: int
    result: dict[str, Any]
    """The result of the lowest rank that succeeded."""


def launch(
    arguments: Sequence[str],
    run_dir: str | Path,
    *,
    plan: RestartPlan,
    replan: Callable[[RestartPlan, int], RestartPlan | None],
    max_restarts: int,
    first_attempt_arguments: Sequence[str] = (),
    inherited_fds: Sequence[int] = (),
    peer_timeout_s: float = float("inf"),
    on_stop: Callable[[str], None] | None = None,
) -> LaunchResult:
    """Run `lakh ARGUMENTS` as the ranks of `plan` until they succeed.

    `first_attempt_arguments` are not passed on restarts. If the plan has replicas: when ranks die, keep waiting as long
    as one runs, and start lost replicas again, which join the others and count as restarts. `replan`: the plan for a
    number of devices, when some are lost; None if there is none.
    `peer_timeout_s`: kill a rank that was stopped by a signal for this long and that no peer waits for.
    `on_stop` is called with what happens next, as soon as SIGINT or SIGTERM asks to stop. A second request stops at
    once, without a checkpoint.
    """
    logs = Path(run_dir) / "logs"
    storage.make_dir(logs)
    reason, detected_s = "", 0.0
    signals: list[int] = []
    with (
        handle_stop_signals(signals.append),
        tempfile.TemporaryDirectory(prefix="lakh-rendezvous-") as folder,
        contextlib.ExitStack() as servers,
    ):
        server: ForkServer | None = None
        restarts_left, devices = max_restarts, list(range(plan.ranks))
        for attempt in itertools.count():
            rendezvous = Path(folder) / str(attempt)
            if server is None or not server.is_alive():
                server = ForkServer.start(PRELOAD, logs / f"fork-server.{attempt}.err", pass_fds=inherited_fds)
                servers.callback(server.close)
                wait_until_ready(server, signals)
            publish_rendezvous(run_dir, rendezvous, plan.ranks)
            words = [*arguments, *(word for item in plan.sets for word in ("--set", item))]
            forker = RankForker(server, words, rendezvous, logs, devices[: plan.ranks], attempt)
            first = [] if attempt else first_attempt_arguments
            timeout_s = peer_timeout_s + (PEERS_FIRST_S if plan.ranks > 1 else 0.0)
            with RankProcesses(forker, first, reason, detected_s, timeout_s) as group:
                decision, restarts_left = group.watch(signals, restarts_left, plan, on_stop or _ignore)
                detected_s = time.time()
            if decision.action == "done":
                return LaunchResult(attempt + 1, group.result(decision.rank))
            if decision.action in ("fail", "stopped"):
                raise group.error(decision)
            reason = decision.reason
            restarts_left -= 1
            devices = find_devices(rendezvous, devices, on_gpus=plan.on_gpus)
            next_plan = replan(plan, len(devices))
            if next_plan is None:
                found = f"{reason}; {len(devices)} of its devices are left, which is too few for its mesh"
                raise PeerLost(str(run_dir), found, "resume it on more devices, or with another mesh")
            if next_plan.ranks < plan.ranks:
                reason = f"{reason}; {next_plan.ranks} ranks instead of {plan.ranks} on {len(devices)} devices"
            plan = next_plan
    raise AssertionError("unreachable: the last attempt ends in done, fail or stopped")


def wait_until_ready(server: ForkServer, signals: Sequence[int]) -> None:
    """Wait for the imports of the fork server."""
    deadline_s = time.monotonic() + IMPORT_TIMEOUT_S
    while not server.is_ready:
        if signals:
            found = f"stopped by {stop_cause(signals[0])} before a rank was started"
            raise Interrupted("the launcher", found, "run the same command again")
        if not server.is_alive():
            raise PeerLost("the fork server of the ranks", "died while it imported torch", "lakh resume continues")
        if time.monotonic() > deadline_s:
            found = f"the imports of the ranks took more than {IMPORT_TIMEOUT_S:g} s"
            raise PeerTimeout("the fork server of the ranks", found, "check the disk that holds Python's packages")
        time.sleep(POLL_S)


def _ignore(text: str) -> None:
    pass
