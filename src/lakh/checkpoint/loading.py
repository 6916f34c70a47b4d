"""Reading the tensors of a checkpoint.

`load` copies into given tensors, each rank only the boxes it needs; the layout they were saved in does not matter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from lakh import storage
from lakh.checkpoint.format import Manifest, Stored
from lakh.checkpoint.shelf import corrupt, local_copy, read_run, verify
from lakh.checkpoint.slices import Slice, dtype_name, slice_of
from lakh.errors import UserError
from lakh.spec import Run

__all__ = ["load", "read_model"]

MODEL = "model."


def load(folder: str, into: Mapping[str, Tensor]) -> Manifest:
    """Fill the given tensors in place. Every one of them must be in the checkpoint with its shape and type."""
    manifest = Manifest.read(folder)
    for name, target in into.items():
        _check_fits(folder, manifest, name, target)
    with _Files(folder) as files, torch.no_grad():
        for name, target in into.items():
            part = slice_of(target)
            filled = sum(_copy_overlap(files, name, stored, part) for stored in manifest.tensors[name].slices)
            if filled != part.local.numel():
                raise corrupt(folder, f"holds {filled} of {part.local.numel()} values of {name}")
    return manifest


def read_model(folder: str | Path) -> tuple[Run, dict[str, Tensor]]:
    """The run and the whole weights, by the model's own names, on the CPU."""
    folder = str(folder)
    manifest = verify(folder)
    weights = {
        name.removeprefix(MODEL): torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        for name, stored in manifest.tensors.items()
        if name.startswith(MODEL)
    }
    load(folder, {f"{MODEL}{name}": tensor for name, tensor in weights.items()})
    return read_run(folder), weights


def _check_fits(folder: str, manifest: Manifest, name: str, target: Tensor) -> None:
    stored = manifest.tensors.get(name)
    if stored is None:
        raise UserError(folder, f"has no tensor {name}", "resume with the settings that it was saved with")
    if stored.shape != tuple(target.shape) or stored.dtype != dtype_name(target.dtype):
        found = (
            f"{name} is {stored.dtype} {list(stored.shape)} there and {dtype_name(target.dtype)} "
            f"{list(target.shape)} here"
        )
        raise UserError(folder, found, "resume with the model settings that it was saved with")


def _copy_overlap(files: _Files, name: str, stored: Stored, part: Slice) -> int:
    """Copy what one stored box and our box have in common; returns the number of values."""
    starts = [max(a, b) for a, b in zip(stored.offset, part.offset, strict=True)]
    ends = [
        min(a + n, b + m) for a, n, b, m in zip(stored.offset, stored.shape, part.offset, part.local.shape, strict=True)
    ]
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return 0
    boxes = list(zip(starts, ends, strict=True))
    source = tuple(slice(lo - at, hi - at) for (lo, hi), at in zip(boxes, stored.offset, strict=True))
    target = tuple(slice(lo - at, hi - at) for (lo, hi), at in zip(boxes, part.offset, strict=True))
    values = files.read(stored.file, name, source)
    part.local[target].copy_(values)
    return values.numel()


class _Files:
    """Opened safetensors files of one checkpoint; remote ones are fetched into a temporary folder first."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._opened: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.clear()
        self._stack.close()

    def read(self, file: str, name: str, box: tuple[slice, ...]) -> Tensor:
        try:
            if file not in self._opened:
                path = self._stack.enter_context(local_copy(storage.join(self.folder, file)))
                self._opened[file] = safetensors.safe_open(path, framework="pt")
            if not box:
                return self._opened[file].get_tensor(name)
            return self._opened[file].get_slice(name)[box]
        except (safetensors.SafetensorError, OSError) as error:
            raise corrupt(storage.join(self.folder, file), f"cannot be read ({error})") from None
