"""All-reduce that survives the loss of ranks without restarting a process and without wrong sums.

    group = ResilientGroup(store, member, size)
    for step in ...:
        for bucket in buckets:
            group.all_reduce(bucket)      # the average over the current members
        if group.commit():                # all members have all results: the step may be applied
            group.synchronise(tensors)    # the membership changed: all members copy the state of an older one

The input of every all_reduce is kept until `commit`. If a member is lost before that, the survivors agree on the next
epoch, restore the kept inputs and repeat the reductions with the divisor of the new epoch. If one survivor has passed a
commit and another has not, all results were complete before it: the other one treats it as passed and returns the same
value to its caller (`merge_progress`). The unit of failure is the caller: in hybrid sharding, a replica.

Costs one copy of each bucket until the commit. `reconfigure` is named as in torchcomms.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from lakh.c3.faults.membership import SETTLE_S, Epoch, PollingStore, agree_on_epoch
from lakh.c3.group import CommGroup
from lakh.c3.native import OPS
from lakh.c3.torch.tensors import DTYPES
from lakh.errors import PeerError, PeerLost, PeerTimeout, UserError

__all__ = ["MemberProgress", "ResilientGroup", "merge_progress"]

MAX_EPOCHS_PER_CALL = 16
"""A call that loses ranks this many times in a row gives up."""


@dataclass(frozen=True)
class MemberProgress:
    """How far a member has come; part of its registration for the next epoch."""

    committed: int = 0
    synchronised: int = 0
    reported: int = 0
    """The last epoch reported to its caller: a commit in a later one returns that the membership has changed."""
    admits: bool = False
    """It has passed its last commit and is still inside it to admit members: its caller will learn of the epoch."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> MemberProgress:
        """From a member's registration, or from the answer to a joining member."""
        return cls(**{one.name: record[one.name] for one in fields(cls)})


def merge_progress(registered: Iterable[MemberProgress], epoch: int) -> MemberProgress:
    """The progress of every member of a new epoch: that of the members that had come farthest.

    No member can be ahead by more than one commit, and all that have passed it continue in the same way: they admit
    new members, or have returned to their callers. Members that are behind do the same, so that callers stay in step.
    """
    progress = list(registered)
    committed = max(one.committed for one in progress)
    ahead = [one for one in progress if one.committed == committed]
    reported = epoch if any(one.admits for one in ahead) else max(one.reported for one in ahead)
    return MemberProgress(committed, max(one.synchronised for one in progress), reported)


