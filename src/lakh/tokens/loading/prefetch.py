"""Prefetching: a child process fills a ring buffer of batches in shared memory while the trainer works.

A request (`BatchRequest` for tokens) says which arrays a batch has, and reads them in the child.

The trainer takes batches in order and returns each slot when it takes the next batch. The child (lakh.child_process)
imports no torch and ignores SIGINT and SIGTERM, because a trainer that is asked to stop still needs its current batch.
A child that dies raises PeerLost, and a batch that does not arrive within `timeout_s` raises PeerTimeout. `wait_s`
counts the time spent waiting, `starved` the batches that were not ready when requested.

A child takes about a second to start on a busy machine. `prepare_reader` starts it before the first request is known,
and `close(keep=True)` keeps it for the next Prefetcher of this process.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from lakh.child_process import Channel, ChannelClosed, ChildCrashed, ChildProcess
from lakh.errors import LakhError, PeerLost, PeerTimeout
from lakh.spec import Data
from lakh.tokens.loading.digest import StreamDigest, digest_sequences
from lakh.tokens.loading.stream import TokenStream, document_numbers

__all__ = ["BatchRequest", "PrefetchRequest", "PrefetchedBatch", "Prefetcher", "SlotFiller", "prepare_reader"]

TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 5.0

Taken = TypeVar("Taken", covariant=True)
SlotFiller = Callable[[int, list[np.ndarray]], StreamDigest]
"""Fills the arrays of a slot with the batch of a step; returns the digest of its sequences."""


class PrefetchRequest(Protocol[Taken]):
    """Batches of consecutive steps, and how to read them."""

    @property
    def first_step(self) -> int: ...
    @property
    def last_step(self) -> int: ...
    @property
    def prefetch(self) -> int: ...

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Of the arrays of one batch, which are int32."""
        ...

    def open(self) -> SlotFiller:
        """Open the data, in the child process."""
        ...

    def unpack(self, arrays: list[np.ndarray], digest: StreamDigest) -> Taken:
        """The batch in a slot, as views of its arrays."""
        ...


@dataclass(frozen=True)
class BatchRequest:
    """The sequences that a rank reads: at step s, `num_sequences` from position first_position + (s - first_step) *
    batch + offset on."""

    data: Data
    seed: int
    first_step: int
    last_step: int
    first_position: int
    offset: int
    num_sequences: int
    mean_sequences: float = 0.0
    """Of all ranks that read different sequences; 0: all have equally many."""

    def position(self, step: int) -> int:
        return self.first_position + (step - self.first_step) * self.data.batch + self.offset

    @property
    def prefetch(self) -> int:
        return self.data.prefetch

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        data, count = self.data, self.num_sequences
        return [(count, data.sequence + 1), (count,), (count, data.sequence) if data.document_mask else (0,)]

    def open(self) -> SlotFiller:
        stream = TokenStream(self.data, self.seed)

        def fill(step: int, arrays: list[np.ndarray]) -> StreamDigest:
            position = self.position(step)
            batch = stream.read_range(position, self.num_sequences)
            tokens, lengths, documents = arrays
            tokens[:], lengths[:] = batch.tokens, batch.lengths
            if self.data.document_mask:
                documents[:] = document_numbers(batch)
            return digest_sequences(position, batch.tokens, batch.lengths)

        return fill

    def unpack(self, arrays: list[np.ndarray], digest: StreamDigest) -> PrefetchedBatch:
        tokens, lengths, documents = arrays
        return PrefetchedBatch(tokens, lengths, documents if self.data.document_mask else None, digest)


@dataclass(frozen=True)
class PrefetchedBatch:
    """One batch. The arrays are views of the ring buffer and become invalid with the next `take`."""

    tokens: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray | None
    digest: StreamDigest


