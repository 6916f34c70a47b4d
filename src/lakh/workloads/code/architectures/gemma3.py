"""Gemma 3, text only: Gemma 2 with norms on queries and keys in place of bounds, windows in five of six layers, and
rotary positions of another base in the layers with a window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lakh.spec.model import Model
from lakh.workloads.code.architectures import LayerWeights, ParameterInfo
from lakh.workloads.code.architectures.gemma import norm_weight
from lakh.workloads.code.architectures.gemma2 import GEMMA2, gemma2_block, gemma2_parameters
from lakh.workloads.code.ops import ModelOps, Rope

__all__ = ["GEMMA3"]

_HEAD_NORMS = ("attention.q_norm", "attention.k_norm")


def _parameters(spec: Model) -> dict[str, ParameterInfo]:
    found = gemma2_parameters(spec)
    return found | {name: replace(found[name], initial=0.0, gguf_layout="offset") for name in _HEAD_NORMS}


def _block(
    spec: Model, weights: LayerWeights, ops: ModelOps, x: Tensor, delta: Tensor | None, rope: Rope, context: Any
) -> tuple[Tensor, Tensor]:
    head_norms = (norm_weight(weights, "attention.q_norm"), norm_weight(weights, "attention.k_norm"))
    return gemma2_block(spec, weights, ops, x, delta, rope, context, head_norms)


GEMMA3 = replace(
    GEMMA2,
    name="gemma3",
    hf_model_type="gemma3_text",
    hf_class="Gemma3ForCausalLM",
    hf_names={**GEMMA2.hf_names, "local_rope_base": "rope_local_base_freq"},
    hf_synonyms={"use_bidirectional_attention": (False,)},
    hf_defaults={
        **GEMMA2.hf_defaults,
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10_000.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    hf_windows="but_sixth",
    gguf="gemma3",
    gguf_names={"logit_softcap": "final_logit_softcapping", "local_rope_base": "rope.freq_base_swa"},
    gguf_windows=5 / 6,
    block_parameters=_parameters,
    block=_block,
)
