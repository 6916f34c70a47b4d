"""Sampling: logits to tokens, by temperature, top-k, top-p, min-p and random numbers that belong to the request.

A token depends only on its own logits and on noise that is a function of (seed, position, token id), never on the rest
of the batch. Greedy requests (temperature 0) take the argmax; others take the argmax of logits / temperature + Gumbel
noise, which samples each id with its probability. Rounding changes the result only where two ids are within rounding of
each other: if rounding moves the probabilities p to p', the token differs with probability sum |p - p'| / 2, whatever
the vocabulary's size. (Inverting the cumulative distribution is 55 times as sensitive at 40 ids.) It also makes a draft
model that uses the same noise agree with the target model nearly as often as possible.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lakh.server.sampling.params import SamplingParams

__all__ = [
    "Logprobs",
    "NoiseKeys",
    "SamplingParams",
    "most_likely",
    "penalise",
    "probabilities",
    "sample",
    "sample_uniform_batch",
    "token_logprobs",
]

LOWEST_LOGPROB = -9999.0
TINY = 1e-300  # a probability below any that float32 has
# Odd multipliers with well mixed bits, as int32.
_SPREAD, _ROUNDS = -0x61C8864F, ((0, -0x7A143595), (1, -0x3D4D51CB), (0, 0x27D4EB2F))


class NoiseKeys:
    """Noise keys of one request, each in [0, 2**63): key i, for the token at position i, is always the same.

    `copy` distinguishes several samples of the same prompt.
    """

    def __init__(self, sampling: SamplingParams, copy: int = 0) -> None:
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._stem = hashlib.blake2b(f"{seed}:{copy}".encode(), digest_size=8)

    def __getitem__(self, index: int) -> int:
        position = self._stem.copy()
        position.update(b":%d" % index)
        return int.from_bytes(position.digest(), "little") >> 1


def gumbel_noise(keys_B: Tensor, num_ids: int) -> Tensor:
    """Gumbel noise for every id, one row per key: the same numbers on every device, up to rounding.

    Hashes the id with both halves of the key (xor-shift-multiply rounds in wrapping 32-bit arithmetic); 23 bits become
    a number in (0, 1) that float32 represents exactly.
    """
    halves = [((keys_B >> shift & 0xFFFFFFFF) - (1 << 31)).to(torch.int32)[:, None] for shift in (0, 32)]
    ids_V = torch.arange(1, num_ids + 1, dtype=torch.int32, device=keys_B.device)
    mixed_BV = (ids_V * _SPREAD).expand(len(keys_B), -1)
    for half, odd in _ROUNDS:
        mixed_BV = mixed_BV ^ halves[half]
        mixed_BV ^= (mixed_BV >> 15).bitwise_and_(0x1FFFF)  # the shift is arithmetic: mask the sign bits
        mixed_BV *= odd
        mixed_BV ^= (mixed_BV >> 13).bitwise_and_(0x7FFFF)
    uniform_BV = (mixed_BV >> 9).bitwise_and_(0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    # -log(-log(1 - u)) is exact at small u, where the winning ids are.
    return uniform_BV.neg_().log1p_().neg_().log_().neg_()


def most_likely(logits_BV: Tensor) -> list[int]:
    """The id with the largest logit of each row."""
    if logits_BV.device.type == "cpu" and logits_BV.dtype == torch.float32:
        largest: list[int] = logits_BV.numpy().argmax(axis=-1).tolist()  # tens of times as fast as torch here
        return largest
    return logits_BV.argmax(dim=-1).tolist()


def sample(logits_BV: Tensor, samplings: Sequence[SamplingParams], keys: Sequence[int]) -> list[int]:
    """One token per row of logits; greedy rows ignore their key."""
    sampled = [at for at, sampling in enumerate(samplings) if sampling.temperature > 0]
    if not sampled:
        return most_likely(logits_BV)
    scores_DV = _scores(logits_BV[sampled], [samplings[at] for at in sampled])
    keys_D = torch.tensor([keys[at] for at in sampled], device=scores_DV.device)
    scores_DV += gumbel_noise(keys_D, scores_DV.shape[-1])
    tokens = most_likely(scores_DV)
    if len(sampled) == len(samplings):
        return tokens
    chosen = most_likely(logits_BV)
    for at, token in zip(sampled, tokens, strict=True):
        chosen[at] = token
    return chosen


def sample_uniform_batch(logits_BV: Tensor, temperature: float, top_p: float, keys_B: Tensor) -> Tensor:
    """`sample` for a batch that shares temperature and top_p (top_k 0): stays on the device, never waits for it."""
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    scores_BV = logits_BV.float()
    scores_BV = (scores_BV - scores_BV.amax(dim=-1, keepdim=True)) / temperature
    if top_p < 1:
        scores_BV = scores_BV.where(_nucleus(scores_BV.softmax(dim=-1), top_p) > 0, -torch.inf)
    return (scores_BV + gumbel_noise(keys_B, scores_BV.shape[-1])).argmax(dim=-1)


def _nucleus(probabilities_BV: Tensor, top_p: float) -> Tensor:
    """The largest probabilities that sum to top_p, including ties with the smallest of them; the rest become 0.

    Bisects on the bit patterns of the floats, which sort like the floats: 31 sums, where sorting 512 rows takes ten
    times as long on a GPU.
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


