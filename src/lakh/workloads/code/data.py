"""Batches for the code model: sequences of the training stream, as tensors.

The batch of a step is `data.batch` consecutive positions of the stream, split evenly by data-parallel rank and then
into micro-batches. The number of ranks decides which rank reads a sequence, not which sequences a step holds. A
process of its own reads ahead (tokens/loading/prefetch.py); batches reach a GPU through pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from lakh.spec import Data
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
        self._micro_batch = request.data.micro_batch
        self.skips = SkipRanges(request.data.skip)
        self.digest = StreamDigest()
        """Of all sequences read so far."""
        self.fill = 1.0
        """Share of the last step's positions on this rank that have a target."""
        self.prefetcher = Prefetcher(request)

    def micro_batches(self, step: int, device: torch.device) -> list[Batch]:
        """This rank's part of one step."""
        taken = self.prefetcher.take(step)
        self.digest += taken.digest
        rows, width = taken.tokens.shape
        self.fill = float((taken.lengths.astype(np.int64) - 1).sum()) / (rows * (width - 1))
        size = self._micro_batch
        parts = [slice(first, first + size) for first in range(0, rows, size)]
        documents = taken.documents
        return [
            to_batch(
                taken.tokens[part],
                taken.lengths[part],
                documents[part] if documents is not None else None,
                device,
                share=1 / len(parts),
            )
            for part in parts
        ]


def to_batch(
    tokens: np.ndarray, lengths: np.ndarray, documents: np.ndarray | None, device: torch.device, *, share: float = 1.0
) -> Batch:
    """Sequences of T + 1 tokens as a micro-batch that is `share` of a rank's step."""
    rows, width = tokens.shape
    whole = _send(tokens, device).long()
    targets = whole[:, 1:]
    weight = None
    if (lengths < width).any():
        counted = np.arange(1, width)[None] < lengths[:, None]
        targets = targets.masked_fill(~_send(counted, device), IGNORED)
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


def heldout_batches(
    data: Data, tokens: TokenSet, *, sequences: int, data_rank: int, data_ranks: int, device: torch.device
) -> Iterator[tuple[Batch, int]]:
    """(micro-batch, how many of its sequences count) for this rank: the same held-out sequences at every evaluation.

    Sequences are consecutive windows, whatever the packing of training, so that losses compare. Every rank gets equally
    many micro-batches, because with FSDP all ranks must call the model equally often, and each is full, because a
    compiled model is for one shape; where they do not divide evenly, the last sequences are repeats that do not count.
    """
    loader = TokenSetLoader(tokens, sequence=data.sequence, seed=0)
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
