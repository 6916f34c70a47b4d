"""Going on when ranks die, without starting any process again.

Where every rank holds the whole model (mesh.dp_replicate = ranks) and the ranks talk over c3, a lost rank takes nothing
with it but its share of the work. The survivors agree on who is left (c3.faults.membership, through a file beside the
rendezvous, which outlives every rank), whoever is behind or was struck in the middle of an update takes the tensors of
the one that is ahead, and the step that was under way is done again by fewer ranks: the same sequences, divided anew.

Which runs can do so is said by `launch.can_lose_ranks`. Fails with PeerLost (exit 75, so that the launcher starts all
ranks again) where the survivors are a minority, where the batch does not divide among them, or where nobody has whole
tensors.
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
from lakh.spec import Mesh, Run
from lakh.tokens.digest import StreamDigest, digest_rows
from lakh.tokens.loader import Stream
from lakh.trainer.launch import can_lose_ranks
from lakh.trainer.optim import named_state
from lakh.trainer.state import State
from lakh.trainer.world import World

__all__ = ["Carried", "Survivors", "held"]

MEETING_TIMEOUT_S = 20.0
MAX_QUARRELS = 3  # meetings in a row at which nobody was missing: then it is not about ranks


@dataclasses.dataclass(frozen=True)
class Carried:
    """What a survivor brings along: where it was, and its tensors by name."""

    step: int
    """Steps that the tensors have taken."""
    position: int
    """Sequences that these steps have consumed."""
    finished: int
    """The last step whose evaluation and checkpoint, where due, were finished."""
    whole: bool
    """False where the loss struck in the middle of an update."""
    tensors: Mapping[str, Tensor]
    known: tuple[int, StreamDigest | None]
    """A position not long ago and the hash of the stream up to there: what a lost rank has read since is read again."""
    last_saved: str
    mesh: Mesh
    """The mesh that the run was started with."""

    def put_into(self, state: State, run: Run) -> None:
        """Become the state of a training by the ranks that are left."""
        with torch.no_grad():
            for name, tensor in named_state(state.model, state.optimizer).items():
                held(tensor).copy_(self.tensors[name])
        state.step, state.position, state.last_saved = self.step, self.position, self.last_saved
        position, digest = self.known
        if digest is not None and self.position > position:
            rows = Stream.open(run.data, run.seed).rows(position, self.position - position)
            digest += digest_rows(position, rows.tokens, rows.lengths)
        state.digest, state.known = digest, (self.position, digest)


class Survivors:
    """The ranks of a run that may lose some of them. One object for the life of a process."""

    @staticmethod
    def of(run: Run, world: World) -> Survivors | None:
        """None where a lost rank ends the run: other launchers end all ranks themselves, others have parts only."""
        meeting = os.environ.get("LAKH_RENDEZVOUS")
        return Survivors(run, world, meeting) if meeting and can_lose_ranks(run, world.size)[0] else None

    def __init__(self, run: Run, world: World, meeting: str) -> None:
        self.settings = run.train
        self.quarrels = 0
        self.member = world.rank
        self.epoch = Epoch(0, tuple(range(world.size)))
        self._meeting = meeting
        self._store = DirectoryStore(f"{meeting}.members")

    def go_on(
        self, run: Run, world: World, mine: Carried, why: PeerLost | PeerTimeout
    ) -> tuple[Run, World, Carried, RanksLost]:
        """Leave the old ranks, meet those that are left, and agree on one state."""
        began_s = time.monotonic()
        dead, silent = (
            {self.epoch.members[rank] for rank in ranks if rank < len(self.epoch.members)} for ranks in _give_up()
        )
        record = {"step": mine.step, "finished": mine.finished, "whole": int(mine.whole)}
        before = self.epoch
        self.epoch, records = agree_on_epoch(
            self._store, "survivors", before, self.member, record, dead, suspects=silent, on_registered=_take_down
        )
        left = [records[member] for member in self.epoch.members]
        size, rank = len(left), self.epoch.members.index(self.member)
        mesh = dataclasses.replace(run.mesh, dp_replicate=size, dp_shard=1)
        run = dataclasses.replace(run, mesh=mesh)
        try:
            run.accumulation(size)
        except InfeasiblePlan as error:
            raise PeerLost(why.where, f"{why.found}; {size} are left, but {error.found}", why.todo) from None
        steps = [record["step"] for record in left if record["whole"]]
        if not steps:
            raise PeerLost(why.where, f"{why.found}; in the middle of an update", why.todo) from None
        world = dataclasses.replace(world, rank=rank, size=size)
        self._meet(world)
        source = next(r for r, record in enumerate(left) if record["whole"] and record["step"] == max(steps))
        if any(not record["whole"] or record["step"] != max(steps) for record in left):
            with world.peers("taking the state of the one ahead", self.settings.peer_timeout_s):
                for name in sorted(mine.tensors):
                    dist.broadcast(mine.tensors[name], source)
        finished = min(record["finished"] for record in left)
        position = mine.position + (max(steps) - mine.step) * run.data.batch
        carried = dataclasses.replace(mine, step=max(steps), position=position, finished=finished, whole=True)
        lost = tuple(member for member in before.members if member not in self.epoch.members)
        self.quarrels = 0 if lost else self.quarrels + 1
        if self.quarrels > MAX_QUARRELS:
            raise why
        seconds = time.monotonic() - began_s
        return (
            run,
            world,
            carried,
            RanksLost(
                step=carried.step, lost=lost, left=size, reason=f"{why.found}; {self.epoch.reason}", seconds=seconds
            ),
        )

    def _meet(self, world: World) -> None:
        """A process group of those that are left; none where one is."""
        cores, threads = len(os.sched_getaffinity(0)), self.settings.threads
        torch.set_num_threads(threads or max(1, cores // world.size))
        if world.size == 1:
            return
        store = dist.FileStore(f"{self._meeting}.epoch-{self.epoch.number}", world.size)
        store.set_timeout(timedelta(seconds=MEETING_TIMEOUT_S))
        with world.peers("meeting the ranks that are left", MEETING_TIMEOUT_S):
            dist.init_process_group(
                world.backend,
                store=store,
                rank=world.rank,
                world_size=world.size,
                timeout=timedelta(seconds=self.settings.peer_timeout_s),
            )


def _give_up() -> tuple[set[int], set[int]]:
    """Give up every group, so that nobody waits for us in one.

    The ranks that are known dead, and those that may have given up before us.
    """
    from lakh.c3.torch.backend import C3ProcessGroup

    dead: set[int] = set()
    silent: set[int] = set()
    for group in list(distributed_c10d._world.pg_map):
        if isinstance(group, C3ProcessGroup):
            ranks = dist.get_process_group_ranks(group)
            failure = group.group.failure()
            if failure is not None:
                blamed = {ranks[rank] for rank in failure.dead if rank < len(ranks)}
                (dead if failure.is_certain else silent).update(blamed)
            with contextlib.suppress(Exception):  # it is over in any case
                group.abort()
    return dead, silent


def _take_down() -> None:
    with contextlib.suppress(Exception):  # they are over in any case
        dist.destroy_process_group()


def held(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: all of it, where it holds the whole model."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
