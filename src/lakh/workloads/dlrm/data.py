"""Batches for a recommendation model: samples of the training stream, with their ids where they are looked up.

The batch of a step is `data.batch` consecutive positions of the stream, split evenly by rank and then into
micro-batches. A process of its own reads ahead (tokens/loading/prefetch.py), and a thread distributes the ids of the
next step over a process group of its own while this step computes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from lakh.errors import PeerTimeout
from lakh.events import InputDistributed
from lakh.tokens.loading.digest import StreamDigest
from lakh.tokens.loading.prefetch import Prefetcher
from lakh.tokens.loading.skips import SkipRanges
from lakh.workloads.dlrm.batch import ClickBatch
from lakh.workloads.dlrm.click_set import ClickSamples
from lakh.workloads.dlrm.embedding.jagged import JaggedBags
from lakh.workloads.dlrm.samples import ClickRequest, ClickSplit
from lakh.workloads.dlrm.sharding.exchange import TableExchange

__all__ = ["ClickBatches", "heldout_batches", "to_batches"]

CLOSE_TIMEOUT_S = 5.0


class ClickBatches:
    """The training stream of one rank, from a step and a position on."""

    fill = 1.0

    def __init__(
        self,
        request: ClickRequest,
        exchange: TableExchange,
        group: dist.ProcessGroup | None,
        *,
        timeout_s: float,
        ahead: int = 0,
        on_distributed: Callable[[InputDistributed], None] | None = None,
    ) -> None:
        """`group`: for the ids, used by another thread. `timeout_s`: of its collectives. `ahead`: steps whose ids are
        known when a step starts, for caches of rows. `on_distributed`: called for each step after the first."""
        self._timeout_s, self._ahead, self._on_distributed = timeout_s, ahead, on_distributed
        self._request, self._exchange, self._group = request, exchange, group
        self.skips, self.digest = SkipRanges(request.data.skip), StreamDigest()
        self.prefetcher = Prefetcher(request)
        self.wait_s = 0.0
        """Seconds that the trainer has waited for batches so far."""
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[_DistributedStep | BaseException] = queue.SimpleQueue()
        self._next_asked = request.first_step
        self._known: deque[_DistributedStep] = deque()  # the next step, and those ahead of it
        self._computed: deque[tuple[int, float, float]] = deque(maxlen=ahead + 2)  # step, its begin and its end
        self._returned: tuple[int, float] | None = None  # the step that computes now, and since when
        # A daemon thread, so that the process can exit while a peer hangs.
        self._thread = threading.Thread(target=self._distribute_steps, name="lakh-input", daemon=True)
        self._thread.start()

    def micro_batches(self, step: int, device: torch.device) -> list[ClickBatch]:
        """This rank's part of one step. The ids of the next step are distributed while this one computes."""
        if self._returned is not None:
            self._computed.append((*self._returned, time.time()))
        last = min(step + self._ahead, self._request.last_step - 1)
        self._ask_until(last)
        began_s = time.monotonic()
        while not self._known or self._known[-1].step < last:
            self._known.append(self._take(step))
        self.wait_s += time.monotonic() - began_s
        self._ask_until(last + 1)
        now = self._known.popleft()
        self.digest += now.digest
        self._report(now)
        self._returned = (step, time.time())
        return [batch.to(device) for batch in self._with_coming(now.batches)]

    def _take(self, step: int) -> _DistributedStep:
        wait_s = self._timeout_s + self.prefetcher.timeout_s
        try:
            taken = self._ready.get(timeout=wait_s)
        except queue.Empty:
            found = f"its ids were not distributed within {wait_s:g} s"
            raise PeerTimeout(f"data of step {step}", found, "lakh resume continues from the last checkpoint") from None
        if isinstance(taken, BaseException):
            raise taken
        return taken

    def _with_coming(self, batches: list[ClickBatch]) -> list[ClickBatch]:
        """The micro-batches of a step, each with the bags that follow it."""
        if not self._ahead:
            return batches
        bags = [batch.bags for batch in batches] + [batch.bags for later in self._known for batch in later.batches]
        return [
            replace(batch, bags=replace(batch.bags, coming=tuple(bags[at + 1 :]))) for at, batch in enumerate(batches)
        ]

    def _report(self, taken: _DistributedStep) -> None:
        if self._on_distributed is None or not self._computed:
            return

        def overlap_s(computed: tuple[int, float, float]) -> float:
            return max(0.0, min(taken.ended_s, computed[2]) - max(taken.began_s, computed[1]))

        most = max(self._computed, key=overlap_s)
        self._on_distributed(
            InputDistributed(
                step=taken.step,
                began_s=taken.began_s,
                ended_s=taken.ended_s,
                compute_step=most[0] if overlap_s(most) else None,
                compute_began_s=most[1],
                compute_ended_s=most[2],
                overlap_s=overlap_s(most),
            )
        )

    def close(self, *, keep: bool = False) -> None:
        """`keep` the process that reads, for another stream."""
        self._asked.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        self.prefetcher.close(keep=keep)

    def _ask_until(self, step: int) -> None:
        while self._next_asked <= min(step, self._request.last_step - 1):
            self._asked.put(self._next_asked)
            self._next_asked += 1

    def _distribute_steps(self) -> None:
        """The thread: one step after the other, in the same order on all ranks."""
        try:
            while (step := self._asked.get()) is not None:
                samples, digest = self.prefetcher.take(step)
                size, began_s = self._request.data.micro_batch, time.time()
                batches = to_batches(samples, size, self._exchange, self._group)
                self._ready.put(_DistributedStep(step, batches, digest, began_s, time.time()))
        except BaseException as error:  # noqa: BLE001 - raised in the trainer's thread
            self._ready.put(error)


