"""Attention to the last tokens only, as settings."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lakh.config import require, require_not_negative, require_positive

__all__ = ["SlidingWindow"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlidingWindow:
    """Sliding-window attention in some of the layers."""

    tokens: int
    """Tokens that these layers attend to: a token itself and those before it; in llama4 those of its chunk, which
    begins at a multiple of this number."""
    share: float = 1.0
    """Share of the layers with a window, spread evenly: with 0.5 the first, the third and so on."""
    first_layer: int | None = None
    """The layers before it have no window, and `share` is that of the others; default 0."""

    def __post_init__(self) -> None:
        require_positive(self, "tokens")
        require(self, "share", lambda share: 0 < share <= 1, "is not a share of the layers", "choose above 0, up to 1")
        require_not_negative(self, "first_layer")

    def covers(self, layer: int) -> bool:
        """Whether this layer has a window."""
        place = layer - (self.first_layer or 0)
        before, after = (round(count * self.share, 6) for count in (place, place + 1))
        return place >= 0 and math.ceil(after) > math.ceil(before)
