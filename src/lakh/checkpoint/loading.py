"""Read the tensors of a checkpoint, in any sharding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from lakh import storage
from lakh.checkpoint.catalog import corrupt, read_run, verify
from lakh.checkpoint.format import Manifest, StoredSlice
from lakh.checkpoint.slices import TensorSlice, dtype_name, slice_of
from lakh.checkpoint.tensor_file import RemoteTensorFile
from lakh.errors import UserError
from lakh.spec import Run

__all__ = ["load", "read_model"]

MODEL = "model."


def load(folder: str, into: Mapping[str, Tensor]) -> Manifest:
    """Fill the given tensors in place; each rank reads only its slices. Names, shapes and types must match."""
    manifest = Manifest.read(folder)
    for name, target in into.items():
        _check_fits(folder, manifest, name, target)
    with _TensorFiles(folder) as files, torch.no_grad():
        for name, target in into.items():
            part = slice_of(target)
            filled = sum(_copy_overlap(files, name, stored, part) for stored in manifest.tensors[name].slices)
            if filled != part.local.numel():
                raise corrupt(folder, f"holds {filled} of {part.local.numel()} values of {name}")
    return manifest


def read_model(folder: str | Path) -> tuple[Run, dict[str, Tensor]]:
    """The run and the full weights on the CPU, under the model's parameter names."""
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
        raise UserError(folder, f"has no tensor {name}", "resume with the settings of that checkpoint")
    if stored.shape != tuple(target.shape) or stored.dtype != dtype_name(target.dtype):
        found = (
            f"{name} is {stored.dtype} {list(stored.shape)}, the run has {dtype_name(target.dtype)} "
            f"{list(target.shape)}"
        )
        raise UserError(folder, found, "resume with the model settings of that checkpoint")


def _copy_overlap(files: _TensorFiles, name: str, stored: StoredSlice, part: TensorSlice) -> int:
    """Copy the overlap of a stored slice and `part`; returns the number of values."""
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


class _TensorFiles:
    """The open safetensors files of one checkpoint. Local ones are memory-mapped, remote ones read by ranges."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._opened: dict[str, Any] = {}

    def __enter__(self) -> _TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.clear()

    def read(self, file: str, name: str, box: tuple[slice, ...]) -> Tensor:
        url = storage.join(self.folder, file)
        is_local = storage.is_local(url)
        try:
            if file not in self._opened:
                self._opened[file] = (
                    safetensors.safe_open(str(storage.local_path(url)), framework="pt")
                    if is_local
                    else RemoteTensorFile(url)
                )
            if not is_local:
                return self._opened[file].read(name, box)
            if not box:
                return self._opened[file].get_tensor(name)
            return self._opened[file].get_slice(name)[box]
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise corrupt(url, f"cannot be read ({error})") from None
