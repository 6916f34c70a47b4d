"""Watch the collectives of this rank: how long they block it, and which one it entered last.

    CollectiveClock     seconds spent inside collectives, so that the rest of a step is this rank's own compute time
    CollectiveBoard     this rank's part of the flight record (collective_records.py): the number of the last collective
                        that it entered, per group; after a timeout it tells which ranks did not enter the current one

Both hook the methods of the process groups and `Work.wait`. On a GPU a collective is entered when it is enqueued, and
those that autograd's own thread enqueues are not counted; all ranks leave out the same ones. Cost: about a microsecond
per collective.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lakh.trainer.observability.collective_records import RECORD_BYTES, SLOT, SLOTS, describe_missing, read_record
from lakh.trainer.observability.traffic import collective_methods

__all__ = ["CollectiveBoard", "CollectiveClock"]


class CollectiveClock:
    """Counts the seconds in which collectives block this rank, inside a `with` block."""

    def __init__(self, board: CollectiveBoard | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._board, self._clock = board, clock
        self._plain: list[tuple[type, str, Any]] = []
        self._inside, self._thread = False, threading.get_ident()
        self._blocked_s = self._began_s = 0.0

    def start_step(self) -> None:
        self._blocked_s, self._began_s = 0.0, self._clock()

    def compute_s(self) -> float:
        """Seconds since `start_step` outside of collectives."""
        return max(0.0, self._clock() - self._began_s - self._blocked_s)

    def __enter__(self) -> Self:
        for owner, name, kind in collective_methods():
            self._wrap(owner, name, kind)
        works: list[type] = [dist.Work, *dist.Work.__subclasses__()]  # c3 has its own classes
        for work in works:
            if "wait" in vars(work):
                self._wrap(work, "wait", "")
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, method in self._plain:
            setattr(owner, name, method)
        self._plain.clear()

    def _wrap(self, owner: type, name: str, kind: str) -> None:
        self._plain.append((owner, name, vars(owner)[name]))
        plain = getattr(owner, name)

        def call(target: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread:  # other threads do not block the training
                return plain(target, *args, **kwargs)
            if kind and self._board is not None:
                self._board.enter(target, kind)
            self._inside, began_s = True, self._clock()
            try:
                return plain(target, *args, **kwargs)
            finally:
                self._inside = False
                self._blocked_s += self._clock() - began_s

        setattr(owner, name, call)


class CollectiveBoard:
    """A file with one record per rank: the last collective that it entered in each of its groups."""

    def __init__(self, path: str | Path, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._groups: dict[int, tuple[int, tuple[int, ...]]] = {}  # id of a group -> (slot, its ranks)
        self._entered: list[tuple[int, int, str]] = []  # per slot: group key, number, name
        self._last_slot: int | None = None
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size * RECORD_BYTES)  # the same for every rank
            self._memory = mmap.mmap(descriptor, size * RECORD_BYTES)
        finally:
            os.close(descriptor)

    def enter(self, group: Any, kind: str) -> None:
        found = self._groups.get(id(group))
        if found is None:
            found = self._add_group(group)
        slot, _ = found
        if slot < SLOTS:
            key, number, _ = self._entered[slot]
            self._entered[slot] = (key, number + 1, kind)
            self._last_slot = slot
            self._write(slot)

    def missing(self) -> str:
        """Which ranks did not enter the collective that this rank entered last; empty if all did."""
        if self._last_slot is None:
            return ""
        key, number, kind = self._entered[self._last_slot]
        ranks = next(ranks for slot, ranks in self._groups.values() if slot == self._last_slot)
        entered = {rank: self._number_of(rank, key) for rank in ranks if rank < self._size}
        return describe_missing(kind, number, entered)

    def close(self) -> None:
        self._memory.close()

    def _add_group(self, group: Any) -> tuple[int, tuple[int, ...]]:
        is_known = group in distributed_c10d._world.pg_map
        ranks = tuple(dist.get_process_group_ranks(group)) if is_known else tuple(range(self._size))
        key = int.from_bytes(hashlib.sha256(str(ranks).encode()).digest()[:8], "little")
        slot = next((slot for slot, (other, _, _) in enumerate(self._entered) if other == key), len(self._entered))
        if slot == len(self._entered):
            self._entered.append((key, 0, ""))
        self._groups[id(group)] = (slot, ranks)
        return self._groups[id(group)]

    def _write(self, slot: int) -> None:
        key, number, kind = self._entered[slot]
        start = self._rank * RECORD_BYTES + slot * SLOT.size
        self._memory[start : start + SLOT.size] = SLOT.pack(key, number, kind.encode()[:16])

    def _number_of(self, rank: int, key: int) -> int:
        return next((number for found, number, _ in read_record(self._memory, rank) if found == key), 0)
