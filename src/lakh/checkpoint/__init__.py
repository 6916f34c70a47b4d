"""Checkpoints: a folder of tensor slices that any number of ranks can write and any other number can read.

    RUN/checkpoints/step-00000120/
        rank-00000.safetensors   the slices of rank 0
        run.toml tokenizer.json  everything needed to use the weights
        manifest.json            written last; a folder without it is not a checkpoint

    format.py         the manifest, and the checks of its fields (format_check.py)
    chunk_hashes.py   hashes of files while they are written and when they are verified
    saving.py         write a checkpoint, optionally in the background (host_copies.py, background.py)
    incremental.py    checkpoints relative to the one before, and how slices are encoded (encoding.py)
    loading.py        read tensors into any sharding (slices.py)
    tensor_file.py    write safetensors files
    catalog.py        list, find and verify the checkpoints of a run
    retention.py      remove old checkpoints
    memory_copies.py  copies of the state in a node's memory

Independent of models, optimizers and process groups. torch takes seconds to import and is imported only by the
functions that read or write tensors.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lakh.checkpoint.background import choose_background, free_host_bytes
from lakh.checkpoint.catalog import base_folder, find, list_complete, newest_usable, read_run, verify, verify_chain
from lakh.checkpoint.format import Manifest, folder_name
from lakh.checkpoint.retention import prune

if TYPE_CHECKING:
    from lakh.checkpoint.host_copies import HostCopies
    from lakh.checkpoint.incremental import DeltaChain
    from lakh.checkpoint.loading import load, read_model
    from lakh.checkpoint.saving import CheckpointSave, save

__all__ = [
    "CheckpointSave",
    "DeltaChain",
    "HostCopies",
    "Manifest",
    "base_folder",
    "choose_background",
    "find",
    "folder_name",
    "free_host_bytes",
    "list_complete",
    "load",
    "newest_usable",
    "prune",
    "read_model",
    "read_run",
    "save",
    "verify",
    "verify_chain",
]

_NEEDS_TORCH = {
    "DeltaChain": "incremental",
    "HostCopies": "host_copies",
    "CheckpointSave": "saving",
    "load": "loading",
    "read_model": "loading",
    "save": "saving",
}


def __getattr__(name: str) -> object:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEEDS_TORCH[name]}"), name)
