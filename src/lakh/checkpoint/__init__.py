"""Checkpoints: a folder of slices that any number of ranks can write and any other number can read.

    RUN/checkpoints/step-00000120/
        rank-00000.safetensors   the slices that rank 0 held
        run.toml tokenizer.json  what the weights mean, so that the folder stands alone
        manifest.json            written last: without it the checkpoint does not exist

format.py says what the manifest holds, saving.py and loading.py write and read it, shelf.py finds and checks what is
there, retain.py decides what may go. A save may go on behind the caller's back: host_copies.py keeps the tensors as
they were, tensor_file.py writes them, and background.py says whether there is room for that.
Knows torch tensors and their names; knows nothing of models, optimizers or process groups. torch, which takes seconds,
is imported by those who ask for what reads or writes tensors: listing and checking does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lakh.checkpoint.background import choose_background, free_host_bytes
from lakh.checkpoint.format import Manifest, folder_name
from lakh.checkpoint.retain import thin_out
from lakh.checkpoint.shelf import find, list_complete, newest_usable, read_run, verify

if TYPE_CHECKING:
    from lakh.checkpoint.host_copies import HostCopies
    from lakh.checkpoint.loading import load, read_model
    from lakh.checkpoint.saving import Saving, save

__all__ = [
    "HostCopies",
    "Manifest",
    "Saving",
    "choose_background",
    "find",
    "folder_name",
    "free_host_bytes",
    "list_complete",
    "load",
    "newest_usable",
    "read_model",
    "read_run",
    "save",
    "thin_out",
    "verify",
]

_OF_TENSORS = {
    "HostCopies": "host_copies",
    "Saving": "saving",
    "load": "loading",
    "read_model": "loading",
    "save": "saving",
}


def __getattr__(name: str) -> object:
    if name not in _OF_TENSORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_OF_TENSORS[name]}"), name)
