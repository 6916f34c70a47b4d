"""The training data of one rank: its batches, the position in the stream, and the hash of the stream so far."""

from __future__ import annotations

import dataclasses

from lakh.errors import UserError
from lakh.spec import Data, Mesh
from lakh.tokens.loading.digest import StreamDigest
from lakh.tokens.loading.prefetch import BatchRequest
from lakh.tokens.loading.skips import SkipRanges
from lakh.trainer.launch.world import World
from lakh.trainer.workloads import BatchStream, DataSource, TrainingBatch

__all__ = ["DataFeed", "StreamPosition", "merge_skips"]

Ranges = tuple[tuple[int, int], ...]


@dataclasses.dataclass
class StreamPosition:
    """How far a run has read, and the hash of what it read."""

    position: int = 0
    """Sequences consumed so far."""
    base: StreamDigest | None = dataclasses.field(default_factory=StreamDigest)
    """Digest of the stream up to the last restore, over all ranks; None if an old checkpoint has none."""
    known: tuple[int, StreamDigest | None] = (0, StreamDigest())
    """A recent position, and the digest of the stream up to it."""

    def restore(self, position: int, digest: StreamDigest | None) -> None:
        self.position, self.base, self.known = position, digest, (position, digest)

    def total_digest(self, world: World, read_here: StreamDigest) -> StreamDigest | None:
        """The digest of the whole stream so far, on every rank. A collective."""
        parts = world.broadcast(world.gather(read_here))
        if self.base is None:
            return None
        return sum(parts, self.base)


class DataFeed:
    """Prefetched batches of this rank."""

    def __init__(self, source: DataSource, mesh: Mesh, world: World, *, seed: int, last_step: int) -> None:
        self.source, self.fingerprint = source, source.fingerprint
        self.stream = StreamPosition()
        self._mesh, self._device, self._seed, self._last_step = mesh, world.device, seed, last_step
        self._data_rank = mesh.data_rank(world.rank)
        readers = [rank for rank in range(world.size) if mesh.data_rank(rank) == self._data_rank]
        self._counts = readers[0] == world.rank  # of the ranks that read the same data, the first one hashes it
        self.batches: BatchStream

    def open(self, data: Data, step: int) -> None:
        """Start to prefetch the batches from `step` on."""
        offset, rows = data.share_of(self._mesh, self._data_rank)
        self.batches = self.source.open(
            BatchRequest(
                data=data,
                seed=self._seed,
                first_step=step,
                last_step=self._last_step,
                first_position=self.stream.position,
                offset=offset,
                num_sequences=rows,
                mean_sequences=data.batch / self._mesh.data_ranks,
            )
        )

    def catch_up(self, data: Data, position: int, known: tuple[int, StreamDigest | None]) -> None:
        """Continue at `position` after ranks were lost: read again what they have read since the `known` digest."""
        first, digest = known
        if digest is not None and position > first:
            digest += self.source.digest(data, self._seed, first, position - first)
        self.stream.restore(position, digest)

    def micro_batches(self, step: int) -> tuple[list[TrainingBatch], float]:
        """This rank's micro-batches of a step, and the seconds spent waiting for them."""
        before_s = self.batches.wait_s
        return self.batches.micro_batches(step, self._device), self.batches.wait_s - before_s

    @property
    def digest(self) -> StreamDigest:
        """Of the sequences that this rank has read since `open` and hashes for all."""
        return self.batches.digest if self._counts else StreamDigest()

    def skip_step(self, data: Data, step: int, current_step: int) -> Data:
        """Data settings that skip the sequences of `step`, counted back from the current position."""
        first = self.stream.position - (current_step - step + 1) * data.batch
        skips = self.batches.skips.with_positions(first, first + data.batch)
        return dataclasses.replace(data, skip=skips.ranges)

    def close(self, *, keep: bool = False) -> None:
        """`keep` the process that reads, for `open` of this or another feed."""
        self.batches.close(keep=keep)


def merge_skips(before: Ranges, requested: Ranges, position: int) -> Ranges:
    """The skipped ranges of a run that continues at `position`: behind it as before, ahead of it as requested.

    Positions do not count skipped sequences, so the ranges behind a position must not change.
    """
    here = SkipRanges(before).index_of(position)
    behind = [(first, min(end, here)) for first, end in before if first < here]
    late = [(first, min(end, here)) for first, end in requested if first < here]
    if SkipRanges([*behind, *late]).ranges != SkipRanges(behind).ranges:
        raise UserError(
            f"data.skip = {[list(part) for part in requested]}",
            f"sequences before {here} have been read already",
            f"name sequences from {here} on, or start a new run",
        )
    return SkipRanges([*behind, *((max(first, here), end) for first, end in requested if end > here)]).ranges
