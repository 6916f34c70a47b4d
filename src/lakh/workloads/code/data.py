"""Batches for the code model: rows of token windows, as tensors.

The batch of a step is the sequences [step * batch, (step + 1) * batch) of the global order, cut into equal parts by
data-parallel rank and then into micro-batches. Which rank reads a sequence changes with the number of ranks; which
sequences a step holds does not.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from lakh.errors import UserError
from lakh.spec import Run
from lakh.tokens.loader import Loader, Prefetcher, TokenSet

__all__ = ["Batches", "heldout_rows", "open_tokens"]


def open_tokens(run: Run, split: str) -> TokenSet:
    """The token shards of a run, checked against its model."""
    tokens = TokenSet.open(run.data.tokens, split)
    if tokens.vocab > run.model.vocab:
        raise UserError(
            f"model.vocab = {run.model.vocab}",
            f"is smaller than the tokenizer of {run.data.tokens} ({tokens.vocab})",
            f"set model.vocab = {tokens.vocab} or more, or pack with a smaller tokenizer",
        )
    needed = run.data.batch if split == "train" else 1
    if tokens.windows(run.data.sequence) < needed:
        raise UserError(
            f"{run.data.tokens}, {split}",
            f"holds {tokens.windows(run.data.sequence)} sequences of {run.data.sequence} tokens; {needed} are needed",
            "pack a larger corpus, or make data.batch or data.sequence smaller",
        )
    return tokens


class Batches:
    """The training stream of one rank, read ahead by a thread."""

    def __init__(self, run: Run, tokens: TokenSet, *, data_rank: int, data_ranks: int, first_step: int) -> None:
        self.run = run
        self.rows = run.data.batch // data_ranks
        self.data_rank = data_rank
        self._loader = Loader(tokens, sequence=run.data.sequence, seed=run.seed)
        self._ahead: Prefetcher[np.ndarray] = Prefetcher(
            self._fetch, first=first_step, last=run.train.steps, depth=run.data.prefetch
        )

    def _fetch(self, step: int) -> np.ndarray:
        return self._loader.rows(step * self.run.data.batch + self.data_rank * self.rows, self.rows)

    def micro_batches(self, step: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """(inputs, targets) of this rank for one step, each B T."""
        rows = torch.from_numpy(self._ahead.get(step)).to(device)
        return [(part[:, :-1], part[:, 1:]) for part in rows.split(self.run.data.micro_batch)]

    @property
    def wait_s(self) -> float:
        """Seconds that the trainer has waited for data so far."""
        return self._ahead.wait_s

    def close(self) -> None:
        self._ahead.close()


def heldout_rows(run: Run, tokens: TokenSet, *, data_rank: int, data_ranks: int) -> Iterator[tuple[Tensor, int]]:
    """(rows, how many of them count) for this rank: the same held-out windows at every evaluation.

    Every rank gets equally many micro-batches, because with FSDP all ranks must call the model equally often; where the
    windows do not divide evenly, the last rows of some ranks are repeats that do not count.
    """
    count = min(run.train.eval_sequences, tokens.windows(run.data.sequence))
    per_rank = -(-count // data_ranks)
    loader = Loader(tokens, sequence=run.data.sequence, seed=0)
    first = data_rank * per_rank
    for start in range(first, first + per_rank, run.data.micro_batch):
        indexes = range(start, min(start + run.data.micro_batch, first + per_rank))
        rows = [loader.rows(min(index, count - 1), 1)[0] for index in indexes]
        yield torch.from_numpy(np.stack(rows)), max(0, min(len(indexes), count - start))
