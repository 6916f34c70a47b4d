"""The weights that a run begins with: drawn by its seed, or those of another model.

`init_from` names a Hugging Face directory, a GGUF file, or a run or checkpoint of lakh. The model must be the one that
the run describes, apart from its context, which may be longer or shorter. A run that has a checkpoint of its own goes
on without that model, which may be gone by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from torch import Tensor

from lakh import checkpoint, storage
from lakh.errors import UserError
from lakh.spec import Model, Run
from lakh.workloads.code.formats import gguf, hf
from lakh.workloads.code.model import CodeModel, init_weights

__all__ = ["builder", "read_weights"]


def builder(run: Run, *, is_new: bool = True) -> Callable[[], CodeModel]:
    """A function that makes the whole model with its first weights: the same ones on every rank.

    Where it is not new, others will be put into it, and any will do.
    """
    weights = read_weights(run.init_from, run.model) if run.init_from and is_new else None

    def build() -> CodeModel:
        model = CodeModel(run.model)
        if weights is None:
            init_weights(model, run.seed)
        else:
            model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
        return model

    return build


def read_weights(source: str, spec: Model) -> dict[str, Tensor]:
    """The weights behind `init_from`, checked against the model that they are for."""
    found, weights = _read(source)
    for field in fields(Model):
        theirs, ours = getattr(found, field.name), getattr(spec, field.name)
        if field.name != "context" and theirs != ours:
            raise UserError(
                f"model.{field.name} = {ours}", f"init_from {source} has {theirs}", f"set model.{field.name} = {theirs}"
            )
    return weights


def _read(source: str) -> tuple[Model, dict[str, Tensor]]:
    if storage.is_local(source) and gguf.is_gguf(storage.local_path(source)):
        loaded = gguf.load(storage.local_path(source))
        return loaded.spec, loaded.weights
    if not storage.exists(source):
        raise UserError(f"init_from = {source}", "no such file or folder", "give a model's folder or a .gguf file")
    if "config.json" in storage.list_dir(source):
        return hf.load(source)
    run, weights = checkpoint.read_model(checkpoint.find(source))
    return run.model, weights
