"""Rows of a bulk generation: how far each has come, its random numbers, and the next token of them all.

Drawing is server.sampling's, for rows that draw alike, on the device where the scores lie. Knows nothing of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lakh.server.model.blocks import Lease
from lakh.server.params import Sampling
from lakh.server.sampling import Draws

__all__ = ["Draw", "Row", "draw_numbers", "numbers_of", "pick"]


@dataclass(eq=False, slots=True)
class Row:
    prompt: tuple[int, ...]
    limit: int
    """At most so many new tokens."""
    numbers: Tensor
    """One random number for each of them."""
    place: int
    """Among the completions that were asked for."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    """Of the tokens so far, but for characters that a look cut in half."""
    lease: Lease | None = None

    @property
    def blocks(self) -> list[int]:
        assert self.lease is not None
        return self.lease.blocks

    @property
    def position(self) -> int:
        """Of the last token: the next to go through the network."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def last(self) -> int:
        return self.tokens[-1] if self.tokens else self.prompt[-1]


@dataclass(frozen=True)
class Draw:
    """What all rows of a call have in common."""

    temperature: float
    top_p: float


def numbers_of(rows: Sequence[Row], steps: int) -> Tensor:
    """Random numbers of the next steps, rows x steps; what lies past a row's limit is thrown away, whatever it is."""
    numbers = torch.zeros(len(rows), steps)
    for row, numbers_S in zip(rows, numbers, strict=True):
        part = row.numbers[len(row.tokens) : len(row.tokens) + steps]
        numbers_S[: len(part)] = part
    return numbers


def draw_numbers(sampling: Sampling, copy: int, count: int) -> Tensor:
    """The random numbers of one request, as the engine draws them; none for a greedy one."""
    if sampling.temperature == 0:
        return torch.zeros(0)
    draws = Draws(sampling, copy)
    return torch.rand(count, generator=draws._generator)  # the same stream as one number at a time


def pick(logits_BV: Tensor, draw: Draw, numbers_B: Tensor) -> Tensor:
    """The next token of every row: server.sampling.choose for rows that draw alike, without leaving the device."""
    if draw.temperature == 0:
        return logits_BV.argmax(dim=-1)
    scores_BV = logits_BV.float()
    scores_BV = (scores_BV - scores_BV.amax(dim=-1, keepdim=True)) / draw.temperature
    probabilities_BV = scores_BV.softmax(dim=-1)
    if draw.top_p < 1:
        probabilities_BV = _likeliest(probabilities_BV, draw.top_p)
    reached_BV = probabilities_BV.cumsum(dim=-1)
    # The first id whose cumulated probability exceeds the number; rounding must not carry it past the last kept id.
    picks_B = (reached_BV <= numbers_B[:, None] * reached_BV[:, -1:]).sum(dim=-1)
    ranks_V = torch.arange(scores_BV.shape[-1], device=scores_BV.device)
    last_B = ((probabilities_BV > 0) * ranks_V).amax(dim=-1)
    return torch.minimum(picks_B, last_B)


def _likeliest(probabilities_BV: Tensor, top_p: float) -> Tensor:
    """The largest probabilities that together reach top_p, and as many as equal the least of them; the rest is 0.

    Found by halving between the bits of floats, which are ordered as the floats are: 31 sums where a sort of 512 rows
    takes ten times as long on a GPU.
    """
    bits_BV = probabilities_BV.view(torch.int32)
    low_B1 = torch.zeros_like(bits_BV[:, :1])
    high_B1 = bits_BV.amax(dim=-1, keepdim=True) + 1
    for _ in range(31):
        middle_B1 = (low_B1 + high_B1) // 2
        mass_B1 = probabilities_BV.where(bits_BV >= middle_B1, 0.0).sum(dim=-1, keepdim=True)
        is_enough_B1 = mass_B1 >= top_p
        low_B1 = torch.where(is_enough_B1, middle_B1, low_B1)
        high_B1 = torch.where(is_enough_B1, high_B1, middle_B1)
    return probabilities_BV.where(bits_BV >= low_B1, 0.0)
