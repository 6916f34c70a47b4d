"""Writing a checkpoint: every rank its slices, then one rank the manifest.

Cost: each distinct slice is written once, by the first rank that holds it. Fails with DiskFull or PeerLost; until the
manifest is there the folder counts for nothing, and the next save of that step starts over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from lakh import __version__, storage
from lakh.checkpoint.format import Manifest, Slice, Stored, StoredTensor, dtype_name, slice_of

__all__ = ["save"]


def save(
    folder: str,
    tensors: Mapping[str, Tensor],
    *,
    step: int,
    sequence_index: int,
    run_sha256: str,
    data_sha256: str,
    attachments: Mapping[str, bytes],
    rank: int = 0,
    world: int = 1,
    gather: Callable[[Any], list[Any] | None] = lambda value: [value],
) -> Manifest | None:
    """Write `tensors` and, on rank 0, the attachments and the manifest, which is returned there (None elsewhere).

    `gather` brings one value of each rank to rank 0 and returns None elsewhere; it is called exactly once.
    """
    held = {name: slice_of(tensor) for name, tensor in tensors.items()}
    mine = {name: part for name, part in held.items() if part.writes and (rank == 0 or _is_cut(part))}
    file = f"rank-{rank:05d}.safetensors"
    data = safetensors.torch.save({name: part.local.detach().cpu().contiguous() for name, part in mine.items()})
    storage.make_dir(folder)
    storage.write_bytes(storage.join(folder, file), data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    boxes = {name: (part.offset, tuple(part.local.shape)) for name, part in mine.items()}
    gathered = gather((file, entry, boxes))
    if gathered is None:
        return None
    files = {name: entry for name, entry, _ in gathered}
    for name, content in attachments.items():
        storage.write_bytes(storage.join(folder, name), content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = Manifest(
        step=step,
        sequence_index=sequence_index,
        run_sha256=run_sha256,
        data_sha256=data_sha256,
        world=world,
        files=files,
        tensors={
            name: StoredTensor(
                dtype_name(part.local.dtype),
                part.shape,
                tuple(Stored(file, *boxes[name]) for file, _, boxes in gathered if name in boxes),
            )
            for name, part in held.items()
        },
        versions={"lakh": __version__, "torch": torch.__version__},
    )
    storage.commit(folder, manifest.as_dict())
    return manifest


def _is_cut(part: Slice) -> bool:
    """Whether this is a true part: whole tensors are the same on all ranks and rank 0 writes them."""
    return tuple(part.local.shape) != part.shape
