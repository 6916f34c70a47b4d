"""The language model inside a Hugging Face checkpoint that also sees images: its config and its tensors.

    config.json   text_config: the config of the language model
    tensors       language_model.model.layers.0..., language_model.lm_head.weight     transformers 4
                  model.language_model.layers.0..., lm_head.weight                    transformers 5

What is left out are the tensors of vision.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lakh.errors import UserError

__all__ = ["config_of", "has_images", "tensors_of"]

log = logging.getLogger(__name__)

_KINDS = {
    "gemma3": {"gemma3_text": "gemma3_text"},
    "llama4": {"llama4_text": "llama4_text"},
    "mistral3": {"mistral": "mistral", "ministral3": "ministral3"},
    "qwen3_vl": {"qwen3_vl_text": "qwen3"},
}
"""By the model_type of the whole: the model_type of its text_config, and that of the same language model by itself. In
Qwen3-VL the positions of a text are those of Qwen3."""
_PREFIX = re.compile(r"model\.language_model\.|language_model\.model\.")
_VISION = re.compile(r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector)\.")


def has_images(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in tuple(_KINDS)  # not in the dict itself: a damaged file may have a list there


def config_of(where: str, config: dict[str, Any]) -> dict[str, Any]:
    """The config of the language model; that of a model without images as it is."""
    if not has_images(config):
        return config
    text, kinds = config.get("text_config"), _KINDS[config["model_type"]]
    kind = text.get("model_type") if isinstance(text, dict) else None
    if not isinstance(text, dict) or not isinstance(kind, str) or kind not in kinds:
        found = f"has model_type {kind!r}"
        raise UserError(f"text_config ({where})", found, f"lakh loads {' and '.join(kinds)} in {config['model_type']}")
    outer = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
    return {**text, **outer, "model_type": kinds[kind], "architectures": None}


def tensors_of(where: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the language model, by the names that it has alone."""
    found = {name: tensor for name, tensor in tensors.items() if not _VISION.match(name)}
    if len(found) < len(tensors):
        log.warning("%s: left out %d tensors of vision; lakh takes text only", where, len(tensors) - len(found))
    found = {_PREFIX.sub("model.", name, count=1): tensor for name, tensor in found.items()}
    return {name.removeprefix("language_model."): tensor for name, tensor in found.items()}