class ResilientGroup:
    """Member `member` of `size`, through a store that outlives the ranks (the launcher's, or a file)."""

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
        self._progress = MemberProgress(reported=self.epoch.number)
        self._fresh: set[int] = set()
        """Members that have joined and have no state yet."""
        self._inputs: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        self._joins_answered = 0
        self._group: CommGroup | None = None
        self._connect(first=_epoch is None)

    # --- for the training loop --------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return len(self.epoch.members)

    @property
    def rank(self) -> int:
        return self.epoch.members.index(self.member)

    @property
    def committed(self) -> int:
        """Number of commits passed."""
        return self._progress.committed

    def all_reduce(self, tensor: torch.Tensor, op: str = "avg") -> None:
        """Reduce in place over the members of the epoch; repeats in the next epoch if members are lost."""
        if not tensor.is_contiguous() or tensor.device.type != "cpu" or tensor.dtype not in DTYPES:
            raise UserError("c3 all_reduce", f"{tensor.dtype} on {tensor.device}", "give a contiguous CPU tensor")
        self._inputs.append((tensor, tensor.clone(), op))
        try:
            self._reduce(tensor, op)
        except PeerError as error:
            self._recover(error)

    def commit(self) -> bool:
        """Wait until every member has all its results. True if the membership has changed since the last commit."""
        reported, target = self._progress.reported, self.committed + 1

        def find_joiners() -> bool:
            waiting = torch.tensor([int(self.rank == 0 and bool(self._joiners()))], dtype=torch.int32)
            self._reduce(waiting, "max")
            return bool(int(waiting))

        joiners_wait = self._repeat(find_joiners, lambda: self.committed >= target)
        if joiners_wait is not None:
            self._advance(replace(self._progress, committed=target, reported=self.epoch.number))
            if joiners_wait:
                self.reconfigure("ranks request to join", joining=True)
        return self._progress.reported != reported

    def synchronise(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the values of the lowest member that has not just joined to all; repeats if members are lost."""
        wanted, target = list(tensors), self._progress.synchronised + 1

        def broadcast_all() -> bool:
            for tensor in wanted:
                self._broadcast(tensor)
            self._reduce(torch.zeros(1, dtype=torch.int32), "max")  # returns when all have all tensors
            return True

        if self._repeat(broadcast_all, lambda: self._progress.synchronised >= target):
            self._advance(replace(self._progress, synchronised=target))

    # --- epochs -----------------------------------------------------------------------------------------------------

    def reconfigure(
        self, reason: str, *, dead: Iterable[int] = (), suspects: Iterable[int] = (), joining: bool = False
    ) -> Epoch:
        """Agree with the other survivors on the next epoch and connect. `joining`: from inside a passed commit."""
        gone, suspected = set(dead), set(suspects)
        progress = replace(self._progress, admits=joining)
        for _ in range(MAX_EPOCHS_PER_CALL):
            joiners = self._joiners() if joining else {}
            if self._group is not None:
                self._group.abort(f"epoch {self.epoch.number} ended: {reason}")
            before = self.epoch.members
            epoch, records = agree_on_epoch(
                self.store,
                self.name,
                self.epoch,
                self.member,
                asdict(progress),
                gone,
                suspects=suspected,
                joining=joiners.values(),
                min_ranks=self.min_ranks,
                settle_s=self.settle_s,
                on_registered=self.close,
            )
            self.epoch = Epoch(epoch.number, epoch.members, epoch.dead, f"{reason}; {epoch.reason}")
            present = [records[member] for member in epoch.members if member in records]
            progress = merge_progress(map(MemberProgress.of, present), epoch.number)
            self._advance(progress)
            self._fresh = (self._fresh & set(epoch.members)) | (set(epoch.members) - set(before))
            for nonce, member in joiners.items():
                if member in epoch.members:
                    admitted = {
                        "number": epoch.number,
                        "members": epoch.members,
                        "fresh": sorted(self._fresh),
                        "progress": asdict(progress),
                    }
                    self.store.set(f"{self.name}/admitted/{nonce}", json.dumps(admitted))
            try:
                self._connect(first=False)
            except PeerTimeout:
                gone, suspected = set(), set()  # a member registered and died; the next epoch finds out which
                continue
            self.on_epoch(self.epoch)
            return self.epoch
        raise PeerLost(f"c3, member {self.member}", "too many losses in a row", "restart from the last checkpoint")

    @staticmethod
    def rejoin(
        store: Any, member: int, *, name: str = "c3-resilient", timeout_to_join_s: float = 60.0, **options: Any
    ) -> ResilientGroup:
        """Return as `member` (its old process must be dead) at the members' next commit.

        Call `synchronise` next, as the members do after that commit.
        """
        nonce, slot = secrets.token_hex(8), 1
        mine = f"{nonce}:{member}"
        # A single atomic step, so that a kill leaves no gap.
        while bytes(store.compare_set(f"{name}/join/{slot}", "", mine)).decode() != mine:
            slot += 1
        admitted = json.loads(PollingStore(store, timeout_to_join_s).get(f"{name}/admitted/{nonce}"))
        epoch = Epoch(admitted["number"], tuple(admitted["members"]), (), "joined")
        group = ResilientGroup(store, member, len(epoch.members), name=name, _epoch=epoch, **options)
        group._progress = MemberProgress.of(admitted["progress"])
        group._fresh = set(admitted["fresh"])
        return group

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    # --- internal ---------------------------------------------------------------------------------------------------

    def _open_group(self) -> CommGroup:
        if self._group is None:
            raise PeerLost(f"c3, member {self.member}", "the group is closed", "create a new one")
        return self._group

    def _reduce(self, tensor: torch.Tensor, op: str) -> None:
        address = tensor.data_ptr()
        self._open_group().run("all_reduce", DTYPES[tensor.dtype], OPS[op], -1, address, address, tensor.numel())

    def _repeat(self, attempt: Callable[[], bool], is_passed: Callable[[], bool]) -> bool | None:
        """The result of `attempt`, repeated while members are lost; None if another survivor had passed it already."""
        for _ in range(MAX_EPOCHS_PER_CALL):
            try:
                return attempt()
            except PeerError as error:
                self._recover(error)
            if is_passed():
                return None
        raise PeerLost(f"c3, member {self.member}", "too many losses in one call", "restart from the last checkpoint")

    def _recover(self, error: PeerError) -> None:
        """Start a new epoch and repeat every reduction since the last commit from the kept inputs."""
        for _ in range(MAX_EPOCHS_PER_CALL):
            failure = self._group.failure() if self._group is not None else None
            ranks = failure.dead if failure else ()
            blamed = [self.epoch.members[rank] for rank in ranks if rank < len(self.epoch.members)]
            dead = blamed if failure is not None and failure.is_certain else []
            self.reconfigure(failure.reason if failure else str(error), dead=dead, suspects=blamed)
            try:
                for tensor, original, op in self._inputs:
                    tensor.copy_(original)
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
            self._open_group().run("broadcast", DTYPES[torch.uint8], -1, root, 0, flat.data_ptr(), size_bytes)
            tensor.copy_(flat)

    def _advance(self, progress: MemberProgress) -> None:
        if progress.synchronised > self._progress.synchronised:
            self._fresh = set()
        if progress.committed > self._progress.committed:
            self._inputs.clear()
        self._progress = progress

    def _joiners(self) -> dict[str, int]:
        """Unanswered requests to join, by the nonce of the requesting process; a member's last request counts.

        Checked at every commit until answered, because the deciding member may not have seen the request.
        """
        requests: dict[int, str] = {}
        slot = self._joins_answered + 1
        while self.store.check([f"{self.name}/join/{slot}"]):
            nonce, _, member = self.store.get(f"{self.name}/join/{slot}").decode().partition(":")
            requests[int(member)] = nonce
            slot += 1
        waiting = {m: nonce for m, nonce in requests.items() if not self.store.check([f"{self.name}/admitted/{nonce}"])}
        if not waiting:
            self._joins_answered = slot - 1
        return {nonce: member for member, nonce in waiting.items() if member not in self.epoch.members}

    def _connect(self, first: bool) -> None:
        store = PollingStore(self.store, self.timeout_s if first else self.settle_s + 5.0)
        self._group = CommGroup.join(
            store, self.rank, self.size, name=f"{self.name}/group/{self.epoch.number}", timeout_s=self.timeout_s
        )

    def __enter__(self) -> ResilientGroup:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(PeerError):
            self.close()