@dataclass(frozen=True)
class _DistributedStep:
    """This rank's part of a step, with its ids where they are looked up; began_s and ended_s: of the distribution."""

    step: int
    batches: list[ClickBatch]
    digest: StreamDigest
    began_s: float
    ended_s: float


def to_batches(
    samples: ClickSamples,
    micro_batch: int,
    exchange: TableExchange,
    group: dist.ProcessGroup | None = None,
    *,
    counts_as: str = "ids",
) -> list[ClickBatch]:
    """Micro-batches with their ids where they are looked up. A collective."""
    batches = []
    ends_F = samples.lengths_FS.sum(1, dtype=np.int64).cumsum()
    starts_F = ends_F - samples.lengths_FS.sum(1, dtype=np.int64)
    within_FS = np.cumsum(samples.lengths_FS, axis=1, dtype=np.int64)
    for first in range(0, len(samples.labels_S), micro_batch):
        part = slice(first, first + micro_batch)
        lengths = samples.lengths_FS[:, part]
        begins = starts_F + within_FS[:, first] - samples.lengths_FS[:, first]
        ids = [samples.ids[b : b + n] for b, n in zip(begins, lengths.sum(1), strict=True)]
        bags = JaggedBags.of_lengths(
            torch.from_numpy(np.concatenate(ids).astype(np.int64)), torch.from_numpy(lengths.astype(np.int64))
        )
        dense, labels = (torch.from_numpy(values[part].copy()) for values in (samples.dense_SN, samples.labels_S))
        batches.append(ClickBatch(exchange.distribute(bags, group, counts_as=counts_as), dense, labels))
    return batches


def heldout_batches(
    split: ClickSplit, part: str, *, samples: int, micro_batch: int, exchange: TableExchange
) -> Iterator[tuple[ClickBatch, int]]:
    """(micro-batch, how many of its samples count) for this rank: the first `samples` of the part, split evenly. Every
    rank gets equally many micro-batches of equal size; the last samples are repeats that do not count. A collective."""
    numbers = split.numbers(part)[:samples]
    per_rank = -(-len(numbers) // exchange.ranks)
    first = exchange.rank * per_rank
    for start in range(first, first + per_rank, micro_batch):
        wanted = np.minimum(np.arange(start, start + micro_batch), len(numbers) - 1)
        end = min(start + micro_batch, first + per_rank, len(numbers))
        samples_here = split.clicks.read(numbers[wanted])
        (batch,) = to_batches(samples_here, micro_batch, exchange, counts_as="evaluation")
        yield batch, max(0, end - start)
