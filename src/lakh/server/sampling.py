"""Which token comes next: temperature, top-k, top-p, and one stream of random numbers for each request.

`choose` is a pure function of scores and numbers: a row's token depends on its own scores and its own
random number, never on its neighbours in the batch. Greedy rows (temperature 0) take the
largest score.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lakh.server.params import Sampling

__all__ = ["Draws", "Logprobs", "Sampling", "choose", "log_probabilities", "probabilities"]


class Draws:
    """The random numbers of one request, each from 0 up to 1: number i is always the same, whoever asks first.

    `copy` tells apart requests that ask for the same prompt several times.
    """

    def __init__(self, sampling: Sampling, copy: int = 0) -> None:
        self._generator = torch.Generator()
        self._numbers: list[float] = []
        if sampling.seed is None:
            self._generator.seed()
            return
        key = hashlib.sha256(f"{sampling.seed}:{copy}".encode()).digest()
        self._generator.manual_seed(int.from_bytes(key[:8], "little") >> 1)

    def __getitem__(self, index: int) -> float:
        while len(self._numbers) <= index:
            self._numbers.append(torch.rand((), generator=self._generator).item())
        return self._numbers[index]


def _largest(logits_BV: Tensor) -> list[int]:
    """The first of the largest scores of each row."""
    if logits_BV.device.type == "cpu" and logits_BV.dtype == torch.float32:
        largest: list[int] = logits_BV.numpy().argmax(axis=-1).tolist()  # tens of times as fast as torch's there
        return largest
    return logits_BV.argmax(dim=-1).tolist()


def choose(logits_BV: Tensor, samplings: Sequence[Sampling], draws: Sequence[float]) -> list[int]:
    """The next token of every row, decided by its scores and one random number; greedy rows do without."""
    if all(sampling.temperature == 0 for sampling in samplings):
        return _largest(logits_BV)
    greedy_B = torch.tensor([s.temperature == 0 for s in samplings], device=logits_BV.device)
    by_id_BV = probabilities(logits_BV, samplings)
    reached_BV = by_id_BV.cumsum(dim=-1)
    draws_B1 = torch.tensor(draws, device=logits_BV.device, dtype=torch.float32)[:, None]
    # The first place whose cumulated probability exceeds the draw; rounding may push it past the end, never
    # past a kept token: a masked one adds nothing, so it is never the first to exceed.
    picks_B = (reached_BV <= draws_B1 * reached_BV[:, -1:]).sum(dim=-1)
    ids_V = torch.arange(by_id_BV.shape[-1], device=by_id_BV.device)
    last_kept_B = ((by_id_BV > 0) * ids_V).amax(dim=-1)
    sampled_B = torch.minimum(picks_B, last_kept_B)
    return torch.where(greedy_B, logits_BV.argmax(dim=-1), sampled_B).tolist()


def probabilities(logits_BV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Of every id, as temperature, top-k and top-p leave them: rows that add up to 1 (a greedy row's as at 1)."""

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=logits_BV.device, dtype=torch.float32)[:, None]

    temperature_B1 = column([s.temperature or 1.0 for s in samplings])
    top_p_B1 = column([s.top_p for s in samplings])
    top_k_B1 = column([s.top_k or logits_BV.shape[-1] for s in samplings])
    scores_BV, ids_BV = logits_BV.float().sort(dim=-1, descending=True, stable=True)
    # Subtract the largest first: a tiny temperature then gives 0 and -inf, not inf - inf.
    scores_BV = (scores_BV - scores_BV[:, :1]) / temperature_B1
    ranks_V = torch.arange(scores_BV.shape[-1], device=scores_BV.device)
    ranked_BV = scores_BV.masked_fill(ranks_V >= top_k_B1, -math.inf).softmax(dim=-1)
    before_BV = ranked_BV.cumsum(dim=-1) - ranked_BV
    ranked_BV = ranked_BV.masked_fill(before_BV >= top_p_B1, 0.0)
    ranked_BV = ranked_BV / ranked_BV.sum(dim=-1, keepdim=True)
    # Back to the order of ids: two scores that differ by rounding alone may swap their ranks, never their ids.
    return torch.zeros_like(ranked_BV).scatter(1, ids_BV, ranked_BV)


@dataclass(frozen=True)
class Logprobs:
    """Of one token that was drawn: its log-probability before temperature, and the likeliest ids with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def log_probabilities(logits_V: Tensor, token: int, num_top: int) -> Logprobs:
    scores_V = logits_V.float().log_softmax(dim=-1)
    values, ids = scores_V.topk(min(num_top, len(scores_V)))
    return Logprobs(token, float(scores_V[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
