"""Convert between spec.Model and the config.json of a Hugging Face directory.

Written for transformers 4.45 and newer: fields that version 5 moved (rope_theta into rope_parameters, torch_dtype to
dtype) appear in both places. A model that lakh cannot represent (biases, scaled positions, other architectures) is a
UserError that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lakh.errors import ConfigError, UserError
from lakh.spec.model import Model
from lakh.workloads.code.architectures import architecture_of, architectures

__all__ = ["SUPPORTED", "config_of", "spec_of"]

_FIELDS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "rope_base": "rope_theta",
}
"""Numbers of spec.Model and their names in config.json."""
_FLOATS = ("norm_eps", "rope_base")
_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
SUPPORTED = f"lakh loads {' and '.join(architecture.hf_class for architecture in architectures())} models"


def config_of(spec: Model, dtype: torch.dtype, ids: Mapping[str, int]) -> dict[str, Any]:
    """The content of config.json; `ids` are the special tokens'."""
    dtype_name = str(dtype).removeprefix("torch.")
    architecture = architecture_of(spec)
    return {
        "architectures": [architecture.hf_class],
        "model_type": architecture.hf_model_type,
        **{key: getattr(spec, field) for field, key in _FIELDS.items()},
        "head_dim": spec.head_dim,
        "tie_word_embeddings": spec.tied,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_base},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        **architecture.hf_config,
        "initializer_range": 0.02,
        "use_cache": True,
        **ids,
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
    }


def spec_of(where: str, config: dict[str, Any]) -> Model:
    """The model that a config.json describes; `where` is its path, for errors."""

    def refuse(field: str, found: str, todo: str = SUPPORTED) -> UserError:
        return UserError(f"{field} ({where})", found, todo)

    kind = config.get("model_type") or "missing"
    architecture = next((known for known in architectures() if known.hf_model_type == kind), None)
    if architecture is None or config.get("architectures") not in (None, [], [architecture.hf_class]):
        raise refuse("model_type", f"is {kind} with architectures {config.get('architectures')}")
    only_values = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "hidden_act": "silu"}
    for field, only in only_values.items():
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

    theta = {"rope_theta": rope.get("rope_theta")}  # version 5; version 4 has it in `config`
    given = _DEFAULTS | {"num_key_value_heads": config.get("num_attention_heads")}
    given |= {key: value for part in (config, theta) for key, value in part.items() if value is not None}
    fields: dict[str, Any] = {}
    for field, key in _FIELDS.items():
        value, kind = given.get(key), float if field in _FLOATS else int
        if isinstance(value, bool) or not isinstance(value, int | kind):
            found = "is missing" if value is None else f"{value!r} is not a{' whole' * (kind is int)} number"
            raise refuse(key, found, "copy the model again")
        fields[field] = kind(value)
    try:
        spec = Model(**fields, tied=bool(config.get("tie_word_embeddings", False)), **architecture.features)
    except ConfigError as error:
        raise refuse(error.where, error.found, error.todo) from None
    if config.get("head_dim") not in (None, spec.head_dim):
        found = f"{config['head_dim']} is not hidden_size / num_attention_heads = {spec.head_dim}"
        raise refuse("head_dim", found)
    return spec
