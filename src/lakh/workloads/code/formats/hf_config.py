"""config.json of a Hugging Face directory, in both directions.

A model is a Llama; with a norm on queries and keys (spec.Model.qk_norm) it is what transformers calls Qwen3. Written
for transformers 4.45 and up: what version 5 moved (rope_theta into rope_parameters, torch_dtype to dtype) stands in
both places. What lakh's model cannot represent (biases, scaled positions, other architectures) is a UserError that
names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lakh.errors import ConfigError, UserError
from lakh.spec.model import Model

__all__ = ["PLAIN", "config_of", "spec_of"]

# qk_norm -> model_type, architecture, and fields that only this kind has.
_KINDS: dict[bool, tuple[str, str, dict[str, Any]]] = {
    False: ("llama", "LlamaForCausalLM", {"mlp_bias": False, "pretraining_tp": 1}),
    True: ("qwen3", "Qwen3ForCausalLM", {"use_sliding_window": False, "sliding_window": None}),
}
PLAIN = "lakh loads plain Llama models, and Qwen3 models for their norm on queries and keys"


def config_of(spec: Model, dtype: torch.dtype, ids: Mapping[str, int]) -> dict[str, Any]:
    """The content of config.json; `ids` are those of special tokens."""
    dtype_name = str(dtype).removeprefix("torch.")
    kind, architecture, own = _KINDS[spec.qk_norm]
    return {
        "architectures": [architecture],
        "model_type": kind,
        "hidden_size": spec.width,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.context,
        "tie_word_embeddings": spec.tied,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_base,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_base},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        **own,
        "initializer_range": 0.02,
        "use_cache": True,
        **ids,
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
    }


def spec_of(where: str, config: dict[str, Any]) -> Model:
    """The model that a config.json describes; `where` is its path, for errors."""

    def refuse(field: str, found: str, todo: str = PLAIN) -> UserError:
        return UserError(f"{field} ({where})", found, todo)

    kind = config.get("model_type") or "missing"
    qk_norm = kind == _KINDS[True][0]
    expected_kind, architecture, _ = _KINDS[qk_norm]
    architectures = config.get("architectures") or [architecture]
    if kind != expected_kind or architectures != [architecture]:
        found = f"is {kind} with architectures {architectures}"
        raise refuse("model_type", found, "give a LlamaForCausalLM or Qwen3ForCausalLM")
    plain = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "hidden_act": "silu"}
    for field, only in plain.items():
        if config.get(field, only) != only:
            raise refuse(field, f"{config[field]!r} is not {only!r}")
    if config.get("quantization_config"):
        raise refuse("quantization_config", "the weights are quantized", "give a model in float32, bfloat16 or float16")

    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise refuse("rope_parameters", f"{rope!r} is not a table")
    rope_kind = rope.get("rope_type", rope.get("type", "default"))
    if rope_kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise refuse("rope_parameters", f"positions are scaled ({rope_kind})")

    def number(field: str, kind: type, default: float | None = None, table: dict[str, Any] = config) -> Any:
        value = table.get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | kind):
            found = "is missing" if value is None else f"{value!r} is not a{' whole' * (kind is int)} number"
            raise refuse(field, found, "copy the model again")
        return kind(value)

    heads = number("num_attention_heads", int)
    theta = number("rope_theta", float, number("rope_theta", float, 10_000.0), rope)  # version 5 first, then version 4
    try:
        spec = Model(
            layers=number("num_hidden_layers", int),
            width=number("hidden_size", int),
            heads=heads,
            kv_heads=number("num_key_value_heads", int, heads),
            ffn=number("intermediate_size", int),
            vocab=number("vocab_size", int),
            tied=bool(config.get("tie_word_embeddings", False)),
            rope_base=theta,
            context=number("max_position_embeddings", int, 2048),
            norm_eps=number("rms_norm_eps", float, 1e-6),
            qk_norm=qk_norm,
        )
    except ConfigError as error:
        raise refuse(error.where, error.found, error.todo) from None
    if config.get("head_dim") not in (None, spec.head_dim):
        found = f"{config['head_dim']} is not hidden_size / num_attention_heads = {spec.head_dim}"
        raise refuse("head_dim", found)
    return spec
