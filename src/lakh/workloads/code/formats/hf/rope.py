"""Rotary positions in a config.json: rope_theta, and rope_parameters (transformers 5) or rope_scaling (4)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lakh.errors import ConfigError, UserError
from lakh.spec.model import Model, ModelFamily, RopeScaling

__all__ = ["config_of", "query_growth_of", "rotated_share", "scaling_of", "whole_context", "with_local_base"]

_KEYS = {
    "factor": "factor",
    "original_context": "original_max_position_embeddings",
    "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "score_factor": "",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}
"""Fields of RopeScaling and their names in config.json."""
_MSCALE = ("mscale", "mscale_all_dim")
_GROWTH = "llama_4_scaling_beta"
"""The name of query_growth."""
_FULL, _LOCAL = "full_attention", "sliding_attention"
_LISTS = ("short_factors", "long_factors")
_USED = {
    "linear": ("factor",),
    "llama3": ("factor", "original_context", "low_frequency", "high_frequency"),
    "yarn": ("factor", "original_context", "beta_fast", "beta_slow", "truncate", "attention_factor"),
    "longrope": ("factor", "original_context", "attention_factor", *_LISTS),
}


def config_of(spec: Model) -> dict[str, Any]:
    found = _config_of_all(spec)
    if "query_growth" in spec.traits.allows and not spec.traits.grows_unrotated:
        if spec.rope_scaling is None or spec.rope_scaling.original_context is None:
            missing = "has no original_context, from which on transformers multiplies queries"
            raise UserError("model.rope_scaling", missing, "set it; lakh serves the run itself")
        for table in found.values():
            table[_GROWTH] = spec.query_growth or 0.0
    if "local_rope_base" not in spec.traits.allows:
        return found
    if spec.local_rope_base is None and spec.rope_scaling is not None:
        missing = "is missing, and rope_scaling is not; transformers scales positions of layers without a window only"
        raise UserError("model.local_rope_base", missing, "set it; lakh serves the run itself")
    local = {"rope_type": "default", "rope_theta": spec.local_rope_base or spec.rope_base}
    return {**found, "rope_parameters": {_FULL: found["rope_parameters"], _LOCAL: local}}


def _config_of_all(spec: Model) -> dict[str, Any]:
    """Of layers with the model's own base."""
    scaling = spec.rope_scaling
    share = {}
    if "rotary_size" in spec.traits.allows:
        share["partial_rotary_factor"] = spec.rotated_dim / spec.head_dim
    if scaling is None:
        table: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_base}
        return {"rope_scaling": None, "rope_parameters": {**table, **share}, **share}
    if scaling.kind == "longrope":
        return {**_longrope_config(spec, scaling, share), **share}
    values = {_KEYS[name]: getattr(scaling, name) for name in _USED[scaling.kind]}
    if scaling.score_factor is not None:  # the square of 0.1 mscale_all_dim ln(factor) + 1
        mscale = (scaling.score_factor**0.5 - 1) / (0.1 * math.log(scaling.factor))
        values |= {"mscale": mscale, "mscale_all_dim": mscale}
    table = {"rope_type": scaling.kind, **{key: value for key, value in values.items() if value is not None}}
    return {"rope_scaling": table, "rope_parameters": {**table, "rope_theta": spec.rope_base, **share}, **share}


def whole_context(spec: Model) -> int:
    """With longrope, also texts for which lakh does not compute the frequencies."""
    scaling = spec.rope_scaling
    if scaling is None or scaling.kind != "longrope" or scaling.original_context is None:
        return spec.context
    return round(scaling.factor * scaling.original_context)


def _longrope_config(spec: Model, scaling: RopeScaling, share: dict[str, Any]) -> dict[str, Any]:
    """transformers before 5 takes a table of three fields in rope_scaling, and the rest from the config itself."""
    table: dict[str, Any] = {_KEYS[name]: list(getattr(scaling, name)) for name in _LISTS}
    if scaling.attention_factor is not None:
        table["attention_factor"] = scaling.attention_factor
    original = {"original_max_position_embeddings": scaling.original_context}
    return {
        "rope_scaling": {"type": "longrope", **table},
        "rope_parameters": {"rope_type": "longrope", "rope_theta": spec.rope_base, **table, **original, **share},
        "max_position_embeddings": whole_context(spec),
        **original,
    }


def with_local_base(where: str, config: dict[str, Any]) -> dict[str, Any]:
    """The config with one table of positions, that of layers with full attention, and the base of the others in
    rope_local_base_freq. Files of transformers 5 have two tables, older ones the fields of both kinds of layers."""
    tables, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not isinstance(tables, dict) or set(tables) - {_FULL, _LOCAL} or not isinstance(scaling, dict):
        found = f"is {tables!r}, and not a table each for {_FULL} and {_LOCAL}"
        raise UserError(f"rope_parameters ({where})", found, "copy the model again")
    full, local = tables.get(_FULL) or {}, tables.get(_LOCAL) or {}
    if not isinstance(full, dict) or not isinstance(local, dict):
        raise UserError(f"rope_parameters ({where})", f"is {tables!r}", "copy the model again")
    if local.get("rope_type", "default") != "default":
        found = f"{_LOCAL} is {local['rope_type']!r}; lakh scales positions of layers without a window only"
        raise UserError(f"rope_parameters ({where})", found, "use another model")
    bases = {"rope_theta": full.get("rope_theta"), "rope_local_base_freq": local.get("rope_theta")}
    given = {name: base for name, base in bases.items() if base is not None}
    return {**config, "rope_scaling": None, "rope_parameters": {**full, **scaling}, **given}


