"""Rows of a bulk generation: how far each has come, the keys of its noise, and the next token of them all.

Drawing is server.sampling's, for rows that draw alike, on the device where the scores lie. Knows nothing of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lakh.server.model.blocks import Lease
from lakh.server.sampling_params import SamplingParams
from lakh.server.sampler import NoiseKeys, noise

__all__ = ["Draw", "Row", "draw_keys", "keys_of", "pick"]


@dataclass(eq=False, slots=True)
class Row:
    prompt: tuple[int, ...]
    limit: int
    """At most so many new tokens."""
    keys: Tensor
    """One for each of them (server.sampling.Draws)."""
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


def keys_of(rows: Sequence[Row], steps: int) -> Tensor:
    """Keys of the next steps, rows x steps; what lies past a row's limit is thrown away, whatever it is."""
    keys = torch.zeros(len(rows), steps, dtype=torch.int64)
    for row, keys_S in zip(rows, keys, strict=True):
        part = row.keys[len(row.tokens) : len(row.tokens) + steps]
        keys_S[: len(part)] = part
    return keys


def draw_keys(sampling: SamplingParams, copy: int, count: int) -> Tensor:
    """The keys of one request, as the engine has them; none for a greedy one."""
    if sampling.temperature == 0:
        return torch.zeros(0, dtype=torch.int64)
    draws = NoiseKeys(sampling, copy)
    return torch.tensor([draws[place] for place in range(count)], dtype=torch.int64)


def pick(logits_BV: Tensor, draw: Draw, keys_B: Tensor) -> Tensor:
    """The next token of every row: server.sampling.choose for rows that draw alike, without leaving the device."""
    if draw.temperature == 0:
        return logits_BV.argmax(dim=-1)
    scores_BV = logits_BV.float()
    scores_BV = (scores_BV - scores_BV.amax(dim=-1, keepdim=True)) / draw.temperature
    if draw.top_p < 1:
        scores_BV = scores_BV.where(_likeliest(scores_BV.softmax(dim=-1), draw.top_p) > 0, -torch.inf)
    return (scores_BV + noise(keys_B, scores_BV.shape[-1])).argmax(dim=-1)


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
