"""Batches for the code model: sequences of the training stream, as tensors.

The batch of a step is `data.batch` consecutive positions of the stream, split by data-parallel rank and then
into micro-batches. The number of ranks decides which rank reads a sequence, not which sequences a step holds. A
process of its own reads ahead (tokens/loading/prefetch.py); batches reach a GPU through pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from lakh.spec import Data
from lakh.tokens.dataset.shards import CONTEXT
from lakh.tokens.loading.digest import StreamDigest
from lakh.tokens.loading.prefetch import BatchRequest, Prefetcher
from lakh.tokens.loading.skips import SkipRanges
from lakh.tokens.loading.stream import TokenSet, TokenSetLoader, document_numbers
from lakh.workloads.code.attention import Documents
from lakh.workloads.code.batch import IGNORED, Batch

__all__ = ["Batches", "heldout_batches", "to_batch"]


class Batches:
    """The training stream of one data-parallel rank, from a step and a position on."""

    def __init__(self, request: BatchRequest) -> None:
        # A rank with more or fewer micro-batches than the mean weighs them so that the mean over ranks is the mean over
        # sequences.
        self._mean_micro_batches = (request.mean_sequences or request.num_sequences) / request.data.micro_batch
        self._micro_batch = request.data.micro_batch
        self.skips = SkipRanges(request.data.skip)
        self.digest = StreamDigest()
        """Of all sequences read so far."""
        self.fill = 1.0
        """Share of the last step's positions on this rank that have a target, weighted as its micro-batches are."""
        self.prefetcher = Prefetcher(request)

    @property
    def wait_s(self) -> float:
        """Seconds that the trainer has waited for batches so far."""
        return self.prefetcher.wait_s

    def close(self, *, keep: bool = False) -> None:
        self.prefetcher.close(keep=keep)

    def micro_batches(self, step: int, device: torch.device) -> list[Batch]:
        """This rank's part of one step."""
        taken = self.prefetcher.take(step)
        self.digest += taken.digest
        rows = len(taken.tokens)
        size = self._micro_batch
        parts = [slice(first, first + size) for first in range(0, rows, size)]
        self.fill = float(_is_target(taken.tokens, taken.lengths).mean()) * len(parts) / self._mean_micro_batches
        documents = taken.documents
        return [
            to_batch(
                taken.tokens[part],
                taken.lengths[part],
                documents[part] if documents is not None else None,
                device,
                share=1 / self._mean_micro_batches,
                weighs=len(parts) != self._mean_micro_batches,
            )
            for part in parts
        ]


def to_batch(
    tokens: np.ndarray,
    lengths: np.ndarray,
    documents: np.ndarray | None,
    device: torch.device,
    *,
    share: float = 1.0,
    weighs: bool = False,
) -> Batch:
    """Sequences of T + 1 tokens as a micro-batch that is `share` of a rank's step. It has a weight of its own if it
    has padding, or if it `weighs` other than the number of micro-batches says."""
    rows, width = tokens.shape
    whole = _send(tokens & ~CONTEXT, device).long()
    targets = whole[:, 1:]
    weight = None
    is_target = _is_target(tokens, lengths)
    if not is_target.all():
        targets = targets.masked_fill(~_send(is_target, device), IGNORED)
    if weighs or not is_target.all():
        weight = share / (rows * (width - 1))
    if documents is None:
        return Batch(whole[:, :-1], targets, weight=weight)
    edges, positions = _edges_and_positions(documents)
    return Batch(
        whole[:, :-1],
        targets,
        positions=_send(positions, device),
        documents=Documents.padded(_send(edges, device), int(np.diff(edges).max()), width - 1),
        weight=weight,
    )


def _is_target(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """For each token after the first: it is neither padding nor marked as context."""
    is_padding = np.arange(1, tokens.shape[1])[None] >= lengths[:, None]
    is_target: np.ndarray = ~is_padding & (tokens[:, 1:] < CONTEXT)
    return is_target


def heldout_batches(
    data: Data, tokens: TokenSet, *, sequences: int, data_rank: int, data_ranks: int, device: torch.device
) -> Iterator[tuple[Batch, int]]:
    """(micro-batch, how many of its sequences count) for this rank: the same held-out sequences at every evaluation.

    Sequences are consecutive windows, whatever the packing of training, so that losses compare; whole documents,
    padded, where they are examples or shorter than one sequence. Every rank gets equally many micro-batches, because
    with FSDP all ranks must call the model equally often, and each is full, because a compiled model is for one shape;
    where they do not divide evenly, the last sequences are repeats that do not count.
    """
    is_whole = tokens.marks_context or not tokens.count_sequences(data.sequence)
    loader = TokenSetLoader(tokens, sequence=data.sequence, seed=0, packing="best-fit" if is_whole else "concat")
    count = min(sequences, loader.num_sequences)
    per_rank = -(-count // data_ranks)
    first = data_rank * per_rank
    for start in range(first, first + per_rank, data.micro_batch):
        rows = loader.read([min(index, count - 1) for index in range(start, start + data.micro_batch)])
        end = min(start + data.micro_batch, first + per_rank, count)
        documents = document_numbers(rows) if data.document_mask else None
        yield to_batch(rows.tokens, rows.lengths, documents, device), max(0, end - start)


def _edges_and_positions(documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where documents begin in the sequences laid end to end, and each token's position in its document."""
    begins = np.ones(documents.shape, bool)
    begins[:, 1:] = np.diff(documents, axis=1) != 0
    edges = np.append(np.flatnonzero(begins), documents.size)
    positions = np.arange(documents.size) - np.repeat(edges[:-1], np.diff(edges))
    return edges.astype(np.int32), positions.reshape(documents.shape)


def _send(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of the array on the device; asynchronous on a GPU."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor.clone()  # the reader reuses the buffer
    return tensor.pin_memory().to(device, non_blocking=True)
