"""All-reduce that survives the loss of ranks: no process is started again, no sum is wrong.

    group = ResilientGroup(store, member, size)
    for step in ...:
        for bucket in buckets:
            group.all_reduce(bucket)      # the average over the members that are there
        if group.commit():                # all of them have all results: now the step may be applied
            group.synchronise(tensors)    # the membership changed: all take the state of one who was there before

The input of every all_reduce is kept until `commit`. When a member is lost in between, the survivors agree on the next
epoch, put the kept inputs back and run the same reductions again, with the divisor of the new epoch. If one survivor
has passed a commit and another has not, everybody had all results before it: the other counts it as passed, and tells
its caller what the first has told (`caught_up`). The unit of failure is whoever calls this: in hybrid sharding, a
replica.

Costs one copy of each bucket, kept until the commit. The names follow torchcomms: `reconfigure`,
`get_reconfigure_handle`.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from lakh.c3.group import Group
from lakh.c3.membership import SETTLE_S, Epoch, PollingStore, agree
from lakh.c3.native import OPS
from lakh.c3.torch_tensors import DTYPES
from lakh.errors import PeerError, PeerLost, PeerTimeout, UserError

__all__ = ["Position", "ResilientGroup", "caught_up"]

MAX_EPOCHS_PER_CALL = 16
"""A call that has lost ranks so many times in a row gives up."""


@dataclass(frozen=True)
class Position:
    """How far a member has come; what it signs up for the next epoch with."""

    committed: int = 0
    synchronised: int = 0
    reported: int = 0
    """The epoch that its caller was last told of: a commit in a later one says that the membership has changed."""
    admits: bool = False
    """It has passed its last commit, and is still inside it to let others in: its caller will be told of the epoch."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Position:
        """From what a member signed with, or an answer to one who joins."""
        return cls(**{one.name: record[one.name] for one in fields(cls)})


def caught_up(said: Iterable[Position], epoch: int) -> Position:
    """Where every member of a new epoch stands, from what all of them signed: with those who had come farthest.

    Nobody can be ahead by more than one commit, and all who have passed it go on in the same way: they let others in,
    or they have told their callers. Whoever is behind does as they did, or callers would part.
    """
    positions = list(said)
    committed = max(one.committed for one in positions)
    ahead = [one for one in positions if one.committed == committed]
    reported = epoch if any(one.admits for one in ahead) else max(one.reported for one in ahead)
    return Position(committed, max(one.synchronised for one in positions), reported)


