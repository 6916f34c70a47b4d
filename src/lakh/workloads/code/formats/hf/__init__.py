"""Hugging Face model folders: config.json, safetensors and a tokenizer."""

from __future__ import annotations

from lakh.workloads.code.formats.hf.checkpoint import (
    INDEX,
    SHARD_BYTES,
    TOKENIZER_FILES,
    check_weights,
    load,
    save,
    shapes,
)

__all__ = ["INDEX", "SHARD_BYTES", "TOKENIZER_FILES", "check_weights", "load", "save", "shapes"]
