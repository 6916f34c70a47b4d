"""Writing a checkpoint: every rank its slices, then one rank the manifest.

Cost: each distinct slice is written once, by the first rank that holds it. Fails with DiskFull or PeerLost; until the
manifest is there the folder counts for nothing, and the next save of that step starts over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from lakh import __version__, storage
from lakh.checkpoint.format import Manifest, Stored, StoredTensor, dtype_name, slice_of

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
    writes_whole: bool | None = None,
    gather: Callable[[Any], list[Any] | None] = lambda value: [value],
) -> Manifest | None:
    """Write `tensors` and, on rank 0, the attachments and the manifest, which is returned there (None elsewhere).

    `writes_whole` says whether this rank writes the plain tensors, which several ranks hold alike: one rank of each
    pipeline stage does, and rank 0 where it is left out. `gather` brings one value of each rank to rank 0 and returns
    None elsewhere; it is called exactly once.
    """
    writes_whole = rank == 0 if writes_whole is None else writes_whole
    held = {name: slice_of(tensor) for name, tensor in tensors.items()}
    mine = {name: part for name, part in held.items() if (writes_whole if part.writes is None else part.writes)}
    file = f"rank-{rank:05d}.safetensors"
    data = safetensors.torch.save({name: part.local.detach().cpu().contiguous() for name, part in mine.items()})
    storage.make_dir(folder)
    storage.write_bytes(storage.join(folder, file), data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    boxes = {
        name: (dtype_name(part.local.dtype), part.shape, part.offset, tuple(part.local.shape))
        for name, part in mine.items()
    }
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
        tensors=_collect([(file, boxes) for file, _, boxes in gathered]),
        versions={"lakh": __version__, "torch": torch.__version__},
    )
    storage.commit(folder, manifest.as_dict())
    return manifest


def _collect(written: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, StoredTensor]:
    """What was written where, tensor by tensor."""
    tensors: dict[str, StoredTensor] = {}
    for file, boxes in written:
        for name, (dtype, shape, offset, size) in boxes.items():
            before = tensors[name].slices if name in tensors else ()
            tensors[name] = StoredTensor(dtype, shape, (*before, Stored(file, offset, size)))
    return tensors
