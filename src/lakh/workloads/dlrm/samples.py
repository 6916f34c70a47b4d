"""The samples of a run: its data set, the split by time, and the training order. Independent of torch.

Position k of the training stream is the same sample on any number of ranks: `ShuffleOrder` permutes the training
samples anew in each epoch. The first 80 % of the samples are for training, the next 10 % for validation and the last
10 % for the test.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lakh.errors import UserError
from lakh.spec.embedding import SYNTHETIC, Recommender
from lakh.tokens.dataset.shuffle import ShuffleOrder
from lakh.tokens.loading.digest import StreamDigest
from lakh.tokens.loading.prefetch import BatchRequest, SlotFiller
from lakh.tokens.loading.skips import SkipRanges
from lakh.workloads.dlrm.click_set import ClickSamples, ClickSet
from lakh.workloads.dlrm.movielens import MovieLens
from lakh.workloads.dlrm.synthetic import SyntheticClicks

__all__ = ["ClickRequest", "ClickSplit", "digest_samples", "open_samples"]

TRAIN_SHARE, VALIDATION_SHARE = 0.8, 0.1
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, eq=False)
class ClickSplit:
    """A data set for a run: samples before `train` are for training, then come validation and test."""

    clicks: ClickSet
    train: int
    validation: int

    def numbers(self, part: str) -> np.ndarray:
        first, end = {
            "validation": (self.train, self.validation),
            "test": (self.validation, self.clicks.num_samples),
        }[part]
        return np.arange(first, end)

    def training_numbers(self, skips: SkipRanges, seed: int, first: int, count: int) -> np.ndarray:
        """The samples at `count` positions of the training stream."""
        indexes = np.arange(first, first + count)
        if skips.ranges:
            indexes = np.array([skips.index_of(int(position)) for position in indexes])
        return ShuffleOrder(self.train, seed).permute(indexes)


@functools.lru_cache(maxsize=4)
def open_samples(settings: Recommender, seed: int) -> ClickSplit:
    """The data set of a run, checked against its tables."""
    clicks: ClickSet
    if settings.dataset == SYNTHETIC:
        clicks = SyntheticClicks(settings, seed)
    else:
        clicks = MovieLens(settings.dataset, [table.name for table in settings.tables])
    if clicks.dense_features != settings.network.dense_features:
        found = f"is {settings.network.dense_features}, the data has {clicks.dense_features}"
        raise UserError("dlrm.network.dense_features", found, f"set it to {clicks.dense_features}")
    for table, rows in zip(settings.tables, clicks.rows, strict=True):
        if table.rows < rows or table.features != 1:
            found = f"has {table.rows} rows for {table.features} features, the data has {rows} ids of one feature"
            raise UserError(f"dlrm.tables, {table.name}", found, f"give it {rows} rows and one feature")
    train = int(clicks.num_samples * TRAIN_SHARE)
    validation = train + int(clicks.num_samples * VALIDATION_SHARE)
    if not 0 < train < validation < clicks.num_samples:
        found = f"has {clicks.num_samples} samples"
        raise UserError(f"dlrm.dataset = {settings.dataset}", found, "give at least 10")
    return ClickSplit(clicks, train, validation)


@dataclass(frozen=True)
class ClickRequest(BatchRequest):
    """The samples that a rank reads, for a Prefetcher. Floats travel as the bits of int32."""

    settings: Recommender = field(kw_only=True)

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        clicks, count = open_samples(self.settings, self.seed).clicks, self.num_sequences
        most = sum(clicks.max_lengths)
        return [(count * most,), (len(clicks.rows), count), (count, clicks.dense_features), (count,)]

    def open(self) -> SlotFiller:
        split = open_samples(self.settings, self.seed)
        skips = SkipRanges(self.data.skip)

        def fill(step: int, arrays: list[np.ndarray]) -> StreamDigest:
            position = self.position(step)
            numbers = split.training_numbers(skips, self.seed, position, self.num_sequences)
            found = split.clicks.read(numbers)
            ids, lengths, dense, labels = arrays
            ids[: len(found.ids)], lengths[:] = found.ids, found.lengths_FS
            dense[:], labels[:] = found.dense_SN.view(np.int32), found.labels_S.view(np.int32)
            return digest_samples(position, numbers)

        return fill

    def unpack(self, arrays: list[np.ndarray], digest: StreamDigest) -> tuple[ClickSamples, StreamDigest]:  # type: ignore[override]
        ids, lengths, dense, labels = arrays
        samples = ClickSamples(ids[: int(lengths.sum())], lengths, dense.view(np.float32), labels.view(np.float32))
        return samples, digest


def digest_samples(first_position: int, numbers: np.ndarray) -> StreamDigest:
    """The digest of consecutive samples by their numbers; the data set itself has a fingerprint."""
    positions = np.arange(first_position, first_position + len(numbers), dtype=np.uint64)
    values = (positions * _MIX) ^ (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    return StreamDigest(len(numbers), int(values.astype(object).sum()))
