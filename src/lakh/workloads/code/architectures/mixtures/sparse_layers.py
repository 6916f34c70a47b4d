"""Which layers of Qwen's mixtures have experts: every `decoder_sparse_step`-th one that is not in `mlp_only_layers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lakh.errors import ConfigError
from lakh.spec.model import Model

__all__ = ["NO_DENSE_LAYERS", "STEP", "dense_layers", "dense_layers_config", "whole_number"]

_DENSE, STEP = "mlp_only_layers", "decoder_sparse_step"
NO_DENSE_LAYERS: Mapping[str, Any] = {STEP: 1, _DENSE: []}


def dense_layers(given: Mapping[str, Any]) -> dict[str, Any]:
    """The number of leading layers without experts, and further ones."""
    step, layers = whole_number(given, STEP), whole_number(given, "num_hidden_layers")
    dense = given[_DENSE]
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise ConfigError(_DENSE, f"{dense!r} is no list of layers", "copy the model again")
    regular = [layer for layer in range(layers) if (layer + 1) % step == 0]
    wanted = [layer for layer in regular if layer not in dense]
    further = tuple(layer for layer in regular if wanted and layer > wanted[0] and layer not in wanted)
    leading = max(0, wanted[0] + 1 - step) if wanted else layers
    return {"experts.dense_layers": leading, "experts.dense_blocks": further}


def dense_layers_config(spec: Model) -> dict[str, Any]:
    """The field of config.json beside `STEP`."""
    assert spec.experts is not None
    return {_DENSE: [*range(spec.experts.dense_layers), *spec.experts.dense_blocks]}


def whole_number(given: Mapping[str, Any], key: str) -> int:
    """A positive number of a config.json."""
    value = given.get(key)
    if type(value) is not int or value < 1:
        raise ConfigError(key, f"{value!r} is not a positive number", "copy the model again")
    return value
