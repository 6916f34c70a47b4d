"""Finding, checking and reading checkpoints.

`load` copies into given tensors, each rank only the boxes it needs; the layout they were saved in does not matter.
A file whose size or hash is not that of the manifest is a CorruptCheckpoint; `newest_usable` then passes on to the
one before and says why.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from lakh import storage
from lakh.checkpoint.format import Manifest, Slice, Stored, dtype_name, slice_of, step_of
from lakh.errors import CorruptCheckpoint, DataError, LakhError, UserError
from lakh.spec import Run, load_run

__all__ = ["find", "list_complete", "load", "newest_usable", "read_model", "read_run", "verify"]

CHECKPOINTS = "checkpoints"
MODEL = "model."


def list_complete(run_dir: str | Path) -> list[tuple[int, str]]:
    """(step, folder) of every complete checkpoint of a run, oldest first."""
    base = storage.join(run_dir, CHECKPOINTS)
    found = [(step_of(name), storage.join(base, name)) for name in storage.list_dir(base)]
    return sorted((step, url) for step, url in found if step is not None and storage.is_complete(url))


def find(path: str | Path) -> str:
    """The checkpoint that a person means: a checkpoint's own folder, or the newest complete one of a run."""
    if storage.is_complete(path):
        return str(path)
    complete = list_complete(path)
    if complete:
        return complete[-1][1]
    found = "holds no complete checkpoint" if storage.exists(path) else "no such folder"
    raise UserError(str(path), found, "give a run's folder or a checkpoint's, or train first: lakh train")


def verify(folder: str, *, hashes: bool = True) -> Manifest:
    """Check that every file is there, whole and unchanged; returns the manifest."""
    manifest = Manifest.read(folder)
    for name, entry in manifest.files.items():
        url = storage.join(folder, name)
        if not storage.exists(url):
            raise _corrupt(url, "is missing")
        if storage.is_local(url):
            size = storage.local_path(url).stat().st_size
            if size != entry["bytes"]:
                raise _corrupt(url, f"has {size:,} bytes and should have {entry['bytes']:,}")
        if hashes and storage.sha256(url) != entry["sha256"]:
            raise _corrupt(url, "does not match its hash")
    return manifest


def newest_usable(run_dir: str | Path) -> tuple[str | None, list[DataError]]:
    """The newest checkpoint that is whole, and the damaged ones that were passed over on the way."""
    passed: list[DataError] = []
    for _, folder in reversed(list_complete(run_dir)):
        try:
            verify(folder)
        except DataError as error:
            passed.append(error)
            continue
        return folder, passed
    return None, passed


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
                raise _corrupt(folder, f"holds {filled} of {part.local.numel()} values of {name}")
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


def read_run(folder: str | Path) -> Run:
    """The settings that a checkpoint was saved with."""
    with _local_copy(storage.join(folder, "run.toml")) as path:
        return load_run(path)


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
                path = self._stack.enter_context(_local_copy(storage.join(self.folder, file)))
                self._opened[file] = safetensors.safe_open(path, framework="pt")
            if not box:
                return self._opened[file].get_tensor(name)
            return self._opened[file].get_slice(name)[box]
        except (safetensors.SafetensorError, OSError) as error:
            raise _corrupt(storage.join(self.folder, file), f"cannot be read ({error})") from None


@contextlib.contextmanager
def _local_copy(url: str) -> Iterator[str]:
    if storage.is_local(url):
        yield str(storage.local_path(url))
        return
    with tempfile.TemporaryDirectory(prefix="lakh-checkpoint-") as folder:
        path = Path(folder) / url.rpartition("/")[2]
        path.write_bytes(storage.read_bytes(url))
        yield str(path)


def _corrupt(where: str, found: str) -> LakhError:
    return CorruptCheckpoint(where, found, "resume from an earlier checkpoint (lakh checkpoint list shows them)")
