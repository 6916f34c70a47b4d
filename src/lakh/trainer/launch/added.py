"""Add replicas to a run that trains on this machine: start their ranks, which join it at a step boundary, and wait.

Independent of torch.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from pathlib import Path

from lakh import storage
from lakh.c3.directory_store import DirectoryStore
from lakh.errors import PeerLost, UserError
from lakh.spec import load_run
from lakh.trainer.launch.decision import can_continue_without_ranks
from lakh.trainer.launch.fork_server import ForkServer
from lakh.trainer.launch.launcher import PRELOAD, wait_until_ready
from lakh.trainer.launch.rank_processes import POLL_S, RankForker, last_json_line
from lakh.trainer.recovery.replicas import ReplicaLayout
from lakh.trainer.recovery.signals import handle_stop_signals, stop_cause
from lakh.trainer.run_folder import find_rendezvous, require_run

__all__ = ["add_replicas", "take_members"]


def add_replicas(run_dir: str, *, nproc: int) -> dict[str, object]:
    """Train with `nproc` more ranks until the run ends. Returns what the first of them reports.

    SIGINT and SIGTERM end these ranks; the others continue without them.
    """
    require_run(run_dir)
    rendezvous, ranks = find_rendezvous(run_dir)
    run = load_run(run_dir)
    possible, reason = can_continue_without_ranks(run.train, run.mesh, ranks)
    if not possible:
        raise UserError(run_dir, f"cannot admit ranks: {reason}", "set train.backend = c3 and mesh.dp_replicate >= 2")
    size = ReplicaLayout(run.mesh.resolve(ranks)).replica_size
    if nproc % size:
        raise UserError(f"--nproc {nproc}", f"a replica of this run has {size} ranks", f"choose a multiple of {size}")
    logs = Path(run_dir) / "logs"
    storage.make_dir(logs)
    members = take_members(DirectoryStore(f"{rendezvous}.members"), ranks, nproc)
    signals: list[int] = []
    with handle_stop_signals(signals.append), contextlib.ExitStack() as stack:
        server = ForkServer.start(PRELOAD, logs / f"fork-server.added-{members[0]}.err")
        stack.callback(server.close)
        wait_until_ready(server, signals)
        forker = RankForker(server, ["resume", run_dir], rendezvous, logs, range(ranks), attempt=0)
        outputs = [logs / f"rank-{member:05d}.added.out" for member in members]
        processes = [
            forker.fork(member, output, environment={"LAKH_JOIN_AS": str(member)})
            for member, output in zip(members, outputs, strict=True)
        ]
        while any(process.poll() is None for process in processes):
            if signals or not rendezvous.parent.is_dir():  # asked to stop, or the run has ended
                for process in processes:
                    process.kill()
            time.sleep(POLL_S)
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode == 0:
            return {**last_json_line(output), "run_dir": run_dir}
    reason = f"stopped by {stop_cause(signals[0])}" if signals else "its ranks ended, or the run did; see their output"
    raise PeerLost(f"lakh join {run_dir}", reason, f"see {outputs[0].with_suffix('.err')}")


def take_members(store: DirectoryStore, ranks: int, count: int) -> range:
    """Take `count` member numbers after those that were taken before; the first are those of the run itself."""
    while True:
        before = store.get("members").decode() if store.check(["members"]) else ""
        first = int(before.partition(" ")[0] or ranks)
        mine = f"{first + count} {secrets.token_hex(8)}"  # unlike what another process writes at the same time
        if store.compare_set("members", before, mine).decode() == mine:
            return range(first, first + count)
