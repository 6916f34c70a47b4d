"""Synthetic clicks for any tables: a function of the seed and the number of a sample. Independent of torch.

Ids follow a power law (id = rows * u**4, so that a tenth of the rows gets more than half of the lookups), bags of a
table have its mean pooling, and a hidden weight of each id and of each numeric feature decides the click. The data has
the shape of real data sets; its AUC says nothing about them.
"""

from __future__ import annotations

import hashlib

import numpy as np

from lakh.spec.embedding import Recommender
from lakh.workloads.dlrm.click_set import ClickSamples

__all__ = ["SyntheticClicks"]

SKEW = 4.0
SIGNAL = 2.0  # standard deviation of the hidden logit


class SyntheticClicks:
    def __init__(self, settings: Recommender, seed: int) -> None:
        self._seed, self._tables = seed, settings.tables
        self.num_samples, self.dense_features = settings.samples, settings.network.dense_features
        self.rows = [table.rows for table in settings.tables]
        self.max_lengths = [max(1, round(table.pooling)) for table in settings.tables]
        facts = (seed, self.num_samples, self.dense_features, self.rows, self.max_lengths, SKEW, SIGNAL)
        self.fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()

    def read(self, numbers: np.ndarray) -> ClickSamples:
        count = len(numbers)
        ids, score_S = [], np.zeros(count)
        for feature, (rows, length) in enumerate(zip(self.rows, self.max_lengths, strict=True)):
            lookups = numbers[:, None].astype(np.uint64) * np.uint64(length) + np.arange(length, dtype=np.uint64)
            unit_SL = _uniform(lookups, self._key("id", feature))
            ids_SL = np.minimum((rows * unit_SL**SKEW).astype(np.int64), rows - 1)
            hidden_SL = _uniform(ids_SL.astype(np.uint64), self._key("weight", feature)) * 2 - 1
            score_S += hidden_SL.sum(1) / length**0.5
            ids.append(ids_SL.reshape(-1))
        columns = np.arange(self.dense_features, dtype=np.uint64)
        cells = numbers[:, None].astype(np.uint64) * np.uint64(self.dense_features) + columns
        dense_SN = _uniform(cells, self._key("dense", 0)) * 2 - 1
        score_S += dense_SN @ (_uniform(columns, self._key("weight", -1)) * 2 - 1)
        spread = ((len(self.rows) + self.dense_features / 3) / 3) ** 0.5
        chance_S = 1 / (1 + np.exp(-SIGNAL * score_S / spread))
        clicked_S = _uniform(numbers.astype(np.uint64), self._key("label", 0)) < chance_S
        return ClickSamples(
            np.concatenate(ids).astype(np.int32),
            np.repeat(np.array(self.max_lengths, np.int32)[:, None], count, axis=1),
            dense_SN.astype(np.float32),
            clicked_S.astype(np.float32),
        )

    def _key(self, what: str, feature: int) -> np.uint64:
        name = f"{self._seed} {what} {feature}".encode()
        return np.uint64(int.from_bytes(hashlib.sha256(name).digest()[:8], "little"))


def _uniform(counters: np.ndarray, key: np.uint64) -> np.ndarray:
    """Values in [0, 1) that depend on key and counter alone: SplitMix64 (Steele, Lea and Flood 2014)."""
    z = key + (counters + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)) / 2.0**53
