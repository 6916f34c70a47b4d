"""What lakh does with each model architecture: the rows of `lakh models` and of docs/reference/architectures.md."""

from __future__ import annotations

from dataclasses import dataclass

from lakh.workloads.code.architectures import architectures

__all__ = ["ArchitectureRow", "rows"]


@dataclass(frozen=True)
class ArchitectureRow:
    name: str
    """The value of `model.family`."""
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
            known.name, known.hf_class, True, True, ["hf", *(["gguf"] if known.gguf is not None else [])], True, True
        )
        for known in architectures()
    ]
