"""Continue without lost ranks, and without restarting any process.

Possible if every rank holds the whole model (mesh.dp_replicate = ranks) and the ranks communicate over c3
(`launcher.can_continue_without_ranks`). The remaining ranks agree on the members (lakh.c3.faults.membership, through a
file beside the rendezvous), ranks that are behind or were interrupted inside an update take the tensors of the rank
that is ahead, and the current step is repeated by fewer ranks with the same sequences.

Raises PeerLost (exit 75, so that the launcher restarts all ranks) if the remaining ranks are a minority, if the batch
does not divide among them, or if no rank has consistent tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from lakh.c3.directory_store import DirectoryStore
from lakh.c3.faults.membership import Epoch, agree_on_epoch
from lakh.errors import InfeasiblePlan, PeerLost, PeerTimeout
from lakh.events import RanksLost
from lakh.spec import Mesh, Run, Training
from lakh.tokens.loading.digest import StreamDigest
from lakh.trainer.launch.launcher import can_continue_without_ranks
from lakh.trainer.launch.world import World
from lakh.trainer.observability.collectives import CollectiveBoard

__all__ = ["ElasticGroup", "LoopState", "local_tensor"]

RENDEZVOUS_TIMEOUT_S = 20.0
MAX_FALSE_ALARMS = 3  # agreements in a row in which no rank was missing: the cause is something else


@dataclasses.dataclass(frozen=True)
class LoopState:
    """The state that a rank keeps when others are lost."""

    step: int
    """Steps that the tensors have taken."""
    position: int
    """Sequences that these steps have consumed."""
    finished: int
    """The last step whose evaluation and checkpoint, if due, are done."""
    is_consistent: bool
    """False if the loss interrupted an update."""
    tensors: Mapping[str, Tensor]
    known_digest: tuple[int, StreamDigest | None]
    """A recent position and the digest of the stream up to it; the sequences since then are read again."""
    last_saved: str
    mesh: Mesh
    """The mesh that the run was started with."""


class ElasticGroup:
    """The ranks of a run that can lose some of them. One object for the life of a process."""

    @staticmethod
    def of(settings: Training, mesh: Mesh, world: World) -> ElasticGroup | None:
        """None if a lost rank ends the run."""
        rendezvous = os.environ.get("LAKH_RENDEZVOUS")  # other launchers end all ranks themselves
        if not rendezvous or not can_continue_without_ranks(settings, mesh, world.size)[0]:
            return None
        return ElasticGroup(world, rendezvous, settings.threads, settings.peer_timeout_s)

    def __init__(self, world: World, rendezvous: str, threads: int, peer_timeout_s: float) -> None:
        self._threads, self._peer_timeout_s = threads, peer_timeout_s
        self._false_alarms = 0
        self._member = world.rank
        self._epoch = Epoch(0, tuple(range(world.size)))
        self._rendezvous = rendezvous
        self._store = DirectoryStore(f"{rendezvous}.members")

    def rejoin(
        self, run: Run, world: World, mine: LoopState, cause: PeerLost | PeerTimeout
    ) -> tuple[Run, World, LoopState, RanksLost]:
        """Leave the old process group, join the remaining ranks, and agree on one state."""
        began_s = time.monotonic()
        dead, suspected = (
            {self._epoch.members[rank] for rank in ranks if rank < len(self._epoch.members)}
            for ranks in _abort_groups()
        )
        record = {"step": mine.step, "finished": mine.finished, "whole": int(mine.is_consistent)}
        before = self._epoch
        self._epoch, records = agree_on_epoch(
            self._store,
            "survivors",
            before,
            self._member,
            record,
            dead,
            suspects=suspected,
            on_registered=_destroy_group,
        )
        remaining = [records[member] for member in self._epoch.members]
        size, rank = len(remaining), self._epoch.members.index(self._member)
        run = dataclasses.replace(run, mesh=dataclasses.replace(run.mesh, dp_replicate=size, dp_shard=1))
        try:
            run.accumulation(size)
        except InfeasiblePlan as error:
            raise PeerLost(cause.where, f"{cause.found}; {size} ranks remain, but {error.found}", cause.todo) from None
        steps = [record["step"] for record in remaining if record["whole"]]
        if not steps:
            raise PeerLost(cause.where, f"{cause.found}; every rank was inside an update", cause.todo) from None
        step = max(steps)
        board = CollectiveBoard(f"{self._rendezvous}.epoch-{self._epoch.number}.board", rank, size)
        world = dataclasses.replace(world, rank=rank, size=size, board=board)
        self._join(world)
        is_current = [bool(record["whole"]) and record["step"] == step for record in remaining]
        if not all(is_current):
            with world.peer_errors("receiving the state", self._peer_timeout_s):
                for name in sorted(mine.tensors):
                    dist.broadcast(mine.tensors[name], is_current.index(True))
        state = dataclasses.replace(
            mine,
            step=step,
            position=mine.position + (step - mine.step) * run.data.batch,
            finished=min(record["finished"] for record in remaining),
            is_consistent=True,
        )
        lost = tuple(member for member in before.members if member not in self._epoch.members)
        self._false_alarms = 0 if lost else self._false_alarms + 1
        if self._false_alarms > MAX_FALSE_ALARMS:
            raise cause
        reason = f"{cause.found}; {self._epoch.reason}"
        seconds = time.monotonic() - began_s
        return run, world, state, RanksLost(step=step, lost=lost, left=size, reason=reason, seconds=seconds)

    def _join(self, world: World) -> None:
        """Make a process group of the remaining ranks; none for a single rank."""
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(self._threads or max(1, cores // world.size))
        if world.size == 1:
            return
        store = dist.FileStore(f"{self._rendezvous}.epoch-{self._epoch.number}", world.size)
        store.set_timeout(timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
        with world.peer_errors("joining the remaining ranks", RENDEZVOUS_TIMEOUT_S):
            dist.init_process_group(
                world.backend,
                store=store,
                rank=world.rank,
                world_size=world.size,
                timeout=timedelta(seconds=self._peer_timeout_s),
            )


def _abort_groups() -> tuple[set[int], set[int]]:
    """Abort every process group, so that no peer waits for this rank. Returns the ranks that are certainly dead, and
    those that may be."""
    from lakh.c3.torch.backend import C3ProcessGroup

    dead: set[int] = set()
    suspected: set[int] = set()
    for group in list(distributed_c10d._world.pg_map):
        if isinstance(group, C3ProcessGroup):
            ranks = dist.get_process_group_ranks(group)
            failure = group.group.failure()
            if failure is not None:
                blamed = {ranks[rank] for rank in failure.dead if rank < len(ranks)}
                (dead if failure.is_certain else suspected).update(blamed)
            with contextlib.suppress(Exception):  # the group is unusable in any case
                group.abort()
    return dead, suspected


def _destroy_group() -> None:
    with contextlib.suppress(Exception):  # the group is unusable in any case
        dist.destroy_process_group()


def local_tensor(tensor: Tensor) -> Tensor:
    """The local part of a tensor: all of it, if this rank holds the whole model."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
