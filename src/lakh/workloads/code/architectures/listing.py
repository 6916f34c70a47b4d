"""What lakh does with each model architecture: rows of `lakh models`, the README and the reference."""

from __future__ import annotations

from dataclasses import dataclass

from lakh.spec.model import FAMILIES
from lakh.workloads.code.architectures import architectures

__all__ = ["ArchitectureRow", "rows"]


@dataclass(frozen=True)
class ArchitectureRow:
    name: str
    """The value of `model.family`."""
    models: str
    """Published models of it."""
    hugging_face: str
    """Its class in transformers."""
    trains: bool
    serves: bool
    exports: list[str]
    """Formats of `lakh export`."""
    plans: bool
    fim: bool
    """Fill-in-the-middle requests are served, if the tokenizer has the tokens for them."""


def rows() -> list[ArchitectureRow]:
    return [
        ArchitectureRow(
            name=known.name,
            models=FAMILIES[known.name].models,
            hugging_face=known.hf_class,
            trains=True,
            serves=True,
            exports=["hf", *(["gguf"] if known.gguf is not None else [])],
            plans=True,
            fim=True,
        )
        for known in architectures()
    ]
