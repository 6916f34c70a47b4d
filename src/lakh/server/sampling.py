"""Which token comes next: temperature, top-k, top-p, and random numbers that belong to the request.

`choose` is a pure function of scores and keys: a row's token depends on its own scores and on noise that is a function
of (seed, place, id), never on its neighbours in the batch. Greedy rows (temperature 0) take the largest score; others
take the largest of score / temperature + noise, where the noise has Gumbel's distribution, so that each id wins with
its probability. The winner changes only where two ids stand within rounding of each other: if rounding moves the
probabilities p to p', the chance of another token is that of their distance, sum |p - p'| / 2, whatever the size of the
vocabulary. (A number looked up in the cumulated probabilities has as many borders as there are ids, and rounding moves
every one of them: 55 times that chance at 40 ids.) It also makes a draft that draws with the same noise agree with its
model as often as is nearly possible.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lakh.server.params import Sampling

__all__ = ["Draws", "Logprobs", "Sampling", "choose", "log_probabilities", "noise", "probabilities"]

# Odd numbers with their bits well mixed, as int32 has them.
_SPREAD, _ROUNDS = -0x61C8864F, ((0, -0x7A143595), (1, -0x3D4D51CB), (0, 0x27D4EB2F))


class Draws:
    """The keys of one request's noise, each from 0 up to 2**63: key i, for the token at place i, is always the same.

    `copy` tells apart requests that ask for the same prompt several times.
    """

    def __init__(self, sampling: Sampling, copy: int = 0) -> None:
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._stem = hashlib.blake2b(f"{seed}:{copy}".encode(), digest_size=8)

    def __getitem__(self, index: int) -> int:
        place = self._stem.copy()
        place.update(b":%d" % index)
        return int.from_bytes(place.digest(), "little") >> 1


def noise(keys_B: Tensor, num_ids: int) -> Tensor:
    """Gumbel noise of every id, a row for each key: the same numbers on every device, up to rounding.

    The id's number is mixed with the halves of the key (xor of a shift, product with an odd number, in 32 bits that
    wrap); 23 of the bits become a number between 0 and 1 that float32 holds exactly.
    """
    halves = [((keys_B >> shift & 0xFFFFFFFF) - (1 << 31)).to(torch.int32)[:, None] for shift in (0, 32)]
    ids_V = torch.arange(1, num_ids + 1, dtype=torch.int32, device=keys_B.device)
    mixed_BV = (ids_V * _SPREAD).expand(len(keys_B), -1)
    for half, odd in _ROUNDS:
        mixed_BV = mixed_BV ^ halves[half]
        mixed_BV ^= (mixed_BV >> 15).bitwise_and_(0x1FFFF)  # int32 shifts its sign along
        mixed_BV *= odd
        mixed_BV ^= (mixed_BV >> 13).bitwise_and_(0x7FFFF)
    uniform_BV = (mixed_BV >> 9).bitwise_and_(0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    # -log(-log(1 - u)): exact where it matters, at small u, the ids that win.
    return uniform_BV.neg_().log1p_().neg_().log_().neg_()


def _largest(logits_BV: Tensor) -> list[int]:
    """The first of the largest scores of each row."""
    if logits_BV.device.type == "cpu" and logits_BV.dtype == torch.float32:
        largest: list[int] = logits_BV.numpy().argmax(axis=-1).tolist()  # tens of times as fast as torch's there
        return largest
    return logits_BV.argmax(dim=-1).tolist()


def choose(logits_BV: Tensor, samplings: Sequence[Sampling], keys: Sequence[int]) -> list[int]:
    """The next token of every row, decided by its scores and the noise of one key; greedy rows do without."""
    drawing = [at for at, sampling in enumerate(samplings) if sampling.temperature > 0]
    if not drawing:
        return _largest(logits_BV)
    scores_DV = _scores(logits_BV[drawing], [samplings[at] for at in drawing])
    keys_D = torch.tensor([keys[at] for at in drawing], device=scores_DV.device)
    scores_DV += noise(keys_D, scores_DV.shape[-1])
    picked = _largest(scores_DV)
    if len(drawing) == len(samplings):
        return picked
    chosen = _largest(logits_BV)
    for at, token in zip(drawing, picked, strict=True):
        chosen[at] = token
    return chosen


def probabilities(logits_BV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Of every id, as temperature, top-k and top-p leave them: rows that add up to 1 (a greedy row's as at 1)."""
    return _scores(logits_BV, samplings).softmax(dim=-1)


def _scores(logits_BV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Over the temperature, the largest of a row 0; -inf for ids that top-k or top-p leave out."""

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=logits_BV.device, dtype=torch.float32)[:, None]

    logits_BV = logits_BV.float()
    # Subtract the largest first: a tiny temperature then gives 0 and -inf, not inf - inf.
    scores_BV = logits_BV - logits_BV.amax(dim=-1, keepdim=True)
    scores_BV /= column([s.temperature or 1.0 for s in samplings])
    if all(s.top_k == 0 and s.top_p == 1 for s in samplings):
        return scores_BV
    ranked_BV, ids_BV = scores_BV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(scores_BV.shape[-1], device=scores_BV.device)
    left_out_BV = ranks_V >= column([s.top_k or scores_BV.shape[-1] for s in samplings])
    reached_BV = ranked_BV.masked_fill(left_out_BV, -math.inf).softmax(dim=-1).cumsum(dim=-1)
    before_BV = reached_BV.roll(1, dims=-1)
    before_BV[:, 0] = 0.0
    left_out_BV |= before_BV >= column([s.top_p if s.top_p < 1 else 2.0 for s in samplings])
    return scores_BV.masked_fill_(torch.zeros_like(left_out_BV).scatter(1, ids_BV, left_out_BV), -math.inf)


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
