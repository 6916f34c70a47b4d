"""Convert between spec.Model and the config.json of a Hugging Face directory.

Written for transformers 4.45 and newer: fields that version 5 moved (rope_theta into rope_parameters, torch_dtype to
dtype) appear in both places. The table of an architecture (architectures/) has the names and values that only it uses.
A model that lakh cannot represent is a UserError that names the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from lakh.errors import ConfigError, LakhError, UserError
from lakh.spec.model import FAMILIES, Experts, Latent, Model, SlidingWindow
from lakh.workloads.code.architectures import ModelArchitecture, architecture_of, architectures
from lakh.workloads.code.formats.hf import eight_bit, packed_int, rope, text_model

__all__ = ["config_of", "known_architectures", "spec_of"]

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
FLOATS: tuple[str, ...] = (
    *("norm_eps", "rope_base", "local_rope_base", "attention_softcap", "logit_softcap"),
    *("embedding_scale", "score_scale", "residual_scale", "logit_divisor", "query_growth"),
)
_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
_OTHER_NAMES = {"num_experts": "num_local_experts"}  # of one setting, in newer files
DEFAULT_FAMILIES = ("llama", "qwen3", "mixtral", "qwen3_moe")  # which spec.Model infers from its other settings
_EXPERT_OPTIONS = (
    "shared",
    "dense_layers",
    "interval",
    "dense_blocks",
    "normalize",
    "balance_bias",
    "weight_scale",
    "groups",
)
_WINDOWED, _FULL = "sliding_attention", "full_attention"


def known_architectures() -> str:
    """What to tell the owner of a model that is none of them."""
    return f"lakh loads {', '.join(architecture.hf_class for architecture in architectures())}"


def config_of(spec: Model, dtype: torch.dtype, ids: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json; `ids` are the special tokens'."""
    dtype_name = str(dtype).removeprefix("torch.")
    architecture = architecture_of(spec)
    names = _names(architecture)
    if spec.experts is not None:
        _refuse_other_experts(spec.experts, architecture)
    return {
        "architectures": [architecture.hf_class],
        "model_type": architecture.hf_model_type,
        **{key: _value(spec, field) for field, key in names.items()},
        "head_dim": spec.head_dim,
        "tie_word_embeddings": spec.tied,
        **({} if spec.traits.has_learned_positions else rope.config_of(spec)),
        **_window_config(spec, architecture),
        **{key: _word(words, getattr(spec, field)) for field, (key, words) in _choices(architecture).items()},
        **architecture.hf_more(spec),
        **{key: getattr(spec.experts, field) for field, key in architecture.hf_experts.items() if key},
        **_latent_config(spec, architecture),
        **_unrotated_config(spec),
        "attention_dropout": 0.0,
        **architecture.hf_config,
        "initializer_range": 0.02,
        "use_cache": True,
        **ids,
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
    }


def _refuse_other_experts(experts: Experts, architecture: ModelArchitecture) -> None:
    """What a config.json of this architecture cannot say."""
    fixed = _fixed_experts(architecture)
    for option in fields(Experts):
        field, value = option.name, getattr(experts, option.name)
        if field not in _EXPERT_OPTIONS or field in architecture.hf_experts:
            continue
        if field == "balance_bias" and FAMILIES[architecture.name].has_sigmoid_router:
            continue  # its step is of training only
        if value != fixed.get(field, option.default):
            found = f"is {value}, and {architecture.hf_class} does not have it"
            raise UserError(f"model.experts.{field}", found, "export a model without it; lakh serves the run itself")


def _names(architecture: ModelArchitecture) -> dict[str, str]:
    """Numbers of spec.Model that a family has, and their names in config.json."""
    names = {**_FIELDS, **architecture.hf_names}
    if FAMILIES[architecture.name].has_learned_positions:
        del names["rope_base"]
    return names


def _choices(architecture: ModelArchitecture) -> dict[str, tuple[str, Mapping[str | bool, Any]]]:
    """Those of settings that the family has: others stand in the table that its own is made from."""
    family = FAMILIES[architecture.name]
    return {field: found for field, found in architecture.hf_choices.items() if field in family.allows}


