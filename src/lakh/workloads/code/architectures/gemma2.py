"""Gemma 2: norms before and after attention and feed-forward, a GELU gate, bounded scores and logits, windows in every
second layer. Gemma's stored norms, scale of embeddings and feed-forward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lakh.spec.model import Model
from lakh.workloads.code.architectures import LayerWeights, ParameterInfo
from lakh.workloads.code.architectures.gemma import GEMMA, gelu_feed_forward, norm_weight
from lakh.workloads.code.architectures.llama import attention, attention_parameters, gated_parameters
from lakh.workloads.code.ops import ModelOps, Rope, rms_norm

__all__ = ["GEMMA2", "gemma2_block", "gemma2_parameters"]

_NORMS = {
    "attention_norm": ("input_layernorm", "attn_norm"),
    "attention_post_norm": ("post_attention_layernorm", "post_attention_norm"),
    "ffn_norm": ("pre_feedforward_layernorm", "ffn_norm"),
    "ffn_post_norm": ("post_feedforward_layernorm", "post_ffw_norm"),
}
"""Names in Hugging Face and GGUF files."""


def gemma2_parameters(spec: Model) -> dict[str, ParameterInfo]:
    norms = {
        name: ParameterInfo((spec.width,), f"{hf}.weight", f"{gguf}.weight", initial=0.0, gguf_layout="offset")
        for name, (hf, gguf) in _NORMS.items()
    }
    return norms | attention_parameters(spec) | gated_parameters(spec)


def gemma2_block(
    spec: Model,
    weights: LayerWeights,
    ops: ModelOps,
    x: Tensor,
    delta: Tensor | None,
    rope: Rope,
    context: Any,
    head_norms: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`head_norms`: what the norms of queries and keys multiply with (Gemma 3)."""
    eps = spec.norm_eps
    x, h = ops.norm_add(x, delta, norm_weight(weights, "attention_norm"), eps)
    y = attention(spec, weights, ops, h, rope, context, head_norms)
    delta = rms_norm(y, norm_weight(weights, "attention_post_norm"), eps)
    x, h = ops.norm_add(x, delta, norm_weight(weights, "ffn_norm"), eps)
    return x, rms_norm(gelu_feed_forward(weights, ops, h), norm_weight(weights, "ffn_post_norm"), eps)


GEMMA2 = replace(
    GEMMA,
    name="gemma2",
    hf_model_type="gemma2",
    hf_class="Gemma2ForCausalLM",
    hf_names={
        "attention_softcap": "attn_logit_softcapping",
        "logit_softcap": "final_logit_softcapping",
        "query_scale": "query_pre_attn_scalar",
    },
    hf_config={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "use_bidirectional_attention": None},
    hf_synonyms={},
    hf_defaults={
        **GEMMA.hf_defaults,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    },
    hf_windows="alternate",
    gguf="gemma2",
    gguf_names={"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"},
    gguf_windows=0.5,
    block_parameters=gemma2_parameters,
    block=gemma2_block,
)
