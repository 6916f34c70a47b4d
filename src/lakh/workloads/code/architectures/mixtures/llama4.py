"""Llama 4 (Scout, Maverick): experts whose router multiplies what they take, one of them for every token, and layers
without rotary positions at regular intervals.

Its other layers attend to chunks of 8,192 tokens, and queries of layers without positions grow from the end of the
first chunk on.
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
    """The interval of layers with experts; chunks as windows, and the growth of queries, where the context has more
    than one of them."""
    layers, context = (_number(given, key) for key in ("num_hidden_layers", "max_position_embeddings"))
    kinds, chunk = given.get("layer_types"), given.get("attention_chunk_size")
    if kinds is None:  # as transformers has it: all layers with rotary positions
        flags, interval = given.get("no_rope_layers"), given.get("no_rope_layer_interval")
        if not (isinstance(flags, list) and len(flags) >= layers):
            flags = [not (type(interval) is int and interval > 0 and (at + 1) % interval == 0) for at in range(layers)]
        kinds = [_CHUNKED if flag else _FULL for flag in flags[:layers]]
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {_CHUNKED, _FULL}:
        found = f"is not a list of {_CHUNKED} and {_FULL} for {layers} layers"
        raise ConfigError("layer_types", found, "copy the model again")
    if chunk is not None:
        chunk = _number(given, "attention_chunk_size")
    has_chunks = chunk is not None and chunk < context and _CHUNKED in kinds
    floor = None if given["attn_temperature_tuning"] is False else _number(given, "floor_scale")
    grows = floor is not None and floor <= context
    step = given[_STEP]
    if (chosen := given.get(_LAYERS)) is not None:
        step = chosen[0] + 1 if isinstance(chosen, list) and chosen and type(chosen[0]) is int else None
        if step is None or chosen != list(range(step - 1, layers, max(step, 1))):
            raise ConfigError(_LAYERS, f"{chosen!r} are not layers at regular intervals", "use another model")
    return {
        _STEP: step,
        "sliding_window": chunk if has_chunks else None,
        "layer_types": ["sliding_attention" if kind == _CHUNKED else _FULL for kind in kinds],
        "floor_scale": floor if grows else None,
        "attn_scale": given["attn_scale"] if grows else 0,
        "no_rope_layers": given.get("no_rope_layers") or None,
    }


def _number(given: Mapping[str, Any], key: str) -> int:
    value = given.get(key)
    if type(value) is not int or value < 1:
        raise ConfigError(key, f"is {value!r}: not a number of tokens or layers", "copy the model again")
    return value


def _more(spec: Model) -> dict[str, Any]:
    """A model without chunks or growth has a context of one chunk, or has been trained without them."""
    assert spec.experts is not None
    is_one = spec.context < CHUNK
    window = spec.sliding_window
    has_chunk = [
        spec.rotates(layer) if is_one and window is None else spec.window(layer) is not None
        for layer in range(spec.layers)
    ]
    return {
        "layer_types": [_CHUNKED if chunked else _FULL for chunked in has_chunk],
        "attention_chunk_size": CHUNK if window is None else window.tokens,
        "attn_temperature_tuning": is_one or spec.query_growth is not None,
        "floor_scale": spec.growth_interval or CHUNK,
        "attn_scale": spec.query_growth or 0.1,
        _LAYERS: list(filter(spec.experts.are_in, range(spec.layers))),
    }


LLAMA4 = replace(
    MIXTRAL,
    name="llama4",
    hf_model_type="llama4_text",
    hf_class="Llama4ForCausalLM",
    hf_config={"hidden_act": "silu", "attention_bias": False},
    hf_names={"ffn": "intermediate_size_mlp", "growth_interval": "floor_scale"},
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
        "attn_scale": 0.1,
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
    hf_windows="given",
    gguf="llama4",
    block_parameters=_parameters,
    block=_block,
)