def probabilities(logits_BV: Tensor, samplings: Sequence[SamplingParams]) -> Tensor:
    """Probabilities after temperature, top-k, top-p and min-p (a greedy row counts as temperature 1)."""
    return _scores(logits_BV, samplings).softmax(dim=-1)


def _scores(logits_BV: Tensor, samplings: Sequence[SamplingParams]) -> Tensor:
    """Logits over temperature, shifted so that the largest is 0; -inf for excluded ids."""

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=logits_BV.device, dtype=torch.float32)[:, None]

    logits_BV = logits_BV.float()
    # Subtract the largest first: a tiny temperature then gives 0 and -inf, not inf - inf.
    scores_BV = logits_BV - logits_BV.amax(dim=-1, keepdim=True)
    scores_BV /= column([s.temperature or 1.0 for s in samplings])
    if any(s.min_p > 0 for s in samplings):  # a score is the logarithm of a probability over the largest one
        scores_BV.masked_fill_(scores_BV < column([math.log(s.min_p or TINY) for s in samplings]), -math.inf)
    if all(s.top_k == 0 and s.top_p == 1 for s in samplings):
        return scores_BV
    ranked_BV, ids_BV = scores_BV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(scores_BV.shape[-1], device=scores_BV.device)
    excluded_BV = ranks_V >= column([s.top_k or scores_BV.shape[-1] for s in samplings])
    cumulative_BV = ranked_BV.masked_fill(excluded_BV, -math.inf).softmax(dim=-1).cumsum(dim=-1)
    before_BV = cumulative_BV.roll(1, dims=-1)
    before_BV[:, 0] = 0.0
    excluded_BV |= before_BV >= column([s.top_p if s.top_p < 1 else 2.0 for s in samplings])
    excluded_BV[:, 0] = False  # a top_p that rounds to 0 leaves the most likely id
    return scores_BV.masked_fill_(torch.zeros_like(excluded_BV).scatter(1, ids_BV, excluded_BV), -math.inf)


def penalise(logits_V: Tensor, sampling: SamplingParams, prompt: Sequence[int], generated: Sequence[int]) -> Tensor:
    """The logits after repetition, presence and frequency penalties, as vLLM defines them. Ids of the prompt beyond
    `logits_V` (of a padded vocabulary) cannot be sampled and are ignored.
    """
    logits_V = logits_V.clone()
    if sampling.repetition_penalty != 1:
        seen = [token for token in {*prompt, *generated} if token < len(logits_V)]
        at = torch.tensor(seen, dtype=torch.long, device=logits_V.device)
        values = logits_V[at]
        penalty = sampling.repetition_penalty
        logits_V[at] = torch.where(values > 0, values / penalty, values * penalty)
    if generated and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(generated)
        at = torch.tensor(list(counts), dtype=torch.long, device=logits_V.device)
        times = torch.tensor(list(counts.values()), dtype=logits_V.dtype, device=logits_V.device)
        logits_V[at] -= sampling.presence_penalty + sampling.frequency_penalty * times
    return logits_V


@dataclass(frozen=True)
class Logprobs:
    """Log-probability of a token before temperature, and the most likely ids with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None
    """Of the token among all ids, from 1; None where it was not counted."""


def token_logprobs(logits_V: Tensor, token: int, num_top: int) -> Logprobs:
    """Log-probabilities, with LOWEST_LOGPROB for tokens that are excluded: JSON has no infinity."""
    scores_V = logits_V.float().log_softmax(dim=-1).clamp(min=LOWEST_LOGPROB)
    values, ids = scores_V.topk(min(num_top, len(scores_V)))
    return Logprobs(token, float(scores_V[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
