"""Rotary positions of longer contexts, as settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lakh.config import require_positive
from lakh.errors import ConfigError

__all__ = ["ROPE_BASE", "RopeScaling"]

ROPE_BASE = 10_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Rotary frequencies changed for a context longer than that of pre-training."""

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    """linear divides all frequencies; llama3 the low ones (Llama 3.1); yarn interpolates between (arXiv 2309.00071);
    longrope divides each by a number of its own (arXiv 2402.13753), here within the original context only."""
    factor: float
    """How much longer the context becomes."""
    original_context: int | None = None
    """Context of pre-training (llama3, yarn, longrope)."""
    low_frequency: float = 1.0
    """llama3: wavelengths above original_context / low_frequency are divided by the factor."""
    high_frequency: float = 4.0
    """llama3: wavelengths below original_context / high_frequency stay."""
    beta_fast: float = 32.0
    """yarn: dims with more rotations than this over the original context stay."""
    beta_slow: float = 1.0
    """yarn: dims with fewer rotations than this are divided by the factor."""
    truncate: bool = True
    """yarn: round the bounds between both to whole dims."""
    attention_factor: float | None = None
    """Factor of cosines and sines. yarn: default 0.1 ln(factor) + 1; longrope: default
    sqrt(1 + ln(factor) / ln(original_context))."""
    score_factor: float | None = None
    """yarn: factor of attention scores, with latent attention (DeepSeek-V2 and V3)."""
    short_factors: tuple[float, ...] = ()
    """longrope: divisor of each frequency, for texts within the original context."""
    long_factors: tuple[float, ...] = ()
    """longrope: those for longer texts, which lakh keeps for exports and does not compute with."""

    def __post_init__(self) -> None:
        require_positive(self, "factor", "original_context", "low_frequency", "high_frequency", "beta_fast")
        if self.kind != "linear" and self.original_context is None:
            raise ConfigError("original_context", f"is missing; {self.kind} needs it", "give the pre-training context")
        if self.kind == "longrope" and (not self.short_factors or len(self.short_factors) != len(self.long_factors)):
            found = f"has {len(self.short_factors)} numbers, and long_factors {len(self.long_factors)}"
            raise ConfigError("short_factors", found, "give one of each for every frequency")
        if any(factor <= 0 for factor in (*self.short_factors, *self.long_factors)):
            raise ConfigError("short_factors, long_factors", "have a number that is not above 0", "use the model's own")
        if self.kind == "llama3" and self.high_frequency < self.low_frequency:
            raise ConfigError("high_frequency", "is below low_frequency", "use e.g. 4 and 1")