class ResilientGroup:
    """Membership `member` of `size`, through a store that outlives the ranks (the launcher's, or a file)."""

    def __init__(
        self,
        store: Any,
        member: int,
        size: int,
        *,
        name: str = "c3-resilient",
        timeout_s: float = 60.0,
        min_ranks: int = 1,
        settle_s: float = SETTLE_S,
        on_epoch: Callable[[Epoch], None] = lambda epoch: None,
        _epoch: Epoch | None = None,
    ) -> None:
        self.store, self.member, self.name = store, member, name
        self.timeout_s, self.min_ranks, self.settle_s, self.on_epoch = timeout_s, min_ranks, settle_s, on_epoch
        self.epoch = _epoch or Epoch(0, tuple(range(size)))
        self._position = Position(reported=self.epoch.number)
        self._fresh: set[int] = set()
        """Members that have joined and have nothing of their own yet."""
        self._kept: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        self._joins_answered = 0
        self._group: Group | None = None
        self._meet(first=_epoch is None)

    # --- what a training loop calls ---------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return len(self.epoch.members)

    @property
    def rank(self) -> int:
        return self.epoch.members.index(self.member)

    @property
    def committed(self) -> int:
        """How many commits were passed."""
        return self._position.committed

    def all_reduce(self, tensor: torch.Tensor, op: str = "avg") -> None:
        """In place, over the members of the epoch; again over the next epoch's where members are lost."""
        if not tensor.is_contiguous() or tensor.device.type != "cpu" or tensor.dtype not in DTYPES:
            raise UserError("c3 all_reduce", f"{tensor.dtype} on {tensor.device}", "give a contiguous CPU tensor")
        self._kept.append((tensor, tensor.clone(), op))
        try:
            self._reduce(tensor, op)
        except PeerError as error:
            self._recover(error)

    def commit(self) -> bool:
        """Wait until every member has all its results. True where the membership has changed since the last commit."""
        reported, target = self._position.reported, self.committed + 1
        for _ in range(MAX_EPOCHS_PER_CALL):
            waiting = torch.tensor([int(self.rank == 0 and bool(self._joiners()))], dtype=torch.int32)
            try:
                self._reduce(waiting, "max")
            except PeerError as error:
                self._recover(error)
                if self.committed >= target:  # another survivor had passed it
                    return self._position.reported != reported
                continue
            self._advance(replace(self._position, committed=target, reported=self.epoch.number))
            if int(waiting):
                self.reconfigure("ranks ask to join", joining=True)
            return self._position.reported != reported
        raise PeerLost(f"c3, member {self.member}", "too many losses in one commit", "start again")

    def synchronise(self, tensors: Iterable[torch.Tensor]) -> None:
        """The values of the lowest member that has not just joined, for everybody; again where members are lost."""
        wanted, target = list(tensors), self._position.synchronised + 1
        for _ in range(MAX_EPOCHS_PER_CALL):
            try:
                for tensor in wanted:
                    self._broadcast(tensor)
                self._reduce(torch.zeros(1, dtype=torch.int32), "max")  # whoever is past it knows that all have all
            except PeerError as error:
                self._recover(error)
                if self._position.synchronised >= target:
                    return
                continue
            self._advance(replace(self._position, synchronised=target))
            return
        raise PeerLost(f"c3, member {self.member}", "too many losses while synchronising", "start again")

    # --- epochs -----------------------------------------------------------------------------------------------------

    def get_reconfigure_handle(self) -> str:
        """What names this member to others: pass it to whoever calls `reconfigure` for it."""
        return f"{self.name}/{self.member}"

    def reconfigure(
        self, reason: str, *, dead: Iterable[int] = (), suspects: Iterable[int] = (), joining: bool = False
    ) -> Epoch:
        """Agree with the other survivors on the next epoch and meet in it. `joining`: from inside a passed commit."""
        gone, silent = set(dead), set(suspects)
        position = replace(self._position, admits=joining)
        for _ in range(MAX_EPOCHS_PER_CALL):
            joiners = self._joiners() if joining else {}
            if self._group is not None:
                self._group.abort(f"epoch {self.epoch.number} is over: {reason}")
            before = self.epoch.members
            epoch, records = agree(
                self.store,
                self.name,
                self.epoch,
                self.member,
                asdict(position),
                gone,
                suspects=silent,
                joining=joiners.values(),
                min_ranks=self.min_ranks,
                settle_s=self.settle_s,
                on_signed=self.close,
            )
            self.epoch = Epoch(epoch.number, epoch.members, epoch.dead, f"{reason}; {epoch.reason}")
            there = [records[member] for member in epoch.members if member in records]
            position = caught_up(map(Position.of, there), epoch.number)
            self._advance(position)
            self._fresh = (self._fresh & set(epoch.members)) | (set(epoch.members) - set(before))
            for nonce, member in joiners.items():
                if member in epoch.members:
                    admitted = {
                        "number": epoch.number,
                        "members": epoch.members,
                        "fresh": sorted(self._fresh),
                        "position": asdict(position),
                    }
                    self.store.set(f"{self.name}/admitted/{nonce}", json.dumps(admitted))
            try:
                self._meet(first=False)
            except PeerTimeout:
                gone, silent = set(), set()  # somebody signed and died; the next epoch finds out who
                continue
            self.on_epoch(self.epoch)
            return self.epoch
        raise PeerLost(f"c3, member {self.member}", "too many losses in a row", "start again")

    @staticmethod
    def rejoin(
        store: Any, member: int, *, name: str = "c3-resilient", patience_s: float = 60.0, **options: Any
    ) -> ResilientGroup:
        """Come back as `member` (its old process must be dead), at the members' next commit.

        Call `synchronise` next: the members do so after that commit.
        """
        nonce, slot = secrets.token_hex(8), 1
        mine = f"{nonce}:{member}"
        while (
            bytes(store.compare_set(f"{name}/join/{slot}", "", mine)).decode() != mine
        ):  # one step: a kill leaves no gap
            slot += 1
        admitted = json.loads(PollingStore(store, patience_s).get(f"{name}/admitted/{nonce}"))
        epoch = Epoch(admitted["number"], tuple(admitted["members"]), (), "joined")
        group = ResilientGroup(store, member, len(epoch.members), name=name, _epoch=epoch, **options)
        group._position = Position.of(admitted["position"])
        group._fresh = set(admitted["fresh"])
        return group

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    # --- inside -----------------------------------------------------------------------------------------------------

    def _live(self) -> Group:
        if self._group is None:
            raise PeerLost(f"c3, member {self.member}", "the group is closed", "make a new one")
        return self._group

    def _reduce(self, tensor: torch.Tensor, op: str) -> None:
        address = tensor.data_ptr()
        self._live().run("all_reduce", DTYPES[tensor.dtype], OPS[op], -1, address, address, tensor.numel())

    def _recover(self, error: PeerError) -> None:
        """A new epoch, then every reduction since the last commit again, from what was kept."""
        for _ in range(MAX_EPOCHS_PER_CALL):
            failure = self._group.failure() if self._group is not None else None
            ranks = failure.dead if failure else ()
            blamed = [self.epoch.members[rank] for rank in ranks if rank < len(self.epoch.members)]
            dead = blamed if failure is not None and failure.is_certain else []
            self.reconfigure(failure.reason if failure else str(error), dead=dead, suspects=blamed)
            try:
                for tensor, kept, op in self._kept:
                    tensor.copy_(kept)
                    self._reduce(tensor, op)
            except PeerError as again:
                error = again
                continue
            return
        raise error

    def _broadcast(self, tensor: torch.Tensor) -> None:
        root = next(rank for rank, member in enumerate(self.epoch.members) if member not in self._fresh)
        with torch.no_grad():
            flat = tensor.detach().contiguous()
            size_bytes = flat.numel() * flat.element_size()
            self._live().run("broadcast", DTYPES[torch.uint8], -1, root, 0, flat.data_ptr(), size_bytes)
            tensor.copy_(flat)

    def _advance(self, position: Position) -> None:
        if position.synchronised > self._position.synchronised:
            self._fresh = set()
        if position.committed > self._position.committed:
            self._kept.clear()
        self._position = position

    def _joiners(self) -> dict[str, int]:
        """Who asks to join and was not answered yet, by the nonce of the asking process; a member's last one counts.

        Asked again at every commit until there is an answer: the epoch may be decided by one who had not looked.
        """
        asked: dict[int, str] = {}
        slot = self._joins_answered + 1
        while self.store.check([f"{self.name}/join/{slot}"]):
            nonce, _, member = self.store.get(f"{self.name}/join/{slot}").decode().partition(":")
            asked[int(member)] = nonce
            slot += 1
        waiting = {m: nonce for m, nonce in asked.items() if not self.store.check([f"{self.name}/admitted/{nonce}"])}
        if not waiting:
            self._joins_answered = slot - 1
        return {nonce: member for member, nonce in waiting.items() if member not in self.epoch.members}

    def _meet(self, first: bool) -> None:
        patience_s = self.timeout_s if first else self.settle_s + 5.0
        store = PollingStore(self.store, patience_s)
        self._group = Group.meet(
            store, self.rank, self.size, name=f"{self.name}/group/{self.epoch.number}", timeout_s=self.timeout_s
        )

    def __enter__(self) -> ResilientGroup:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(PeerError):
            self.close()
