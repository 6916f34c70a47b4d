"""Latent attention as settings."""

from __future__ import annotations

from dataclasses import dataclass

from lakh.config import require_not_negative, require_positive

__all__ = ["Latent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Multi-head latent attention (MLA): low-rank queries, keys and values (arXiv 2405.04434)."""

    kv_rank: int
    """Rank of the compressed keys and values."""
    rope_dim: int
    """Extra size of each query and key head, which carries the rotary position."""
    q_rank: int = 0
    """Rank of the compressed queries; 0 does not compress them."""

    def __post_init__(self) -> None:
        require_positive(self, "kv_rank", "rope_dim")
        require_not_negative(self, "q_rank")