def _table(config: dict[str, Any]) -> Any:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}  # transformers prefers them in this order


def rotated_share(config: dict[str, Any]) -> Any:
    """The share of a head that is rotated."""
    table = _table(config)
    inner = table.get("partial_rotary_factor") if isinstance(table, dict) else None
    return config.get("partial_rotary_factor", 1.0) if inner is None else inner


def query_growth_of(where: str, config: dict[str, Any], family: ModelFamily) -> float | None:
    if "query_growth" not in family.allows:
        return None
    key = "attn_scale" if family.grows_unrotated else _GROWTH
    growth = (config if family.grows_unrotated else _table(config)).get(key)
    if growth is not None and (isinstance(growth, bool) or not isinstance(growth, int | float)):
        raise UserError(f"{key} ({where})", f"is {growth!r}, and not a number", "copy the model again")
    return growth or None


def scaling_of(where: str, config: dict[str, Any], family: ModelFamily) -> tuple[float | None, RopeScaling | None]:
    """(rope_theta where the table has it, how frequencies are scaled)."""

    def refuse(found: str, todo: str = "") -> UserError:
        known = ", ".join((*family.rope_scalings, "unscaled"))
        return UserError(f"rope_parameters ({where})", found, todo or f"lakh computes these positions of it: {known}")

    table = _table(config)
    if not isinstance(table, dict):
        raise refuse(f"{table!r} is not a table")
    if any(isinstance(value, dict) for value in table.values()):
        raise refuse("kinds of layers have positions of their own")
    kind = table.get("rope_type", table.get("type", "default"))
    partial = rotated_share(config)
    if "longrope" in family.rope_scalings and kind in ("su", "yarn"):  # as transformers reads older files
        kind = "longrope"
    if (partial != 1.0 and "rotary_size" not in family.allows) or kind not in ("default", *family.rope_scalings):
        raise refuse(f"positions are scaled ({kind}{'' if partial == 1.0 else f', a share of {partial} of a head'})")
    if kind == "default":
        return table.get("rope_theta"), None
    values = {name: table.get(_KEYS[name]) for name in _USED[kind]}
    for name in _LISTS if kind == "longrope" else ():
        divisors = values[name]
        if not isinstance(divisors, list) or any(type(number) not in (int, float) for number in divisors):
            raise refuse(f"{_KEYS[name]} is not a list of numbers", "copy the model again")
        values[name] = tuple(float(str(np.float32(number))) for number in divisors)
    numbers = {_KEYS[name]: value for name, value in values.items() if name not in (*_LISTS, "truncate")}
    numbers |= {key: table.get(key) for key in _MSCALE}
    outer = {key: config.get(key) for key in ("original_max_position_embeddings", "max_position_embeddings")}
    for key, value in (*numbers.items(), *outer.items()):
        if value is not None and not (type(value) in (int, float) and math.isfinite(value)):
            raise refuse(f"{key} is {value!r}", "copy the model again")
    if values["factor"] is not None and values["factor"] <= 0:
        raise refuse(f"factor is {values['factor']!r}", "copy the model again")
    original = config.get("original_max_position_embeddings") or values.get("original_context")
    if "original_context" in values:  # transformers takes that of the config first
        values["original_context"] = original
    whole = config.get("max_position_embeddings")
    if kind in ("longrope", "yarn") and values["factor"] is None and original and whole:
        values["factor"] = whole / original
    if kind == "yarn":
        if table.get("truncate", True) is None:  # null is false in transformers, and not an omitted field
            values["truncate"] = False
        values["original_context"] = original or whole
        above, below = (table.get(key) for key in _MSCALE)
        if values["attention_factor"] is None and above and below and values["factor"]:
            log_factor = 0.1 * math.log(values["factor"])
            values["attention_factor"] = (above * log_factor + 1.0) / (below * log_factor + 1.0)
        if below and values["factor"] and config.get("kv_lora_rank"):
            values["score_factor"] = (0.1 * below * math.log(values["factor"]) + 1.0) ** 2
    if not isinstance(values.get("truncate"), bool | None):
        raise refuse(f"truncate is {values['truncate']!r}", "copy the model again")
    if values["factor"] is None:
        raise refuse("has no factor", "copy the model again")
    try:
        return table.get("rope_theta"), RopeScaling(
            kind=kind, **{name: value for name, value in values.items() if value is not None}
        )
    except ConfigError as error:
        raise refuse(f"{error.where} {error.found}", error.todo) from None
