"""Read the tensors of a checkpoint, in any sharding."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from lakh import storage
from lakh.checkpoint.catalog import base_folder, corrupt, read_run, verify_chain
from lakh.checkpoint.chunk_hashes import coding_threads
from lakh.checkpoint.format import Manifest, StoredSlice
from lakh.checkpoint.slices import TensorSlice, dtype_name, slice_of
from lakh.checkpoint.tensor_file import RemoteTensorFile
from lakh.errors import UserError
from lakh.spec import Run

__all__ = ["CheckpointReader", "load", "read_model"]

MODEL = "model."
BLOCK_BYTES = 256 << 20  # of a tensor that are read at a time


def load(folder: str, into: Mapping[str, Tensor | TensorSlice]) -> Manifest:
    """Fill the given tensors in place; each rank reads only its slices. Names, shapes and types must match.

    An incremental checkpoint is decoded along its chain, slice by slice, by several threads.
    """
    reader = CheckpointReader(folder)
    manifest = reader.manifest
    parts = {name: slice_of(target) for name, target in into.items()}
    for name, part in parts.items():
        _check_fits(folder, manifest, name, part)

    def fill(item: tuple[str, TensorSlice]) -> None:
        name, part = item
        with torch.no_grad():  # of each thread
            reader.fill(name, part.offset, part.local)

    if manifest.base is None:
        for item in parts.items():
            fill(item)
        return manifest
    with ThreadPoolExecutor(coding_threads(), thread_name_prefix="lakh-decode") as threads:
        for _ in threads.map(fill, parts.items()):
            pass
    return manifest


def read_model(folder: str | Path) -> tuple[Run, dict[str, Tensor]]:
    """The run and the full weights on the CPU, under the model's parameter names."""
    folder = str(folder)
    manifest = verify_chain(folder)
    weights = {
        name.removeprefix(MODEL): torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        for name, stored in manifest.tensors.items()
        if name.startswith(MODEL)
    }
    load(folder, {f"{MODEL}{name}": tensor for name, tensor in weights.items()})
    return read_run(folder), weights


def _check_fits(folder: str, manifest: Manifest, name: str, target: TensorSlice) -> None:
    stored = manifest.tensors.get(name)
    wanted = (target.shape, dtype_name(target.local.dtype))
    if stored is not None and (stored.shape, stored.dtype) == wanted:
        return
    if not manifest.can_resume:
        raise UserError(folder, "holds only bf16 weights and cannot resume", "resume from a full checkpoint")
    if stored is None:
        raise UserError(folder, f"has no tensor {name}", "resume with the settings of that checkpoint")
    found = f"{name} is {stored.dtype} {list(stored.shape)}, the run has {wanted[1]} {list(wanted[0])}"
    raise UserError(folder, found, "resume with the model settings of that checkpoint")


class CheckpointReader:
    """Reads any box of any tensor of a checkpoint, through the checkpoints that it is relative to."""

    def __init__(self, folder: str) -> None:
        self.folder, self.manifest = folder, Manifest.read(folder)
        self._files = _TensorFiles(folder)
        base = base_folder(folder, self.manifest)
        self._base = CheckpointReader(base) if base else None

    def fill(self, name: str, offset: tuple[int, ...], target: Tensor) -> None:
        """Fill `target` with the box at `offset`."""
        filled = sum(self._copy_overlap(name, stored, offset, target) for stored in self.manifest.tensors[name].slices)
        if filled != target.numel():
            raise corrupt(self.folder, f"holds {filled} of {target.numel()} values of {name}")

    def _copy_overlap(self, name: str, stored: StoredSlice, offset: tuple[int, ...], target: Tensor) -> int:
        """Copy the overlap of a stored slice and the box `target` at `offset`; returns the number of values."""
        starts = [max(a, b) for a, b in zip(stored.offset, offset, strict=True)]
        ends = [min(a + n, b + m) for a, n, b, m in zip(stored.offset, stored.shape, offset, target.shape, strict=True)]
        if any(end <= start for start, end in zip(starts, ends, strict=True)):
            return 0
        boxes = list(zip(starts, ends, strict=True))
        source = tuple(slice(lo - at, hi - at) for (lo, hi), at in zip(boxes, stored.offset, strict=True))
        into = tuple(slice(lo - at, hi - at) for (lo, hi), at in zip(boxes, offset, strict=True))
        box = target[into]
        if self._base is not None:
            box.copy_(self._decode(self._base, name, stored)[source])
        elif not source:
            box.copy_(self._files.read(stored.file, name, source))
        else:  # by blocks of rows: a table in a file may be larger than memory
            block = max(1, BLOCK_BYTES * len(box) // max(1, box.nbytes))
            for at in range(0, len(box), block):
                rows = slice(source[0].start + at, min(source[0].start + at + block, source[0].stop))
                box[at : at + block].copy_(self._files.read(stored.file, name, (rows, *source[1:])))
        return box.numel()

    def _decode(self, base: CheckpointReader, name: str, stored: StoredSlice) -> Tensor:
        from lakh.checkpoint.encoding import decode

        dtype = getattr(torch, self.manifest.tensors[name].dtype)
        before = torch.empty(stored.shape, dtype=dtype)
        base.fill(name, stored.offset, before)
        data = self._files.read(stored.file, name, None)
        try:
            return decode(data.numpy(), dtype, stored.shape, before)
        except ValueError as error:
            raise corrupt(storage.join(self.folder, stored.file), f"{name} {error}") from None


class _TensorFiles:
    """The open safetensors files of one checkpoint. Local ones are memory-mapped, remote ones read by ranges."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._opened: dict[str, Any] = {}
        self._lock = threading.Lock()

    def read(self, file: str, name: str, box: tuple[slice, ...] | None) -> Tensor:
        """The slice `box` of a tensor; None: the whole tensor."""
        url = storage.join(self.folder, file)
        is_local = storage.is_local(url)
        try:
            with self._lock:
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
