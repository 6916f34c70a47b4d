"""Mixture-of-experts layers as settings."""

from __future__ import annotations

from dataclasses import dataclass

from lakh.config import require, require_not_negative, require_positive
from lakh.errors import ConfigError

__all__ = ["Experts"]

MOST_EXPERTS = 10_000
"""Far above every published model: a damaged file with more is refused before its tensors are listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Mixture-of-experts layers: a router sends each token to a few of many small feed-forwards."""

    count: int
    """Routed experts per layer."""
    top_k: int
    """Routed experts per token."""
    ffn: int
    """Inner size of one expert."""
    shared: int = 0
    """Experts that process every token."""
    dense_layers: int = 0
    """Leading blocks that keep the dense feed-forward of `model.ffn`."""
    interval: int = 1
    """Of each run of this many blocks the last has experts, and the others keep the dense feed-forward."""
    dense_blocks: tuple[int, ...] = ()
    """Further blocks that keep the dense feed-forward, from 0 on."""
    most_nodes: int = 0
    """Most nodes that the router sends a token to; 0 is no limit."""
    bias: bool = False
    """Experts have biases and clamped gates, as in GPT-OSS."""
    normalize: bool = True
    """The weights of a token's experts sum to 1, before `weight_scale`."""
    weight_scale: float = 1.0
    """Factor of the weights of a token's experts (DeepSeek-V3)."""
    groups: int = 1
    """The experts are divided into this many groups, of which a token chooses `top_groups` first: those with the
    largest sum of their two best scores (DeepSeek-V3)."""
    top_groups: int = 1
    """Groups whose experts a token can choose."""
    balance_loss: float = 0.0
    """Factor of the auxiliary loss that spreads tokens over the experts; 0 for none."""
    balance_bias: float = 0.0
    """Change per step of a bias that moves tokens from busy to idle experts, without a loss; 0 for no bias."""
    capacity: float = 0.0
    """Most tokens of a micro-batch that an expert takes in training, as a multiple of an even share; the choices with
    the smallest weights beyond it are dropped. 0 drops none."""

    def __post_init__(self) -> None:
        require_positive(self, "count", "top_k", "ffn", "interval", "groups", "top_groups")
        require(self, "weight_scale", lambda factor: 0 < factor < float("inf"), "is not above 0", "use e.g. 2.5")
        require(self, "count", lambda count: count <= MOST_EXPERTS, f"is above {MOST_EXPERTS:,}", "choose fewer")
        if self.top_k > self.count:
            raise ConfigError("top_k", f"{self.top_k} of {self.count} experts", "choose at most all of them")
        if self.top_groups > self.groups:
            raise ConfigError("top_groups", f"{self.top_groups} of {self.groups} groups", "choose at most all of them")
        if self.groups > 1 and (self.count % self.groups or self.count < 2 * self.groups):
            found = f"{self.groups} of {self.count} experts"
            raise ConfigError("groups", found, "choose groups of equal size, of two experts or more")
        if self.top_k > self.choosable:
            found = f"{self.top_k}, and {self.top_groups} of {self.groups} groups have {self.choosable} experts"
            raise ConfigError("top_k", found, "choose more groups")
        if any(block < 0 for block in self.dense_blocks) or len(set(self.dense_blocks)) < len(self.dense_blocks):
            raise ConfigError("dense_blocks", f"{list(self.dense_blocks)} has one twice, or below 0", "name each once")
        require_not_negative(self, "shared", "dense_layers", "most_nodes", "balance_loss", "balance_bias", "capacity")

    @property
    def choosable(self) -> int:
        """Experts of the groups that a token chooses."""
        return self.count // self.groups * self.top_groups

    def are_in(self, layer: int) -> bool:
        """Whether this block has experts."""
        return self._are_regular_in(layer) and layer not in self.dense_blocks

    def num_layers(self, layers: int) -> int:
        """How many of this many blocks have experts."""
        regular = layers // self.interval - self.dense_layers // self.interval
        return regular - sum(map(self._are_regular_in, self.dense_blocks))

    def _are_regular_in(self, layer: int) -> bool:
        return layer >= self.dense_layers and (layer + 1) % self.interval == 0
