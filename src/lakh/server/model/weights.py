"""Load a MODEL: a run folder, a checkpoint folder, a Hugging Face directory or a GGUF file, with its tokenizer.

Low-rank adapters (of a run, or a folder in the format of PEFT) are merged into their base model.

A path that is none of these is a UserError; damaged files are a DataError.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from lakh import checkpoint, storage
from lakh.errors import LakhError, UserError
from lakh.spec.model import Model
from lakh.tokens.tokenizer import convert
from lakh.workloads.code.adapters import merge, require_base
from lakh.workloads.code.architectures import check_weights
from lakh.workloads.code.formats import gguf, gguf_parts, hf, peft

__all__ = ["LoadedModel", "read"]

KINDS = (
    "MODEL is a run folder, a checkpoint folder, a Hugging Face directory with a config.json, a folder of adapters "
    "with an adapter_config.json, or a .gguf file"
)


@dataclass(frozen=True)
class LoadedModel:
    name: str
    source: str
    """The folder that was read; for a run, its newest complete checkpoint."""
    spec: Model
    weights: Mapping[str, Tensor]
    """Of a GGUF file: made when asked for."""
    tokenizer_json: Path


def read(path: str | Path) -> LoadedModel:
    """Find the model at `path` and read it, on the CPU in the stored type."""
    if not storage.exists(path):
        raise UserError(str(path), "no such file or folder", KINDS)
    if storage.is_local(str(path)) and gguf.is_gguf(storage.local_path(path)):
        found = gguf.load(storage.local_path(path))  # includes its tokenizer
        tokenizer_json = _as_file(found.tokenizer_json, found.tokenizer_files)
        name = gguf_parts.model_name(storage.local_path(path))  # clients type it; general.name is a title
        return LoadedModel(name, str(path), found.spec, found.weights, tokenizer_json)
    names = storage.list_dir(path)
    if "config.json" in names:
        spec, weights = hf.load(path)
        name = storage.local_path(path).resolve().name or "model"
        return LoadedModel(name, str(path), spec, weights, _tokenizer_json(path))
    if peft.CONFIG in names:
        return _with_adapters(path)
    if not {"run.toml", "checkpoints"} & set(names):  # a manifest alone may belong to a corpus
        raise UserError(str(path), "holds no model", KINDS)
    return _from_checkpoint(path)


def _from_checkpoint(path: str | Path) -> LoadedModel:
    """A running run removes old checkpoints, possibly the one being read: then read the next one."""
    folder = checkpoint.find(path)
    while True:
        try:
            run, weights = checkpoint.read_model(folder)
            if run.workload == "dlrm":
                raise UserError(folder, "is a recommendation model", "give a language model")
            tokenizer_json = _as_file(_tokenizer_json(folder).read_bytes())
            break
        except (LakhError, OSError):
            newer = checkpoint.find(path)
            if newer == folder:
                raise
            folder = newer
    if run.adapter.rank:
        base = read(run.init_from)  # with its tokenizer, whose other files a checkpoint does not hold
        require_base(folder, run.init_from, base.weights, run.adapter.base_sha256)
        weights = merge(folder, base.weights, weights, run.adapter.scale)
        tokenizer_json = base.tokenizer_json
    check_weights(folder, run.model, weights, todo="use a checkpoint of the code workload")
    return LoadedModel(run.name, folder, run.model, weights, tokenizer_json)


def _with_adapters(folder: str | Path) -> LoadedModel:
    adapter = peft.read_config(folder)
    is_itself = all(map(storage.is_local, (adapter.base, folder))) and (
        storage.local_path(adapter.base).resolve() == storage.local_path(folder).resolve()
    )
    if is_itself or not storage.exists(adapter.base):
        found = f"its base, {adapter.base!r}, is {'the adapter itself' if is_itself else 'not on this machine'}"
        todo = f"set base_model_name_or_path in {peft.CONFIG} to the folder of the base, or give both: "
        raise UserError(str(folder), found, f"{todo}lakh serve BASE --adapter NAME={folder}")
    base = read(adapter.base)
    require_base(str(folder), adapter.base, base.weights, adapter.base_sha256)
    weights = merge(str(folder), base.weights, peft.load(folder, base.spec), adapter.scale)
    name = storage.local_path(folder).resolve().name or base.name
    return LoadedModel(name, str(folder), base.spec, weights, base.tokenizer_json)


def _as_file(tokenizer_json: bytes, others: Mapping[str, bytes] = MappingProxyType({})) -> Path:
    """The bytes as a temporary file, removed when this process ends; `others` lie beside it."""
    folder = Path(tempfile.mkdtemp(prefix="lakh-tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = folder / "tokenizer.json"
    for name, content in {file.name: tokenizer_json, **others}.items():
        storage.write_bytes(folder / name, content)
    return file


def _tokenizer_json(folder: str | Path) -> Path:
    url = storage.join(folder, "tokenizer.json")
    if not storage.exists(url):
        found = convert(str(folder))
        return _as_file(found.raw, found.files)
    return storage.local_path(url)
