"""The tensors of a code model, by CodeModel's names: which there are, and whether these are they.

Knows a spec.Model; knows nothing of files. Weights that do not fit their settings are a CorruptCheckpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lakh.errors import CorruptCheckpoint
from lakh.spec.model import Model

__all__ = ["check_weights", "shapes"]


def shapes(spec: Model) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of this model, by CodeModel's names."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    block = {
        "attention_norm": (spec.width,),
        "attention.q": (queries, spec.width),
        "attention.k": (keys, spec.width),
        "attention.v": (keys, spec.width),
        "attention.o": (spec.width, queries),
        "ffn_norm": (spec.width,),
        "ffn.gate": (spec.ffn, spec.width),
        "ffn.up": (spec.ffn, spec.width),
        "ffn.down": (spec.width, spec.ffn),
    }
    if spec.qk_norm:
        block |= {"attention.q_norm": (spec.head_dim,), "attention.k_norm": (spec.head_dim,)}
    result: dict[str, tuple[int, ...]] = {
        "embed.weight": (spec.vocab, spec.width),
        "norm.weight": (spec.width,),
    }
    for layer in range(spec.layers):
        result |= {f"blocks.{layer}.{name}.weight": shape for name, shape in block.items()}
    if not spec.tied:
        result["head.weight"] = (spec.vocab, spec.width)
    return result


def check_weights(where: str, spec: Model, weights: Mapping[str, Tensor], todo: str) -> None:
    """Refuse weights that are not all of this model's, and no others; `where` and `todo` are the error's."""
    expected = shapes(spec)
    for name, shape in expected.items():
        if name not in weights:
            raise CorruptCheckpoint(where, f"has no tensor {name}", todo)
        found = tuple(weights[name].shape)
        if found != shape:
            raise CorruptCheckpoint(where, f"{name} has shape {list(found)}, and its settings say {list(shape)}", todo)
    for name in weights:
        if name not in expected:
            raise CorruptCheckpoint(where, f"has a tensor {name} that its settings do not know", todo)
