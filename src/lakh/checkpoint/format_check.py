"""Checks of the values that a manifest is read from. A manifest may have been damaged or edited: nothing is trusted.

A failed check raises ValueError with the path of the field and what was found there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from lakh import storage

__all__ = ["DTYPES", "ManifestField", "check_tiling"]

DTYPES = frozenset(
    {"float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"}
)  # the types that tensor_file.py writes, by torch's names
LARGEST = 1 << 62
"""Larger numbers overflow when sizes are multiplied by the size of an element."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The offset and shape of a slice."""


class ManifestField:
    """A value inside a manifest and the path to it."""

    def __init__(self, path: str, value: Any) -> None:
        self.path, self.value = path, value

    def __contains__(self, key: str) -> bool:
        return key in self._dict()

    def __getitem__(self, key: str) -> ManifestField:
        if key not in self._dict():
            raise ValueError(f"{self.path} has no {key}")
        return ManifestField(f"{self.path}.{key}".removeprefix("manifest."), self.value[key])

    def items(self) -> Iterator[tuple[str, ManifestField]]:
        return ((key, self[key]) for key in self._dict())

    def elements(self) -> list[ManifestField]:
        if not isinstance(self.value, list):
            raise ValueError(f"{self.path} is {_shown(self.value)}, not a list")
        return [ManifestField(f"{self.path}[{at}]", value) for at, value in enumerate(self.value)]

    def require_keys(self, keys: set[str], *, optional: set[str] | None = None) -> None:
        for key in sorted(keys - self._dict().keys()):
            raise ValueError(f"{self.path} has no {key}")
        for key in sorted(self._dict().keys() - keys - (optional or set())):
            raise ValueError(f"{self.path} has the unknown key {_shown(key)}")

    def count(self, *, at_least: int = 0) -> int:
        value = self.value
        if type(value) is not int or not at_least <= value < LARGEST:  # True is an int too
            raise ValueError(f"{self.path} is {_shown(value)}, not a number from {at_least} on")
        return value

    def counts(self) -> tuple[int, ...]:
        return tuple(element.count() for element in self.elements())

    def number(self) -> float:
        if type(self.value) not in (int, float) or not self.value >= 0:  # rejects NaN too
            raise ValueError(f"{self.path} is {_shown(self.value)}, not a number from 0 on")
        return float(self.value)

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise ValueError(f"{self.path} is {_shown(self.value)}, not a string")
        return self.value

    def sha256(self) -> str:
        if not _SHA256.fullmatch(self.text()):
            raise ValueError(f"{self.path} is {_shown(self.value)}, not a SHA-256")
        return self.text()

    def dtype(self) -> str:
        if self.text() not in DTYPES:
            raise ValueError(f"{self.path} is {_shown(self.value)}, not a type of numbers")
        return self.text()

    def require_file_name(self, name: str) -> None:
        """A file in the folder of the checkpoint: no path, and not the manifest."""
        if not _FILE_NAME.fullmatch(name) or name == storage.MANIFEST:
            raise ValueError(f"files names {_shown(name)}, which is not a file of a checkpoint")

    def _dict(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise ValueError(f"{self.path} is {_shown(self.value)}, not an object")
        return self.value


def check_tiling(where: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raise ValueError unless the boxes lie in the shape and cover each value exactly once."""
    covered = 0
    for offset, size in boxes:
        fits = len(offset) == len(size) == len(shape)
        if not fits or any(at + count > whole for at, count, whole in zip(offset, size, shape, strict=True)):
            raise ValueError(f"{where} has a slice {list(size)} at {list(offset)} outside its shape {list(shape)}")
        covered += math.prod(size)
    if covered != math.prod(shape):
        raise ValueError(f"{where} has slices of {covered:,} of its {math.prod(shape):,} values")
    if shape:
        _check_apart(where, boxes)


def _check_apart(where: str, boxes: Sequence[Box]) -> None:
    """Sweep along the first dim; only boxes that overlap there are compared, which are few when rows are sharded."""
    active: list[Box] = []
    for box in sorted((box for box in boxes if math.prod(box[1])), key=lambda box: box[0]):
        active = [other for other in active if other[0][0] + other[1][0] > box[0][0]]
        for other in active:
            if all(max(a, b) < min(a + n, b + m) for a, n, b, m in zip(*other, *box, strict=True)):
                raise ValueError(f"{where} has slices that overlap at {list(box[0])}")
        active.append(box)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
