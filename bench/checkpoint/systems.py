"""Save and restore one training state with lakh, in each mode, and with torch's distributed checkpoint.

Each system first saves the state `before` (which also warms up its buffers), then `after`, and both are the same
tensors for all. `stall_s` is how long the call blocks, `write_s` how long it takes until the checkpoint is complete
on disk, `restore_s` how long reading it back takes, hashes included where the system has any.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lakh import checkpoint
from lakh.checkpoint.format import Manifest
from lakh.trainer.optim.optimizer import role_of

__all__ = ["LAKH_MODES", "SaveTimes", "save_with_dcp", "save_with_lakh"]

LAKH_MODES = ("full", "exact", "bounded", "factored", "weights")
WRITE_TIMEOUT_S = 600.0

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class SaveTimes:
    stall_s: float
    write_s: float
    restore_s: float
    bytes: int
    restored: dict[str, Tensor] | None
    """None if the checkpoint cannot resume."""
    drift: dict[str, float]
    """Relative error of each encoding, from the manifest."""


def save_with_lakh(mode: str, before: State, after: State, folder: Path) -> SaveTimes:
    chain = None
    if mode != "full":
        chain = checkpoint.DeltaChain("bounded" if mode == "factored" else mode, role_of, factored=mode == "factored")
    copies = checkpoint.HostCopies()

    def save(step: int, state: State) -> tuple[float, float, str]:
        url = str(folder / "checkpoints" / checkpoint.folder_name(step))
        facts = {"sequence_index": step, "run_sha256": "", "data_sha256": "", "attachments": {}}
        began_s = time.perf_counter()
        saving = checkpoint.CheckpointSave(url, state, step=step, chain=chain, **facts)  # type: ignore[arg-type]
        saving.start(copies)
        stall_s = time.perf_counter() - began_s
        saving.finish()
        return stall_s, time.perf_counter() - began_s, url

    shutil.rmtree(folder, ignore_errors=True)
    save(1, before)
    stall_s, write_s, url = save(2, after)
    manifest = Manifest.read(url)
    drift = {kind: error.relative_rms for kind, error in manifest.errors.items()}
    names = [name for name in after if name in manifest.tensors]
    dtypes = {name: getattr(torch, manifest.tensors[name].dtype) for name in names}
    restored = {name: torch.empty(after[name].shape, dtype=dtypes[name]) for name in names}
    began_s = time.perf_counter()
    checkpoint.verify_chain(url)
    checkpoint.load(url, restored)
    restore_s = time.perf_counter() - began_s
    return SaveTimes(stall_s, write_s, restore_s, manifest.bytes, restored if manifest.can_resume else None, drift)


def save_with_dcp(before: State, after: State, folder: Path) -> SaveTimes:
    import torch.distributed.checkpoint as dcp

    def save(step: int, state: State) -> tuple[float, float]:
        began_s = time.perf_counter()
        future = dcp.async_save(dict(state), checkpoint_id=str(folder / str(step)))
        stall_s = time.perf_counter() - began_s
        future.result(timeout=WRITE_TIMEOUT_S)  # type: ignore[union-attr]
        return stall_s, time.perf_counter() - began_s

    shutil.rmtree(folder, ignore_errors=True)
    save(1, before)
    stall_s, write_s = save(2, after)
    size = sum(path.stat().st_size for path in (folder / "2").rglob("*") if path.is_file())
    restored = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in after.items()}
    began_s = time.perf_counter()
    dcp.load(restored, checkpoint_id=str(folder / "2"))
    return SaveTimes(stall_s, write_s, time.perf_counter() - began_s, size, restored, {})
