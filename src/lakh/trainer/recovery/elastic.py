"""Continue without lost ranks, and admit new replicas, without restarting any process.

Possible if the mesh has at least two replicas (mesh.dp_replicate) and the ranks communicate over c3
(`decision.can_continue_without_ranks`). The members of a run form epochs (lakh.c3.faults.membership, through a folder
beside the rendezvous). A replica that lost a rank leaves as a whole, however it is split (FSDP, TP, PP, CP): its other
ranks end with PeerLost. A replica that was started again, or added, asks to join (recovery/joining.py); the members
notice it at a step boundary and form an epoch with it. Ranks that are new, behind or were interrupted inside an update
take the tensors of a rank that holds the same part of another replica (recovery/replicas.py). An interrupted step is
repeated with the same sequences, and every step divides its sequences among the ranks that are present.

Raises PeerLost (exit 75; the launcher restarts all ranks when none is left) if the remaining ranks are a minority, if
no replica is whole, if the batch has fewer micro-batches than replicas, or if a part of the model is consistent
nowhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from lakh.c3.directory_store import DirectoryStore
from lakh.c3.faults.membership import Epoch, agree_on_epoch
from lakh.errors import InfeasiblePlan, Interrupted, PeerLost, PeerTimeout, UserError
from lakh.events import Event, RanksJoined, RanksLost
from lakh.spec import Mesh, Run
from lakh.tokens.loading.digest import StreamDigest
from lakh.tokens.loading.prefetch import prepare_reader
from lakh.trainer.launch.agreement import facts_digest, run_facts
from lakh.trainer.launch.decision import can_continue_without_ranks
from lakh.trainer.launch.world import World
from lakh.trainer.observability.collective_records import board_path
from lakh.trainer.observability.collectives import CollectiveBoard
from lakh.trainer.recovery.joining import JoinAnswer, JoinRequests
from lakh.trainer.recovery.replicas import ReplicaLayout, TensorProgress, choose_step
from lakh.trainer.recovery.signals import StopRequest

__all__ = ["ElasticGroup", "LoopState", "Reformed", "ReplicasWaiting", "local_tensor"]

RENDEZVOUS_TIMEOUT_S = 20.0
JOIN_TIMEOUT_S = 1800.0  # until the members take notice: a step, an evaluation or the end of a save
JOIN_POLL_S = 0.02
MAX_FALSE_ALARMS = 3  # agreements in a row in which nothing changed: the cause is something else
MAX_EPOCHS = 5  # that may fail one after the other, because a member dies while they form


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


@dataclasses.dataclass(frozen=True)
class Reformed:
    """What a rank continues with after the members have changed."""

    run: Run
    world: World
    state: LoopState
    events: list[Event]
    """What rank 0 reports."""


class ReplicasWaiting(Exception):
    """Raised at a step boundary, on every rank alike: replicas have asked to join."""


class ElasticGroup:
    """The ranks of a run that can lose some of them and admit others. One object for the life of a process."""

    @staticmethod
    def of(run: Run, world: World) -> ElasticGroup | None:
        """None if a lost rank ends the run."""
        rendezvous = os.environ.get("LAKH_RENDEZVOUS")  # other launchers end all ranks themselves
        if not rendezvous or not can_continue_without_ranks(run.train, run.mesh, world.size)[0]:
            return None
        return ElasticGroup(run, world, rendezvous)

    def __init__(self, run: Run, world: World, rendezvous: str) -> None:
        self._layout = ReplicaLayout(run.mesh.resolve(world.size))
        without_skips = dataclasses.replace(run, data=dataclasses.replace(run.data, skip=()))  # rewinds change these
        self._facts = facts_digest(run_facts(without_skips)).hex()
        self._threads, self._peer_timeout_s = run.train.threads, run.train.peer_timeout_s
        self._false_alarms = 0
        self._member = world.member
        self._epoch = Epoch(0, tuple(range(world.size)))
        self._rendezvous = rendezvous
        self._store = DirectoryStore(f"{rendezvous}.members")
        self._requests = JoinRequests(self._store)

    def find_joiners(self) -> tuple[int, ...]:
        """The ranks of whole replicas that have asked to join and can."""
        asking = []
        for request in self._requests.waiting():
            if request.facts == self._facts:
                asking.append(request.member)
            else:
                reason = "its settings, code or version of torch differ from those of the run"
                self._requests.answer(request, JoinAnswer(None, {}, reason))
        return self._layout.whole_replicas(member for member in asking if member not in self._epoch.members)

    def reform(
        self, run: Run, world: World, mine: LoopState, cause: PeerLost | PeerTimeout | ReplicasWaiting
    ) -> Reformed:
        """Leave the old process group, form one with the ranks that are present, and agree on one state."""
        began_s, before = time.monotonic(), self._epoch.members
        if isinstance(cause, ReplicasWaiting):
            cause = PeerLost(f"rank {world.rank}", "replicas join", "lakh resume continues from the last checkpoint")
        for _ in range(MAX_EPOCHS):
            try:
                reformed = self._form_epoch(run, world, mine, cause)
            except _EpochFailed as failed:
                cause = failed.cause
                mine = dataclasses.replace(mine, is_consistent=mine.is_consistent and not failed.was_healing)
                continue
            changes = self._changes(before, cause.found, reformed.state.step, time.monotonic() - began_s)
            self._false_alarms = 0 if changes else self._false_alarms + 1
            if self._false_alarms > MAX_FALSE_ALARMS:
                raise cause
            return dataclasses.replace(reformed, events=changes)
        raise cause

    def join(self, run: Run, world: World, stop: StopRequest) -> Reformed:
        """Ask to join the run, wait until the members admit this rank, and take the state of one of them."""
        where = f"rank {self._member}, joining the run"
        prepare_reader()
        for _ in range(MAX_EPOCHS):
            answer = self._wait_for_answer(where, stop)
            assert answer.epoch is not None
            self._epoch = answer.epoch
            began_s, before = time.monotonic(), (*answer.records, *answer.epoch.dead)
            try:
                reformed = self._enter_epoch(run, world, None, answer.records, where)
                changes = self._changes(before, "", reformed.state.step, time.monotonic() - began_s)
                return dataclasses.replace(reformed, events=changes)
            except _EpochFailed as failed:
                cause = failed.cause
                _destroy_group()
        raise cause

    def _wait_for_answer(self, where: str, stop: StopRequest) -> JoinAnswer:
        request = self._requests.ask(self._member, self._facts)
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        while (answer := self._requests.find_answer(request)) is None:
            if stop.is_made:
                raise Interrupted(where, f"stopped by {stop.cause} before it was admitted", "start it again")
            if time.monotonic() > deadline_s:
                raise PeerTimeout(where, f"the run did not admit it for {JOIN_TIMEOUT_S:g} s", "check its other ranks")
            time.sleep(JOIN_POLL_S)
            self._requests.refresh(request)
        if answer.epoch is None:
            raise UserError(where, f"was refused: {answer.reason}", "start it with the run's own settings and version")
        return answer

    def _form_epoch(self, run: Run, world: World, mine: LoopState, cause: PeerLost | PeerTimeout) -> Reformed:
        """Agree with the other members on the next epoch and enter it."""
        dead, suspected = (
            {self._epoch.members[rank] for rank in ranks if rank < len(self._epoch.members)}
            for ranks in _abort_groups()
        )
        record = {"step": mine.step, "finished": mine.finished, "whole": int(mine.is_consistent)}
        self._epoch, records = agree_on_epoch(
            self._store,
            "survivors",
            self._epoch,
            self._member,
            record,
            dead,
            suspects=suspected,
            joining=self.find_joiners(),
            on_registered=_destroy_group,
        )
        members = self._layout.whole_replicas(self._epoch.members)
        if self._member not in members:
            found = f"{cause.found}; the replica of rank {self._member} is not whole and leaves the run"
            raise PeerLost(cause.where, found, cause.todo) from None
        self._epoch = dataclasses.replace(self._epoch, members=members)
        if self._member == min(member for member in members if member in records):
            for request in self._requests.waiting():
                if request.member in members:
                    self._requests.answer(request, JoinAnswer(self._epoch, records))
        return self._enter_epoch(run, world, mine, records, cause.where)

    def _enter_epoch(
        self, run: Run, world: World, mine: LoopState | None, records: Mapping[int, Mapping[str, int]], where: str
    ) -> Reformed:
        """Make the process group of the current epoch and agree on one state. `mine` is None for a new member."""
        members = self._epoch.members
        old = [member for member in members if member in records]
        size, rank = len(members), members.index(self._member)
        todo = "lakh resume continues from the last checkpoint"
        run = dataclasses.replace(run, mesh=self._layout.mesh_of(members))
        try:
            run.accumulation(size, uneven=True)
        except InfeasiblePlan as error:
            raise PeerLost(where, f"{self._epoch.reason}; {size} ranks remain, but {error.found}", todo) from None
        progress = {
            member: TensorProgress(records[member]["step"], is_consistent=bool(records[member]["whole"]))
            if member in records
            else TensorProgress(0, is_consistent=False)
            for member in members
        }
        step = choose_step(progress, self._layout)
        if step is None:
            found = f"{self._epoch.reason}; a part of the model was inside an update on every rank that holds it"
            raise PeerLost(where, found, todo) from None
        if mine is not None:
            mine = dataclasses.replace(
                mine,
                step=step,
                position=mine.position + (step - mine.step) * run.data.batch,
                finished=min(records[member]["finished"] for member in old),
                is_consistent=True,
            )
        sources = self._layout.sources(progress, step)
        with _epoch_errors(is_healing=False):
            board = CollectiveBoard(board_path(f"{self._rendezvous}.epoch-{self._epoch.number}"), rank, size)
            world = dataclasses.replace(world, rank=rank, size=size, board=board, is_joining=False)
            self._join(world)
        with _epoch_errors(is_healing=self._member in sources):
            run, mine = self._exchange_state(run, world, mine, [m for m in sources if m not in records], sources)
            with world.peer_errors("receiving the state", self._peer_timeout_s):
                self._heal(mine.tensors, sources)
        return Reformed(run, world, mine, [])

    def _exchange_state(
        self, run: Run, world: World, mine: LoopState | None, new: list[int], sources: Mapping[int, int]
    ) -> tuple[Run, LoopState]:
        """Give new members everything but the contents of the tensors, through the store."""
        key = f"epoch/{self._epoch.number}/state"
        if mine is not None:
            for member in new:
                if sources[member] == self._member:
                    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in mine.tensors.items()}
                    content = (run.data, dataclasses.replace(mine, tensors={}), shapes)
                    self._store.set(f"{key}/{member}", pickle.dumps(content))
            return run, mine
        data, state, shapes = pickle.loads(self._store.get(f"{key}/{self._member}"))
        tensors = {
            name: torch.empty(shape, dtype=dtype, device=world.device) for name, (shape, dtype) in shapes.items()
        }
        return dataclasses.replace(run, data=data), dataclasses.replace(state, tensors=tensors)

    def _changes(self, before: tuple[int, ...], found: str, step: int, seconds: float) -> list[Event]:
        members = self._epoch.members
        lost = tuple(member for member in before if member not in members)
        joined = tuple(member for member in members if member not in before)
        changes: list[Event] = []
        if lost:
            reason = f"{found}; {self._epoch.reason}" if found else self._epoch.reason
            left = len(before) - len(lost)
            changes.append(RanksLost(step=step, lost=lost, left=left, reason=reason, seconds=seconds))
        if joined:
            changes.append(RanksJoined(step=step, joined=joined, ranks=len(members), seconds=seconds))
        return changes

    def _heal(self, tensors: Mapping[str, Tensor], sources: Mapping[int, int]) -> None:
        """Copy the tensors of each stale member from its source, a member with the same part of the model."""
        rank_of = {member: rank for rank, member in enumerate(self._epoch.members)}
        source = sources.get(self._member)
        for name in sorted(tensors):
            if not tensors[name].numel():
                continue
            if source is not None:
                dist.recv(tensors[name], rank_of[source])
            for stale in sorted(member for member, of in sources.items() if of == self._member):
                dist.send(tensors[name], rank_of[stale])

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


class _EpochFailed(Exception):
    """A member died while the epoch formed."""

    def __init__(self, cause: PeerLost | PeerTimeout, *, was_healing: bool) -> None:
        super().__init__(str(cause))
        self.cause, self.was_healing = cause, was_healing


@contextlib.contextmanager
def _epoch_errors(*, is_healing: bool) -> Iterator[None]:
    try:
        yield
    except (PeerLost, PeerTimeout) as error:
        raise _EpochFailed(error, was_healing=is_healing) from error


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
