"""Published model shapes by name, and model files of the user's own: TOML with the same keys.

Knows no layout and no hardware. Unknown keys and impossible shapes are errors with a remedy.
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lakh import config
from lakh.errors import ConfigError, UserError
from lakh.planner.shape import Shape

__all__ = ["Architecture", "architecture", "names"]

DATA = Path(__file__).with_name("data") / "models.toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    source: str
    """Where these numbers come from."""
    head_dim: int = 0
    """0 is width / heads."""
    gated: bool = True
    tied: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    routed_nodes: int = 0
    qk_norm: bool = False
    """Whether queries and keys are normed head by head."""
    expert_bias: bool = False
    """Whether experts have biases and clamped gates."""
    window: int = 0
    """Tokens that layers with a sliding window look back; 0 is none."""
    windowed: float = 0.0
    """Share of the layers that have one."""
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0

    def __post_init__(self) -> None:
        config.require_positive(self, "layers", "width", "heads", "kv_heads", "ffn", "vocab")
        if not self.head_dim and self.width % self.heads:
            raise ConfigError("heads", f"{self.heads} does not divide width {self.width}", "give head_dim as well")
        if self.heads % self.kv_heads:
            raise ConfigError("kv_heads", f"{self.kv_heads} does not divide heads {self.heads}", "choose a divisor")
        if self.experts and not (0 < self.top_k <= self.experts and self.expert_ffn > 0):
            raise ConfigError("top_k", f"{self.top_k} of {self.experts} experts", "give top_k and expert_ffn too")
        if not 0 <= self.windowed <= 1 or (self.window > 0) != (self.windowed > 0):
            raise ConfigError(
                "windowed", f"is {self.windowed} with a window of {self.window}", "give both; the share is at most 1"
            )
        if self.dense_layers > self.layers:
            raise ConfigError("dense_layers", f"{self.dense_layers} of {self.layers} layers", "choose fewer")

    @property
    def shape(self) -> Shape:
        values = {name: float(value) for name, value in asdict(self).items() if name != "source"}
        values["head_dim"] = values["head_dim"] or self.width / self.heads
        return Shape(**values)


def names() -> list[str]:
    return list(_book())


def architecture(name: str) -> Architecture:
    """A model of the catalogue, or of a TOML file of its own."""
    if name.endswith(".toml"):
        return config.load(Architecture, name)
    book = _book()
    if name not in book:
        near = difflib.get_close_matches(name, book, n=1)
        todo = f"did you mean {near[0]}?" if near else f"give a .toml file, or one of: {', '.join(book)}"
        raise UserError(f"--model {name}", "no such model", todo)
    return config.from_dict(Architecture, book[name], origin=f"models.toml [{name}]")


def _book() -> dict[str, dict[str, Any]]:
    return tomllib.loads(DATA.read_text(encoding="utf-8"))
