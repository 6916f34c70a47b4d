"""Direct preference optimization (DPO, arXiv 2305.18290): pairs of a better and a worse answer to the same prompt.

The loss of a pair is -log sigmoid(beta ((c - c_ref) - (r - r_ref))), where c and r are the log-probabilities that the
model gives to the chosen and to the rejected answer, and c_ref and r_ref those of the model before training, which are
computed once (`ReferenceFile`).

A pair is one sequence of the token set, of T = 2 L tokens: L of the chosen side (prompt, answer, end, padding) and L of
the rejected one. The model reads the two sides as sequences of their own, so neither attends to the other.

Shapes: B pairs, L tokens of a side.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lakh import storage
from lakh.errors import DataError, UserError
from lakh.spec import Data
from lakh.tokens.dataset.shards import CONTEXT
from lakh.tokens.loading.prefetch import BatchRequest
from lakh.tokens.loading.stream import TokenSet, TokenSetLoader
from lakh.workloads.code.batch import IGNORED
from lakh.workloads.code.data import Batches

__all__ = [
    "PreferenceBatch",
    "PreferenceBatches",
    "ReferenceFile",
    "heldout_pairs",
    "pair_log_probabilities",
    "preference_losses",
    "split_sides",
]


def preference_losses(log_probabilities_B2: Tensor, reference_B2: Tensor, beta: float) -> Tensor:
    """The loss of each pair; the first column is that of the chosen answers."""
    chosen, rejected = (log_probabilities_B2 - reference_B2).unbind(1)
    return -F.logsigmoid(beta * (chosen - rejected))


def pair_log_probabilities(model: nn.Module, batch: PreferenceBatch) -> Tensor:
    """B x 2: the log-probabilities of the chosen and of the rejected answers, with their ends."""
    losses: Tensor = model(batch.inputs, targets_BT=batch.targets, per_sequence=True)
    return -losses.view(-1, 2)


@dataclass(frozen=True, eq=False)
class PreferenceBatch:
    inputs: Tensor
    """2B x L, int64: chosen and rejected sides in turns."""
    targets: Tensor
    """2B x L: the token that follows each input if it is one of an answer, else IGNORED."""
    reference: Tensor
    """B x 2, float32: log-probabilities by the reference."""
    weight: float | None = None
    """Factor of the sum of its losses, where the number of micro-batches does not tell it."""

    @property
    def device(self) -> torch.device:
        return self.inputs.device

    def scale(self, micro_batches: int) -> float:
        """The factor of the sum of its losses, as one of a rank's micro-batches of a step."""
        return 1 / (len(self.reference) * micro_batches) if self.weight is None else self.weight


def split_sides(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, 2B x L, of pairs as the token set has them (B x 2L + 1, with marks)."""
    pairs, width = tokens.shape
    length = (width - 1) // 2
    inputs = (tokens[:, :-1] & ~CONTEXT).reshape(2 * pairs, length).astype(np.int64)
    following = tokens[:, 1:].reshape(2 * pairs, length)
    targets = np.where(following < CONTEXT, following, IGNORED).astype(np.int64)
    targets[:, -1] = IGNORED  # the beginning of the other side, or the end that the token set adds
    return inputs, targets


class ReferenceFile:
    """The log-probabilities of the reference, by the hash of a pair's tokens."""

    def __init__(self, by_hash: dict[bytes, tuple[float, float]], url: str) -> None:
        self._by_hash, self._url = by_hash, url

    @staticmethod
    def write(url: str, tokens: np.ndarray, log_probabilities_B2: np.ndarray) -> None:
        hashes = np.array([np.frombuffer(_hash(row), np.uint8) for row in tokens])
        content = io.BytesIO()
        np.savez(content, hashes=hashes, log_probabilities=log_probabilities_B2.astype(np.float64))
        storage.write_bytes(url, content.getvalue())

    @staticmethod
    def read(url: str) -> ReferenceFile:
        if not storage.exists(url):
            raise UserError("preference.reference", f"{url} does not exist", "make it with: lakh tune --method dpo")
        try:
            with np.load(io.BytesIO(storage.read_bytes(url)), allow_pickle=False) as file:
                hashes, values = file["hashes"], file["log_probabilities"]
            by_hash = {row.tobytes(): (float(c), float(r)) for row, (c, r) in zip(hashes, values, strict=True)}
        except (ValueError, KeyError, OSError, TypeError, zipfile.BadZipFile):
            raise DataError(url, "is damaged", "remove it, then: lakh tune --method dpo") from None
        return ReferenceFile(by_hash, url)

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """B x 2 of these pairs."""
        try:
            return np.array([self._by_hash[_hash(row)] for row in tokens])
        except KeyError:
            found = "does not know a pair of the data: it was made for others"
            raise DataError(self._url, found, "remove it, then: lakh tune --method dpo") from None


def _hash(row: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(row, np.int32).tobytes()).digest()


class PreferenceBatches(Batches):
    """The pairs of one data-parallel rank, from a step and a position on."""

    def __init__(self, request: BatchRequest, reference: ReferenceFile) -> None:
        super().__init__(request)
        self._reference = reference

    def micro_batches(self, step: int, device: torch.device) -> list[PreferenceBatch]:  # type: ignore[override]
        """This rank's part of one step."""
        taken = self.prefetcher.take(step)
        self.digest += taken.digest
        parts = [taken.tokens[at : at + self._micro_batch] for at in range(0, len(taken.tokens), self._micro_batch)]
        self.fill = len(parts) / self._mean_micro_batches
        weight = 1 / (self._micro_batch * self._mean_micro_batches)
        return [to_preference_batch(part, self._reference, device, weight) for part in parts]


def to_preference_batch(
    tokens: np.ndarray, reference: ReferenceFile, device: torch.device, weight: float | None = None
) -> PreferenceBatch:
    inputs, targets = (torch.from_numpy(array).to(device) for array in split_sides(tokens))
    values = torch.from_numpy(reference.of(tokens)).float().to(device)
    return PreferenceBatch(inputs, targets, values, weight)


def heldout_pairs(
    data: Data,
    tokens: TokenSet,
    reference: ReferenceFile,
    *,
    sequences: int,
    data_rank: int,
    data_ranks: int,
    device: torch.device,
) -> Iterator[tuple[PreferenceBatch, int]]:
    """(micro-batch, how many of its pairs count) for this rank; every rank gets equally many, all of them full."""
    loader = TokenSetLoader(tokens, sequence=data.sequence, seed=0, packing="best-fit")
    count = min(sequences, loader.num_sequences)
    per_rank = -(-count // data_ranks)
    first = data_rank * per_rank
    for start in range(first, first + per_rank, data.micro_batch):
        rows = loader.read([min(index, count - 1) for index in range(start, start + data.micro_batch)])
        end = min(start + data.micro_batch, first + per_rank, count)
        yield to_preference_batch(rows.tokens, reference, device), max(0, end - start)