class _RingBuffer:
    """Slots of equal size in shared memory."""

    def __init__(self, request: PrefetchRequest[object], descriptor: int) -> None:
        self.depth = max(1, min(request.prefetch, request.last_step - request.first_step))
        self.shapes = request.shapes
        self.slot_bytes = -(-sum(4 * math.prod(shape) for shape in self.shapes) // 64) * 64
        size_bytes = self.depth * self.slot_bytes
        if os.fstat(descriptor).st_size < size_bytes:
            os.ftruncate(descriptor, size_bytes)
        self.memory = mmap.mmap(descriptor, size_bytes)

    def slot(self, number: int) -> list[np.ndarray]:
        """The arrays of a slot."""
        offset = (number % self.depth) * self.slot_bytes
        arrays = []
        for shape in self.shapes:
            count = math.prod(shape)
            arrays.append(np.frombuffer(self.memory, np.int32, count, offset).reshape(shape))
            offset += 4 * count
        return arrays


class _Reader:
    """A child process that fills a ring buffer for one request after the other."""

    idle: ClassVar[list[_Reader]] = []
    """At most one, kept for the next request."""

    def __init__(self) -> None:
        self.requests = 0
        """Requests sent so far; its messages carry the number of theirs."""
        self.memory = _anonymous_file()
        self.child = ChildProcess.start(
            "lakh.tokens.loading.prefetch:fill_ring",
            self.memory.fileno(),
            pass_fds=[self.memory.fileno()],
            env={"TOKENIZERS_PARALLELISM": "false"},
        )

    @staticmethod
    def take() -> _Reader:
        while _Reader.idle:
            found = _Reader.idle.pop()
            if found.child.exit_code is None:
                return found
            found.close()
        return _Reader()

    def start(self, request: PrefetchRequest[object]) -> _RingBuffer:
        ring = _RingBuffer(request, self.memory.fileno())
        self.requests += 1
        with contextlib.suppress(ChannelClosed):  # the first batch that is taken says so
            self.child.channel.send(request)
        return ring

    def close(self) -> None:
        self.child.stop(CLOSE_TIMEOUT_S)
        self.memory.close()


def prepare_reader() -> None:
    """Start the child process of the next Prefetcher now, while the caller prepares something else."""
    if not _Reader.idle:
        _Reader.idle.append(_Reader())


class Prefetcher(Generic[Taken]):
    """The batches of steps first_step, first_step + 1, ... of a request, up to `prefetch` of them in advance."""

    def __init__(self, request: PrefetchRequest[Taken], *, timeout_s: float = TIMEOUT_S) -> None:
        self.request, self.timeout_s = request, timeout_s
        self.wait_s = 0.0
        """Seconds that the caller has waited in `take` so far."""
        self.starved = 0
        """Batches, after the first, that were not ready when requested."""
        self._ready: deque[StreamDigest] = deque()  # of the batches that are ready
        self._next, self._holds_slot = request.first_step, False
        self._failure: Exception | None = None
        self._reader = _Reader.take()
        self._child, self._is_closed = self._reader.child, False
        self._ring = self._reader.start(request)
        self._number = self._reader.requests

    @property
    def ready(self) -> int:
        """Batches that are ready now."""
        return len(self._ready)

    def take(self, step: int) -> Taken:
        """The batch of `step`, which must be the next one."""
        if step != self._next or step >= self.request.last_step:
            raise IndexError(f"asked for step {step}; the next is {self._next} of {self.request.last_step}")
        if self._holds_slot:
            with contextlib.suppress(ChannelClosed):  # `_update_ready` records the reason
                self._child.channel.send(None)  # the slot of the previous batch is free
            self._holds_slot = False
        self._update_ready(0.0)
        if not self.ready:
            self.starved += step > self.request.first_step
            began_s = time.monotonic()
            self._update_ready(self.timeout_s)
            self.wait_s += time.monotonic() - began_s
        if not self.ready:
            raise self._failure or PeerTimeout(
                f"data of step {step}",
                f"no batch arrived within {self.timeout_s:g} s",
                "check the disk or network that holds the data, then try again",
            )
        self._next, self._holds_slot = step + 1, True
        return self.request.unpack(self._ring.slot(step - self.request.first_step), self._ready.popleft())

    def close(self, *, keep: bool = False) -> None:
        """Discard the prefetched batches, and end the child process or `keep` it for another Prefetcher."""
        if self._is_closed:
            return
        self._is_closed = True
        if keep and self._failure is None and not _Reader.idle:
            _Reader.idle.append(self._reader)
        else:
            self._reader.close()

    def _update_ready(self, timeout_s: float) -> None:
        """Count the batches that the child has finished; waits up to `timeout_s` for the first one."""
        try:
            while self._failure is None and self._child.channel.poll(timeout_s):
                number, digest = self._child.channel.receive()
                if number == self._number:  # not of an earlier request
                    self._ready.append(digest)
                    timeout_s = 0.0
        except ChannelClosed:
            found = f"the prefetching process ended ({self._child.exit_reason()})"
            self._failure = PeerLost(f"data of step {self._next}", found, "see its output above; then: lakh resume")
        except (LakhError, ChildCrashed, ModuleNotFoundError) as error:
            self._failure = error  # raised after the batches that are ready


def _anonymous_file() -> BinaryIO:
    """Memory that two processes can map: unlimited by /dev/shm, freed with its last user."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("lakh-prefetch"), "r+b")
    return tempfile.TemporaryFile()


def fill_ring(channel: Channel, descriptor: int) -> None:
    """The child process: serve requests until the parent closes the channel."""
    request, number = channel.receive(), 1
    while True:
        request = _fill(channel, request, number, descriptor)
        number += 1


def _fill(channel: Channel, request: PrefetchRequest[object], number: int, descriptor: int) -> PrefetchRequest[object]:
    """Fill slots as they become free, until there is another request, and return that."""
    ring = _RingBuffer(request, descriptor)
    fill = request.open()
    free, filled, steps = ring.depth, 0, request.last_step - request.first_step
    while True:
        while not free or filled == steps or channel.poll():
            message: PrefetchRequest[object] | None = channel.receive()
            if message is not None:
                return message
            free += 1
        digest = fill(request.first_step + filled, ring.slot(filled))
        channel.send((number, digest))
        free, filled = free - 1, filled + 1
