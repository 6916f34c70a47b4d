"""Which token comes next: temperature, top-k, top-p, and one stream of random numbers for each request.

`choose` is a pure function of scores and numbers: a row's token depends on its own scores and its own
random number, never on its neighbours in the batch. Greedy rows (temperature 0) take the
largest score.
"""

from __future__ import annotations

import hashlib
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lakh.errors import ConfigError

__all__ = ["Sampling", "choose", "random_stream"]

MAX_STOPS = 16
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Sampling:
    """How a completion is drawn. Refuses what it cannot mean with a ConfigError that names the field."""

    max_tokens: int = 64
    """At most this many new tokens."""
    temperature: float = 0.0
    """0 is greedy; scores are divided by it."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together reach this probability."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 keeps all."""
    seed: int | None = None
    """The same seed, prompt and weights give the same completion; None draws afresh each time."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these."""

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 1, 2**31)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise ConfigError("top_p", "0 keeps no token", "choose a value above 0, up to 1")
        _whole("top_k", self.top_k, 0, 2**31)
        if self.seed is not None:
            _whole("seed", self.seed, 0, MAX_SEED)
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise ConfigError(
                "stop",
                f"{reprlib.repr(self.stop)} is not a list of non-empty texts",
                "give texts such as '\\n\\n'",
            )
        if len(self.stop) > MAX_STOPS:
            raise ConfigError("stop", f"{len(self.stop)} texts are too many", f"give at most {MAX_STOPS}")


def random_stream(sampling: Sampling, copy: int) -> torch.Generator:
    """The random numbers of one request. `copy` tells apart requests that ask for the same prompt several
    times.
    """
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
        return generator
    key = hashlib.sha256(f"{sampling.seed}:{copy}".encode()).digest()
    return generator.manual_seed(int.from_bytes(key[:8], "little") >> 1)


def choose(logits_BV: Tensor, samplings: Sequence[Sampling], streams: Sequence[torch.Generator]) -> list[int]:
    """The next token of every row. Greedy rows leave their stream alone; others take one number from it."""
    if all(sampling.temperature == 0 for sampling in samplings):
        return logits_BV.argmax(dim=-1).tolist()

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=logits_BV.device, dtype=torch.float32)[:, None]

    greedy_B = torch.tensor([s.temperature == 0 for s in samplings], device=logits_BV.device)
    temperature_B1 = column([s.temperature or 1.0 for s in samplings])
    top_p_B1 = column([s.top_p for s in samplings])
    top_k_B1 = column([s.top_k or logits_BV.shape[-1] for s in samplings])
    draws_B1 = column(
        [
            0.0 if s.temperature == 0 else torch.rand((), generator=stream).item()
            for s, stream in zip(samplings, streams, strict=True)
        ]
    )
    scores_BV, ids_BV = logits_BV.float().sort(dim=-1, descending=True, stable=True)
    # Subtract the largest first: a tiny temperature then gives 0 and -inf, not inf - inf.
    scores_BV = (scores_BV - scores_BV[:, :1]) / temperature_B1
    ranks_V = torch.arange(scores_BV.shape[-1], device=scores_BV.device)
    probabilities_BV = scores_BV.masked_fill(ranks_V >= top_k_B1, -math.inf).softmax(dim=-1)
    before_BV = probabilities_BV.cumsum(dim=-1) - probabilities_BV
    probabilities_BV = probabilities_BV.masked_fill(before_BV >= top_p_B1, 0.0)
    reached_BV = probabilities_BV.cumsum(dim=-1)
    # The first place whose cumulated probability exceeds the draw; rounding may push it past the end, never
    # past a kept token: a masked one adds nothing, so it is never the first to exceed.
    picks_B1 = (reached_BV <= draws_B1 * reached_BV[:, -1:]).sum(dim=-1, keepdim=True)
    last_kept_B1 = (probabilities_BV > 0).sum(dim=-1, keepdim=True) - 1
    sampled_B = ids_BV.gather(1, torch.minimum(picks_B1, last_kept_B1)).squeeze(1)
    return torch.where(greedy_B, ids_BV[:, 0], sampled_B).tolist()


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(name, f"{reprlib.repr(value)} is not a whole number from {low} to {high}", "choose one")


def _number(name: str, value: object, low: float, high: float) -> None:
    # NaN compares false and is refused too.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(name, f"{reprlib.repr(value)} is not a number from {low:g} to {high:g}", "choose one")
