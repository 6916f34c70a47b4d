"""All-reduce that survives the loss of ranks: no process is started again, no sum is wrong.

    group = ResilientGroup(store, member, size)
    for step in ...:
        for bucket in buckets:
            group.all_reduce(bucket)      # the average over the members that are there
        if group.commit():                # all of them have all results: now the step may be applied
            group.synchronise(tensors)    # the membership changed: all take the state of one who was there before

The input of every all_reduce is kept until `commit`. When a member is lost in between, the survivors agree on the next
epoch, put the kept inputs back and run the same reductions again, with the divisor of the new epoch. If one survivor
has passed a commit and another has not, everybody had all results before it: the other counts it as passed. The unit of
failure is whoever calls this: in hybrid sharding, a replica.

Costs one copy of each bucket, kept until the commit. The names follow torchcomms: `reconfigure`,
`get_reconfigure_handle`.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lakh.c3.group import Group
from lakh.c3.membership import SETTLE_S, Epoch, PollingStore, agree
from lakh.c3.native import OPS
from lakh.c3.torch_tensors import DTYPES
from lakh.errors import PeerError, PeerLost, PeerTimeout, UserError

__all__ = ["ResilientGroup"]

MAX_EPOCHS_PER_CALL = 16
"""A call that has lost ranks so many times in a row gives up."""


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
        self.committed = 0
        self.synchronised = 0
        self._fresh: set[int] = set()
        """Members that have joined and have nothing of their own yet."""
        self._kept: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        self._joins_seen = 0
        self._group: Group | None = None
        self._meet(first=_epoch is None)

    # --- what a training loop calls ---------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return len(self.epoch.members)

    @property
    def rank(self) -> int:
        return self.epoch.members.index(self.member)

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
        number = self.epoch.number
        for _ in range(MAX_EPOCHS_PER_CALL):
            target = self.committed + 1
            waiting = torch.tensor([self._somebody_joins()], dtype=torch.int32)
            try:
                self._reduce(waiting, "max")
            except PeerError as error:
                self._recover(error)
                if self.committed >= target:
                    # Another survivor had passed it and is in its next step: all are told at the next commit.
                    return False
                continue
            self._pass_commit()
            if int(waiting):
                self.reconfigure("ranks ask to join", joining=True)
            break
        else:
            raise PeerLost(f"c3, member {self.member}", "too many losses in one commit", "start again")
        changed = self.epoch.number != number or self._changed
        self._changed = False
        return changed

    def synchronise(self, tensors: Iterable[torch.Tensor]) -> None:
        """The values of the lowest member that has not just joined, for everybody; again where members are lost."""
        wanted, target = list(tensors), self.synchronised + 1
        for _ in range(MAX_EPOCHS_PER_CALL):
            try:
                for tensor in wanted:
                    self._broadcast(tensor)
                self._reduce(torch.zeros(1, dtype=torch.int32), "max")  # whoever is past it knows that all have all
            except PeerError as error:
                self._recover(error)
                if self.synchronised >= target:
                    return
                continue
            self._pass_synchronise()
            return
        raise PeerLost(f"c3, member {self.member}", "too many losses while synchronising", "start again")

    # --- epochs -----------------------------------------------------------------------------------------------------

    def get_reconfigure_handle(self) -> str:
        """What names this member to others: pass it to whoever calls `reconfigure` for it."""
        return f"{self.name}/{self.member}"

    def reconfigure(
        self, reason: str, *, dead: Iterable[int] = (), suspects: Iterable[int] = (), joining: bool = False
    ) -> Epoch:
        """Agree with the other survivors on the next epoch and meet in it."""
        gone, silent = set(dead), set(suspects)
        for _ in range(MAX_EPOCHS_PER_CALL):
            joiners = self._joiners() if joining else {}
            if self._group is not None:
                self._group.abort(f"epoch {self.epoch.number} is over: {reason}")
            before = self.epoch.members
            record = {"committed": self.committed, "synchronised": self.synchronised}
            epoch, records = agree(
                self.store,
                self.name,
                self.epoch,
                self.member,
                record,
                gone,
                suspects=silent,
                joining=joiners.values(),
                min_ranks=self.min_ranks,
                settle_s=self.settle_s,
                on_signed=self.close,
            )
            self.epoch = Epoch(epoch.number, epoch.members, epoch.dead, f"{reason}; {epoch.reason}")
            there = [records[member] for member in epoch.members if member in records]
            if max(record["committed"] for record in there) > self.committed:
                self._pass_commit()
            if max(record["synchronised"] for record in there) > self.synchronised:
                self._pass_synchronise()
            self._fresh = (self._fresh & set(epoch.members)) | (set(epoch.members) - set(before))
            for nonce, member in joiners.items():
                if member in epoch.members:
                    admitted = {
                        "number": epoch.number,
                        "members": epoch.members,
                        "fresh": sorted(self._fresh),
                        "committed": self.committed,
                        "synchronised": self.synchronised,
                    }
                    self.store.set(f"{self.name}/admitted/{nonce}", json.dumps(admitted))
            self._changed = True
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
        nonce = secrets.token_hex(8)
        slot = store.add(f"{name}/joins", 1)
        store.set(f"{name}/join/{slot}", f"{nonce}:{member}")
        admitted = json.loads(PollingStore(store, patience_s).get(f"{name}/admitted/{nonce}"))
        epoch = Epoch(admitted["number"], tuple(admitted["members"]), (), "joined")
        group = ResilientGroup(store, member, len(epoch.members), name=name, _epoch=epoch, **options)
        group.committed, group.synchronised = admitted["committed"], admitted["synchronised"]
        group._fresh = set(admitted["fresh"])
        group._joins_seen = int(slot)
        return group

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    # --- inside -----------------------------------------------------------------------------------------------------

    _changed = False

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

    def _pass_synchronise(self) -> None:
        self.synchronised += 1
        self._fresh = set()

    def _pass_commit(self) -> None:
        self.committed += 1
        self._kept.clear()

    def _somebody_joins(self) -> int:
        if self.rank != 0:
            return 0
        return int(bool(self.store.check([f"{self.name}/join/{self._joins_seen + 1}"])))

    def _joiners(self) -> dict[str, int]:
        """Who asks to join, by the nonce of the asking process. The last one of a member counts."""
        found: dict[str, int] = {}
        while self.store.check([f"{self.name}/join/{self._joins_seen + 1}"]):
            self._joins_seen += 1
            nonce, _, member = self.store.get(f"{self.name}/join/{self._joins_seen}").decode().partition(":")
            found = {n: m for n, m in found.items() if m != int(member)} | {nonce: int(member)}
        return {nonce: member for nonce, member in found.items() if member not in self.epoch.members}

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
