"""Llama 4 (Scout, Maverick): experts whose router multiplies what they take, one of them for every token, and layers
without rotary positions at regular intervals.

Its other layers attend to chunks of 8,192 tokens, and queries of layers without positions grow from the end of the
first chunk on. lakh computes the first chunk, in which a model is without both, and longer contexts are not computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lakh.errors import ConfigError
from lakh.spec.model import Model
from lakh.workloads.code.architectures import LayerWeights, ParameterInfo
from lakh.workloads.code.architectures.llama import attention, attention_parameters
from lakh.workloads.code.architectures.mixtures.mixtral import MIXTRAL, expert_parameters, mixture_or_dense
from lakh.workloads.code.ops import ModelOps, Rope

__all__ = ["CHUNK", "LLAMA4"]

CHUNK = 8192
"""Tokens of a chunk, in all released models."""
_CHUNKED, _FULL = "chunked_attention", "full_attention"
_STEP, _LAYERS = "interleave_moe_layer_step", "moe_layers"


def _parameters(spec: Model) -> dict[str, ParameterInfo]:
    module = "feed_forward"
    found = expert_parameters(spec, (module, "gate_proj", "up_proj", "down_proj"), shared="shared_expert")
    found["ffn.router"] = replace(found["ffn.router"], hf=f"{module}.router.weight")
    for name, theirs in (("gate", "gate_up"), ("up", "gate_up"), ("down", "down")):
        info = found[f"ffn.{name}"]
        found[f"ffn.{name}"] = replace(info, hf=f"{module}.experts.{theirs}_proj", hf_layout="transposed")
    return {
        "attention_norm": ParameterInfo((spec.width,), "input_layernorm.weight", "attn_norm.weight"),
        **attention_parameters(spec),
        "ffn_norm": ParameterInfo((spec.width,), "post_attention_layernorm.weight", "ffn_norm.weight"),
        **found,
    }


def _block(
    spec: Model, weights: LayerWeights, ops: ModelOps, x: Tensor, delta: Tensor | None, rope: Rope, context: Any
) -> tuple[Tensor, Tensor]:
    x, h = ops.norm_add(x, delta, weights.vector("attention_norm"), spec.norm_eps)
    norms = None
    if spec.qk_norm and spec.rotates(weights.layer):  # before the rotation, which does not change it
        ones = torch.ones(spec.head_dim, dtype=h.dtype, device=h.device)
        norms = ones, ones
    delta = attention(spec, weights, ops, h, rope, context, norms)
    x, h = ops.norm_add(x, delta, weights.vector("ffn_norm"), spec.norm_eps)
    return x, mixture_or_dense(spec, weights, ops, h)


def _derived(given: Mapping[str, Any]) -> dict[str, Any]:
    """The context that lakh computes, the interval of layers with experts, and no kinds of attention."""
    layers, kinds = given["num_hidden_layers"], given.get("layer_types")
    limits = [given["max_position_embeddings"]]
    if given["attn_temperature_tuning"] is not False:
        limits.append(given["floor_scale"])
    if given.get("attention_chunk_size") is not None and (kinds is None or _CHUNKED in kinds):
        limits.append(given["attention_chunk_size"])
    if any(type(limit) is not int or limit < 2 for limit in (layers, *limits)):
        found = f"{given['attention_chunk_size']!r}, floor_scale {given['floor_scale']!r} and {limits[0]!r} positions"
        raise ConfigError("attention_chunk_size", f"is {found}: not numbers of tokens", "copy the model again")
    if given["attn_temperature_tuning"] is not False:
        limits[1] -= 1  # the first token whose query grows is one before it
    interval = given[_STEP]
    if (chosen := given.get(_LAYERS)) is not None:
        interval = chosen[0] + 1 if isinstance(chosen, list) and chosen and type(chosen[0]) is int else None
        if interval is None or chosen != list(range(interval - 1, layers, max(interval, 1))):
            raise ConfigError(_LAYERS, f"{chosen!r} are not layers at regular intervals", "use another model")
    known = isinstance(kinds, list) and len(kinds) == layers and not set(kinds) - {_CHUNKED, _FULL}
    return {
        "max_position_embeddings": min(limits),
        _STEP: interval,
        "layer_types": None if known else kinds,
        "no_rope_layers": given.get("no_rope_layers") or None,
    }


def _more(spec: Model) -> dict[str, Any]:
    """A context beyond the first chunk has been trained without chunks."""
    assert spec.experts is not None
    is_one = spec.context < CHUNK
    return {
        "layer_types": [_CHUNKED if is_one and spec.rotates(layer) else _FULL for layer in range(spec.layers)],
        "attention_chunk_size": CHUNK,
        "attn_temperature_tuning": is_one,
        "floor_scale": CHUNK,
        "attn_scale": 0.1,
        _LAYERS: list(filter(spec.experts.are_in, range(spec.layers))),
    }


LLAMA4 = replace(
    MIXTRAL,
    name="llama4",
    hf_model_type="llama4_text",
    hf_class="Llama4ForCausalLM",
    hf_config={"hidden_act": "silu", "attention_bias": False},
    hf_names={"ffn": "intermediate_size_mlp"},
    hf_defaults={
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        _STEP: 1,
        "use_qk_norm": True,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": CHUNK,
        "attn_temperature_tuning": True,
        "floor_scale": CHUNK,
    },
    hf_choices={"qk_norm": ("use_qk_norm", {True: True, False: False})},
    hf_derived=_derived,
    hf_more=_more,
    hf_experts={
        "count": "num_local_experts",
        "top_k": "num_experts_per_tok",
        "ffn": "intermediate_size",
        "interval": _STEP,
    },
    hf_windows=None,
    gguf="llama4",
    block_parameters=_parameters,
    block=_block,
)
