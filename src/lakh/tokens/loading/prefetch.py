"""Prefetching: a child process fills a ring buffer of batches in shared memory while the trainer works.

The trainer takes batches in order and returns each slot when it takes the next batch. The child (lakh.child_process)
imports no torch and ignores SIGINT and SIGTERM, because a trainer that is asked to stop still needs its current batch.
A child that dies raises PeerLost, and a batch that does not arrive within `timeout_s` raises PeerTimeout. `wait_s`
counts the time spent waiting, `starved` the batches that were not ready when requested.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from lakh.child_process import Channel, ChannelClosed, ChildCrashed, ChildProcess
from lakh.errors import LakhError, PeerLost, PeerTimeout
from lakh.spec import Data
from lakh.tokens.loading.digest import StreamDigest, digest_sequences
from lakh.tokens.loading.stream import TokenStream, document_numbers

__all__ = ["BatchRequest", "PrefetchedBatch", "Prefetcher"]

TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 5.0


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

    def position(self, step: int) -> int:
        return self.first_position + (step - self.first_step) * self.data.batch + self.offset


@dataclass(frozen=True)
class PrefetchedBatch:
    """One batch. The arrays are views of the ring buffer and become invalid with the next `take`."""

    tokens: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray | None
    digest: StreamDigest


class _RingBuffer:
    """Slots of equal size in shared memory: tokens, lengths, document numbers."""

    def __init__(self, request: BatchRequest, descriptor: int) -> None:
        data, count = request.data, request.num_sequences
        self.depth = max(1, min(data.prefetch, request.last_step - request.first_step))
        self.shapes = [(count, data.sequence + 1), (count,), (count, data.sequence) if data.document_mask else (0,)]
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


class Prefetcher:
    """The batches of steps first_step, first_step + 1, ... of a request, up to data.prefetch of them in advance."""

    def __init__(self, request: BatchRequest, *, timeout_s: float = TIMEOUT_S) -> None:
        self.request, self.timeout_s = request, timeout_s
        self.wait_s = 0.0
        """Seconds that the caller has waited in `take` so far."""
        self.starved = 0
        """Batches, after the first, that were not ready when requested."""
        self._ready: deque[StreamDigest] = deque()  # of the batches that are ready
        self._next, self._holds_slot = request.first_step, False
        self._failure: Exception | None = None
        with _anonymous_file() as file:
            self._ring = _RingBuffer(request, file.fileno())
            self._child = ChildProcess.start(
                "lakh.tokens.loading.prefetch:fill_ring",
                request,
                file.fileno(),
                pass_fds=[file.fileno()],
                env={"TOKENIZERS_PARALLELISM": "false"},
            )

    @property
    def ready(self) -> int:
        """Batches that are ready now."""
        return len(self._ready)

    def take(self, step: int) -> PrefetchedBatch:
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
        tokens, lengths, documents = self._ring.slot(step - self.request.first_step)
        has_documents = self.request.data.document_mask
        return PrefetchedBatch(tokens, lengths, documents if has_documents else None, self._ready.popleft())

    def close(self) -> None:
        """End the child process and discard the prefetched batches."""
        self._child.stop(CLOSE_TIMEOUT_S)

    def _update_ready(self, timeout_s: float) -> None:
        """Count the batches that the child has finished; waits up to `timeout_s` for the first one."""
        try:
            while self._failure is None and self._child.channel.poll(timeout_s):
                self._ready.append(self._child.channel.receive())
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


def fill_ring(channel: Channel, request: BatchRequest, descriptor: int) -> None:
    """The child process: fill slots until the last step, or until the parent closes the channel."""
    ring = _RingBuffer(request, descriptor)
    stream = TokenStream(request.data, request.seed)
    for number, step in enumerate(range(request.first_step, request.last_step)):
        if number >= ring.depth:
            channel.receive()  # a slot is free
        position = request.position(step)
        batch = stream.read_range(position, request.num_sequences)
        tokens, lengths, documents = ring.slot(number)
        tokens[:], lengths[:] = batch.tokens, batch.lengths
        if request.data.document_mask:
            documents[:] = document_numbers(batch)
        channel.send(digest_sequences(position, batch.tokens, batch.lengths))
