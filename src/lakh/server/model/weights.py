"""What MODEL is: a run's folder, a checkpoint's, a Hugging Face directory or a GGUF file; and its model, weights and
tokenizer.

Reads, and decides nothing else. A MODEL that is none of these is a UserError that says what it may be;
damaged bytes are a DataError from the room that reads them.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lakh import checkpoint, storage
from lakh.errors import LakhError, UserError
from lakh.spec.model import Model
from lakh.workloads.code.formats import gguf, hf

__all__ = ["LoadedModel", "read"]

MAY_BE = "MODEL is a run's folder, a checkpoint's folder, a Hugging Face directory with a config.json, or a .gguf file"


@dataclass(frozen=True)
class LoadedModel:
    name: str
    source: str
    """The folder that was read: for a run, that of its newest complete checkpoint."""
    spec: Model
    weights: dict[str, Tensor]
    tokenizer_json: Path


def read(path: str | Path) -> LoadedModel:
    """Find the model behind `path` and read it, on the CPU and in the type it is stored in."""
    if not storage.exists(path):
        raise UserError(str(path), "no such file or folder", MAY_BE)
    if storage.is_local(str(path)) and gguf.is_gguf(storage.local_path(path)):
        return _from_gguf(storage.local_path(path))
    names = storage.list_dir(path)
    if "config.json" in names:
        spec, weights = hf.load(path)
        name = storage.local_path(path).resolve().name or "model"
        return LoadedModel(name, str(path), spec, weights, _tokenizer_json(path))
    if not {"run.toml", "checkpoints"} & set(names):  # a manifest alone may be that of a corpus
        raise UserError(str(path), "holds no model", MAY_BE)
    return _from_checkpoint(path)


def _from_checkpoint(path: str | Path) -> LoadedModel:
    """A run that goes on removes its old checkpoints, also the one that is being read: then the next one is read."""
    folder = checkpoint.find(path)
    while True:
        try:
            run, weights = checkpoint.read_model(folder)
            tokenizer_json = _kept(_tokenizer_json(folder).read_bytes())
            break
        except (LakhError, OSError):
            newer = checkpoint.find(path)
            if newer == folder:
                raise
            folder = newer
    hf.check_weights(folder, run.model, weights, todo="use a checkpoint of the code workload")
    return LoadedModel(run.name, folder, run.model, weights, tokenizer_json)


def _from_gguf(path: Path) -> LoadedModel:
    found = gguf.load(path)  # has its tokenizer inside
    return LoadedModel(found.name, str(path), found.spec, found.weights, _kept(found.tokenizer_json))


def _kept(tokenizer_json: bytes) -> Path:
    """The bytes as a file, which is what readers want, until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="lakh-tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = folder / "tokenizer.json"
    storage.write_bytes(file, tokenizer_json)
    return file


def _tokenizer_json(folder: str | Path) -> Path:
    url = storage.join(folder, "tokenizer.json")
    if not storage.exists(url):
        raise UserError(url, "no such file", "a model is served and exported with its tokenizer: copy it there")
    return storage.local_path(url)
