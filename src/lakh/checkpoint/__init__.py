"""Checkpoints: a folder of slices that any number of ranks can write and any other number can read.

    RUN/checkpoints/step-00000120/
        rank-00000.safetensors   the slices that rank 0 held
        run.toml tokenizer.json  what the weights mean, so that the folder stands alone
        manifest.json            written last: without it the checkpoint does not exist

format.py says what the manifest holds, saving.py and load.py write and read it, retain.py decides what may go. A save
may go on behind the caller's back: host_copies.py keeps the tensors as they were, tensor_file.py writes them, and
background.py says whether there is room for that.
Knows torch tensors and their names; knows nothing of models, optimizers or process groups.
"""

from lakh.checkpoint.background import choose_background, free_host_bytes
from lakh.checkpoint.format import Manifest, folder_name
from lakh.checkpoint.host_copies import HostCopies
from lakh.checkpoint.load import find, list_complete, load, newest_usable, read_model, read_run, verify
from lakh.checkpoint.retain import thin_out
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
