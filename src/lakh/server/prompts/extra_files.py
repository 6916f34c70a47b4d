"""Other files of the repository that a request sends along (`input_extra`, llama.cpp's name)."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import NamedTuple

__all__ = ["ExtraFile"]

HASH_COMMENTS = (".py", ".pyi", ".sh", ".rb", ".toml", ".yaml", ".yml", ".r", ".pl", ".ex", ".exs", ".nix", ".jl", "")
DASH_COMMENTS = (".lua", ".sql", ".hs", ".elm", ".adb", ".ads")


class ExtraFile(NamedTuple):
    name: str
    """Its path; may be empty."""
    text: str

    @property
    def name_comment(self) -> str:
        """The path as a comment of its language: for models that have no separator of files."""
        extension = PurePosixPath(self.name).suffix.lower()
        marker = "#" if extension in HASH_COMMENTS else "--" if extension in DASH_COMMENTS else "//"
        return f"{marker} {self.name}"
