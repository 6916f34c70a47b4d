"""Other files of the repository that a request sends along (`input_extra`, llama.cpp's name)."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ExtraFile"]


class ExtraFile(NamedTuple):
    name: str
    """Its path; may be empty."""
    text: str
