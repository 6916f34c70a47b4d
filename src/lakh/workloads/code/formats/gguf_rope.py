"""Rotary positions in a GGUF file: keys of the scaling, or a tensor with a divisor for each frequency (Llama 3).

llama.cpp's YaRN has 32 and 1 as the numbers of rotations between which it interpolates, and rounds the bounds to whole
dims; models that differ are refused when they are written. GPT-OSS does not round, whatever a file says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from lakh.errors import ConfigError, UserError
from lakh.spec.model import Model, RopeScaling

__all__ = ["FACTORS", "KEYS", "LONG_FACTORS", "SHORT_FACTORS", "factors_of", "keys_of", "longrope_of", "scaling_of"]

FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"  # of longrope
KEYS = (
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)
"""All that a file may have, after the name of the architecture."""
_LOG_UNIT = 0.1  # of YaRN's factor: 0.1 ln(factor) + 1
_KNOWN_LLAMA3 = ((8192, 1.0, 4.0), (8192, 1.0, 1.0))  # (original context, low, high) of Llama 3.1 to 3.3, of Llama 4
_TOLERANCE = 1e-3
HF = "export it with --format hf"


def keys_of(spec: Model, architecture: str) -> dict[str, Any]:
    """The keys that describe the scaling of a model; a UserError for one that llama.cpp does not compute."""
    scaling = spec.rope_scaling
    if scaling is None:
        return {}
    if scaling.kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
    if scaling.kind == "llama3":
        if architecture not in ("llama", "llama4"):
            raise UserError("model.rope_scaling", f"llama.cpp does not compute llama3 for {architecture}", HF)
        return {}
    if scaling.kind == "longrope":
        assert scaling.original_context is not None
        usual = math.sqrt(1 + math.log(max(scaling.factor, 1.0)) / math.log(scaling.original_context))
        return {
            "context_length": round(scaling.factor * scaling.original_context),
            "rope.scaling.original_context_length": scaling.original_context,
            "rope.scaling.attn_factor": scaling.attention_factor or usual,
        }
    if (scaling.beta_fast, scaling.beta_slow) != (32.0, 1.0):
        found = f"llama.cpp has 32 and 1, the model {scaling.beta_fast:g} and {scaling.beta_slow:g}"
        raise UserError("model.rope_scaling.beta_fast, beta_slow", found, HF)
    if not scaling.truncate and architecture != "gpt-oss":
        raise UserError("model.rope_scaling.truncate", "is false; llama.cpp rounds to whole dims", HF)
    usual = _LOG_UNIT * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(scaling.factor),
        "rope.scaling.original_context_length": scaling.original_context,
    }
    if spec.latent is not None:
        if scaling.score_factor is None or scaling.attention_factor != 1.0:
            raise UserError("model.rope_scaling", "llama.cpp scales the scores of latent attention instead", HF)
        multiplier = (math.sqrt(scaling.score_factor) - 1) / math.log(scaling.factor)
        return {**keys, "rope.scaling.yarn_log_multiplier": multiplier}
    if architecture == "mistral3" and scaling.attention_factor == 1.0:  # as its published files say it
        return {**keys, "rope.scaling.yarn_log_multiplier": 1.0}
    if scaling.attention_factor is not None:
        keys["rope.scaling.attn_factor"] = scaling.attention_factor / usual
    return keys


def scaling_of(where: str, spec: Model, keys: Mapping[str, Any], factors: np.ndarray | None) -> RopeScaling | None:
    """How the frequencies of `spec`, a model without scaling, are scaled; `keys` lack the architecture."""

    def refuse(found: str) -> UserError:
        return UserError(f"rope.scaling ({where})", found, "lakh computes linear, yarn, llama3 and unscaled positions")

    kind = keys.get("rope.scaling.type", "linear")
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    if kind not in ("none", "linear", "yarn"):
        raise refuse(f"is {kind!r}")
    if not isinstance(factor, int | float) or factor <= 0:
        raise refuse(f"has the factor {factor!r}")
    if factors is not None and not np.allclose(factors, 1):
        if kind == "yarn" or factor != 1:
            raise refuse(f"is {kind!r} and has {FACTORS} as well")
        found = _llama3_of(spec, factors.astype(np.float64))
        if found is None:
            raise refuse(f"has divisors in {FACTORS} that are not those of Llama 3")
        return found
    if kind == "none" or factor == 1:
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=float(factor))
    usual = _LOG_UNIT * math.log(factor) + 1 if factor > 1 else 1.0
    attention, score = keys.get("rope.scaling.attn_factor"), None
    attention_factor = None if attention in (None, 1.0) else float(attention) * usual
    multiplier = keys.get("rope.scaling.yarn_log_multiplier")
    if spec.latent is None and multiplier and factor > 1:
        attention_factor = (attention_factor or usual) / (_LOG_UNIT * float(multiplier) * math.log(factor) + 1)
    if spec.latent is not None:
        if not multiplier:
            raise refuse("is 'yarn' without yarn_log_multiplier")
        mscale = round(float(multiplier) / _LOG_UNIT, 6)
        attention_factor, score = 1.0, (_LOG_UNIT * mscale * math.log(factor) + 1.0) ** 2
    try:
        return RopeScaling(
            kind="yarn",
            factor=float(factor),
            original_context=keys.get("rope.scaling.original_context_length", spec.context),
            beta_fast=float(keys.get("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(keys.get("rope.scaling.yarn_beta_slow", 1.0)),
            truncate=spec.family_name != "gpt_oss",
            attention_factor=attention_factor,
            score_factor=score,
        )
    except ConfigError as error:
        raise refuse(f"{error.where} {error.found}") from None


def longrope_of(
    where: str, spec: Model, keys: Mapping[str, Any], short: np.ndarray | None, long: np.ndarray | None
) -> Model:
    """`spec`, a model without scaling, with the divisors of both tensors, within its original context."""
    original = keys.get("rope.scaling.original_context_length")
    if short is None or long is None or not isinstance(original, int):
        found = f"needs {SHORT_FACTORS}, {LONG_FACTORS} and rope.scaling.original_context_length, and one is missing"
        raise UserError(f"rope.scaling ({where})", found, "use another file")
    factor = spec.context / original
    usual = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original))
    attention = keys.get("rope.scaling.attn_factor")
    scaling = RopeScaling(
        kind="longrope",
        factor=factor,
        original_context=original,
        attention_factor=None if attention is None or math.isclose(attention, usual, rel_tol=1e-6) else attention,
        short_factors=tuple(float(str(number)) for number in short.astype(np.float32)),
        long_factors=tuple(float(str(number)) for number in long.astype(np.float32)),
    )
    return replace(spec, rope_scaling=scaling, context=min(spec.context, original))


def factors_of(spec: Model) -> dict[str, np.ndarray]:
    """The tensors with divisors of frequencies: of Llama 3, and of longrope."""
    scaling = spec.rope_scaling
    if scaling is not None and scaling.kind == "longrope":
        lists = {SHORT_FACTORS: scaling.short_factors, LONG_FACTORS: scaling.long_factors}
        return {name: np.array(numbers, np.float32) for name, numbers in lists.items()}
    if scaling is None or scaling.kind != "llama3":
        return {}
    assert scaling.original_context is not None
    return {FACTORS: _divisors(spec, scaling)}


def _turns(spec: Model) -> np.ndarray:
    """Rotations per token of each frequency."""
    exponents = np.arange(0, spec.head_dim, 2, dtype=np.float64) / spec.head_dim
    return spec.rope_base**-exponents / (2 * math.pi)


def _divisors(spec: Model, scaling: RopeScaling) -> np.ndarray:
    assert scaling.original_context is not None
    turns = scaling.original_context * _turns(spec)
    between = max(scaling.high_frequency - scaling.low_frequency, 1e-9)  # they may be equal
    smooth = ((turns - scaling.low_frequency) / between).clip(0, 1)
    found: np.ndarray = (1 / ((1 - smooth) / scaling.factor + smooth)).astype(np.float32)
    return found


def _llama3_of(spec: Model, factors: np.ndarray) -> RopeScaling | None:
    """A scaling with these divisors. They determine what is computed, but not each of its settings: those of the
    published models are tried first, then the low frequency is taken as 1."""
    if len(factors) != spec.head_dim // 2 or not np.isfinite(factors).all() or factors.min() < 1 - _TOLERANCE:
        return None
    factor = round(float(factors.max()), 6)
    turns = _turns(spec)
    smooth = (1 / factors - 1 / factor) / (1 - 1 / factor)
    between = (smooth > _TOLERANCE) & (smooth < 1 - _TOLERANCE)
    candidates = list(_KNOWN_LLAMA3)
    if between.sum() >= 2:
        slope, start = np.polyfit(turns[between], smooth[between], 1)
        if start < 0:
            candidates.append((round(-slope / start), 1.0, round(float(1.0 - 1 / start), 4)))
    elif between.any():  # one frequency: fix the usual ratio of 4
        at = int(np.argmax(between))
        candidates.append((round((1 + 3 * smooth[at]) / turns[at]), 1.0, 4.0))
    else:
        last = int((smooth >= 0.5).sum())
        if 0 < last < len(turns):
            candidates.append((round(2 / math.sqrt(turns[last - 1] * turns[last])), 1.0, 4.0))
    for original, low, high in candidates:
        scaling = RopeScaling(
            kind="llama3",
            factor=factor,
            original_context=max(original, 1),
            low_frequency=low,
            high_frequency=max(high, low),
        )
        if np.allclose(_divisors(spec, scaling), factors, rtol=_TOLERANCE):
            return scaling
    return None