def _word(words: Mapping[str | bool, Any], meaning: Any) -> str | bool:
    return next(word for word, found in words.items() if found == meaning)


def _value(spec: Model, field: str) -> Any:
    """A number of the model, or what stands for its absence where config.json needs one."""
    neutral = {"embedding_scale": 1.0, "residual_scale": 1.0, "logit_divisor": 1.0, "query_scale": spec.head_dim}
    neutral |= {"score_scale": spec.head_dim**-0.5, "local_rope_base": spec.rope_base}
    value = getattr(spec, field)
    return neutral.get(field) if value is None else value


def spec_of(where: str, config: dict[str, Any]) -> Model:
    """The model that a config.json describes; `where` is its path, for errors."""

    def refuse(field: str, found: str, todo: str = "") -> UserError:
        return UserError(f"{field} ({where})", found, todo or known_architectures())

    config = text_model.config_of(where, config)
    kind = config.get("model_type") or "missing"
    architecture = next((known for known in architectures() if kind in known.hf_model_types), None)
    if architecture is None or config.get("architectures") not in (None, [], [architecture.hf_class]):
        raise refuse("model_type", f"is {kind} with architectures {config.get('architectures')}")
    for field, only in architecture.hf_config.items():
        found = config.get(field, architecture.hf_defaults.get(field, only))
        if found not in (only, *architecture.hf_synonyms.get(field, ())):
            todo = f"lakh computes {architecture.hf_class} with {only!r} only"
            raise refuse(field, f"{found!r} is not {only!r}", todo)
    if config.get("is_causal") is False:
        raise refuse("is_causal", "is false: every token sees those after it", "lakh computes causal attention only")
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    known_methods = (*eight_bit.METHODS, *packed_int.METHODS, *(["mxfp4"] if architecture.name == "gpt_oss" else []))
    if quantization and method not in known_methods:
        todo = f"lakh reads {', '.join(dict.fromkeys(known_methods))} and weights that are not quantized"
        raise refuse("quantization_config", f"the weights are quantized ({method})", todo)
    try:
        config = {**config, **architecture.hf_derived({**architecture.hf_defaults, **_present(config)})}
    except ConfigError as error:
        raise refuse(error.where, error.found, error.todo) from None
    if "local_rope_base" in FAMILIES[architecture.name].allows:
        config = rope.with_local_base(where, config)
    positions = {**architecture.hf_defaults, **_present(config)}
    base, scaling = rope.scaling_of(where, positions, FAMILIES[architecture.name])

    names = _names(architecture)
    optional = {field.name for field in fields(Model) if field.default is None}
    can_be_null = {"sliding_window", *architecture.hf_latent.values()}
    can_be_null |= {key for field, key in names.items() if field in optional}
    given = {**_DEFAULTS, "num_key_value_heads": config.get("num_attention_heads"), **architecture.hf_defaults}
    given |= {key: value for key, value in config.items() if value is not None or key in can_be_null}
    if base is not None:
        given["rope_theta"] = base
    numbers: dict[str, Any] = {}
    for field, key in names.items():
        value, number = given.get(key), float if field in FLOATS else int
        if value is None and field in optional:
            continue
        if isinstance(value, bool) or not isinstance(value, int | number):
            found = "is missing" if value is None else f"{value!r} is not a{' whole' * (number is int)} number"
            raise refuse(key, found, "copy the model again")
        numbers[field] = number(value)
    for field, (key, words) in _choices(architecture).items():
        meanings = [meaning for word, meaning in words.items() if type(word) is type(given[key]) and word == given[key]]
        if not meanings:
            known = " or ".join(str(word).lower() for word in words)
            raise refuse(key, f"{given[key]!r} is not {known}", f"lakh computes {architecture.hf_class} with these")
        numbers[field] = meanings[0]
    size = given.get("qk_nope_head_dim" if architecture.hf_latent else "head_dim")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
        raise refuse("head_dim", f"{size!r} is not a whole number", "copy the model again")
    if size is not None and size * numbers["heads"] != numbers["width"]:
        numbers["head_size"] = size
    share = rope.rotated_share(positions)
    if type(share) not in (int, float) or not math.isfinite(share):
        raise refuse("partial_rotary_factor", f"{share!r} is not a number", "copy the model again")
    if share != 1.0:
        numbers["rotary_size"] = int((size or numbers["width"] // max(numbers["heads"], 1)) * share)
    if scaling is not None and scaling.kind == "longrope" and scaling.original_context is not None:
        numbers["context"] = min(numbers["context"], scaling.original_context)
    if architecture.hf_latent and given.get("v_head_dim") != size:
        raise refuse("v_head_dim", f"{given.get('v_head_dim')!r} is not qk_nope_head_dim", "use another model")
    try:
        spec = Model(
            **numbers,
            experts=_experts_of(given, architecture),
            latent=_latent_of(given, architecture),
            tied=bool(given.get("tie_word_embeddings", False)),
            family=None if architecture.name in DEFAULT_FAMILIES else architecture.name,
            rope_scaling=scaling,
            query_growth=rope.query_growth_of(where, positions, FAMILIES[architecture.name]),
            **_fixed(architecture),
        )
        interval, window = _unrotated_of(given, spec.layers), _window_of(given, architecture, spec.layers)
        spec = replace(spec, sliding_window=window, unrotated_interval=interval)
        spec.require_trainable()
    except ConfigError as error:
        raise refuse(error.where, error.found, error.todo) from None
    except LakhError as error:
        raise refuse(error.where, error.found) from None
    return spec


def _present(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _experts_of(given: dict[str, Any], architecture: ModelArchitecture) -> Experts | None:
    if not architecture.hf_experts:
        return None
    values: dict[str, Any] = {}
    for field, key in architecture.hf_experts.items():
        key = key or f"experts.{field}"
        value = given.get(key, given.get(_OTHER_NAMES.get(key, "")))
        kind = {"normalize": bool, "weight_scale": float, "dense_blocks": tuple}.get(field, int)
        value = float(value) if kind is float and type(value) is int else value
        if type(value) is not kind:
            raise ConfigError(
                key, "is missing" if value is None else f"{value!r} is not {kind.__name__}", "copy it again"
            )
        values[field] = value
    return Experts(**{**_fixed_experts(architecture), **values})


def _fixed_experts(architecture: ModelArchitecture) -> dict[str, Any]:
    """Settings of experts that follow from the architecture."""
    is_normalized = bool(architecture.hf_config.get("norm_topk_prob", True))
    family = FAMILIES[architecture.name]
    return {"bias": "bias" in family.expert_options, "normalize": is_normalized, **family.fixed_experts}


def _latent_of(given: dict[str, Any], architecture: ModelArchitecture) -> Latent | None:
    values = {field: given.get(key) or 0 for field, key in architecture.hf_latent.items()}
    for field, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(architecture.hf_latent[field], f"{value!r} is not a whole number", "copy it again")
    return Latent(**values) if values else None


def _latent_config(spec: Model, architecture: ModelArchitecture) -> dict[str, Any]:
    if not architecture.hf_latent:
        return {}
    found = {key: getattr(spec.latent, field) or None for field, key in architecture.hf_latent.items()}
    return {**found, "qk_nope_head_dim": spec.head_dim, "v_head_dim": spec.head_dim, "head_dim": spec.rope_dim}


def _fixed(architecture: ModelArchitecture) -> dict[str, Any]:
    return dict(FAMILIES[architecture.name].fixed)


def _unrotated_config(spec: Model) -> dict[str, Any]:
    if "unrotated_interval" not in spec.traits.allows:
        return {}
    flags = [1 - spec.rope_kind(layer) for layer in range(spec.layers)]
    return {"no_rope_layers": flags, "no_rope_layer_interval": spec.unrotated_interval or spec.layers + 1}


def _unrotated_of(given: dict[str, Any], layers: int) -> int | None:
    """no_rope_layers has 0 for a layer without rotary positions; where it is missing, the interval decides."""
    interval, flags = given.get("no_rope_layer_interval"), given.get("no_rope_layers")
    if interval is None and flags is None:
        return None
    if flags is None:
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ConfigError(
                "no_rope_layer_interval", f"{interval!r} is not a positive number", "copy the model again"
            )
        return interval if interval <= layers else None
    if not isinstance(flags, list) or len(flags) < layers or set(flags) - {0, 1}:
        raise ConfigError("no_rope_layers", f"is not a list of 0 and 1 for {layers} layers", "copy the model again")
    if 0 not in flags[:layers]:
        return None
    interval = flags.index(0) + 1
    if flags[:layers] != [int((layer + 1) % interval != 0) for layer in range(layers)]:
        raise ConfigError(
            "no_rope_layers", "layers without positions are not at regular intervals", "use another model"
        )
    return interval


def _window_config(spec: Model, architecture: ModelArchitecture) -> dict[str, Any]:
    if architecture.hf_windows in (None, "given"):
        return {}
    tokens = None if spec.sliding_window is None else spec.sliding_window.tokens
    if architecture.hf_windows == "all":
        return {"sliding_window": tokens}
    kinds = [_FULL if spec.window(layer) is None else _WINDOWED for layer in range(spec.layers)]
    found: dict[str, Any] = {"sliding_window": tokens, "layer_types": kinds}
    if architecture.hf_windows == "late":
        first = next((layer for layer, kind in enumerate(kinds) if kind == _WINDOWED), spec.layers)
        found |= {"use_sliding_window": tokens is not None, "max_window_layers": first}
    elif tokens is None:  # transformers needs a number, also where no layer has a window
        found["sliding_window"] = spec.context
    return found


def _window_of(given: dict[str, Any], architecture: ModelArchitecture, layers: int) -> SlidingWindow | None:
    tokens, kinds = given.get("sliding_window"), given.get("layer_types")
    if architecture.hf_windows is None:
        if isinstance(kinds, list) and any(kind != _FULL for kind in kinds):
            raise ConfigError("layer_types", f"is not {_FULL} everywhere", f"lakh computes {architecture.name} with it")
        return None
    # Without the setting a family has windows, whatever a file says: transformers does not read it there.
    uses_windows = "use_sliding_window" not in architecture.hf_defaults or given["use_sliding_window"]
    if tokens is None or not uses_windows:
        return None
    first = given["max_window_layers"] if architecture.hf_windows == "late" else 0
    for key, value in (("sliding_window", tokens), ("max_window_layers", first)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(key, f"{value!r} is not a whole number", "copy the model again")
    every = 2 if architecture.hf_windows == "alternate" else 1
    default = [_WINDOWED if at >= first and at % every == 0 else _FULL for at in range(layers)]
    if architecture.hf_windows == "but_fourth":
        default = [_WINDOWED if (at + 1) % 4 else _FULL for at in range(layers)]
    if architecture.hf_windows == "but_sixth":
        pattern = given.get("sliding_window_pattern", 6)
        if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
            raise ConfigError("sliding_window_pattern", f"{pattern!r} is not a positive number", "copy the model again")
        default = [_WINDOWED if (at + 1) % pattern else _FULL for at in range(layers)]
    kinds = kinds or default
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {_WINDOWED, _FULL}:
        found = f"is not a list of {_WINDOWED} and {_FULL} for {layers} layers"
        raise ConfigError("layer_types", found, "copy the model again")
    if architecture.hf_windows == "all" and _FULL in kinds:
        raise ConfigError("layer_types", f"has {_FULL}", f"{architecture.hf_class} has windows in all layers or none")
    if _WINDOWED not in kinds:
        return None
    start = kinds.index(_WINDOWED)
    for period in range(1, layers + 1):  # every layer, every second one, five of six, ...
        for count in range(1, period + 1):
            window = SlidingWindow(tokens=tokens, share=count / period, first_layer=start or None)
            if [window.covers(layer) for layer in range(layers)] == [kind == _WINDOWED for kind in kinds]:
                return window
    raise ConfigError("layer_types", "windows and full attention do not alternate regularly", "use another model")
