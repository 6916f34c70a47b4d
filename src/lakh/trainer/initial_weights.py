"""The initial weights of a run: random by its seed, or from another model.

`init_from` names a Hugging Face directory, a GGUF file, or a run or checkpoint of lakh. Its model must match the run's
model; only the context may differ. A run that has a checkpoint of its own does not read it, unless it trains adapters:
their checkpoints do not hold the base model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from torch import Tensor

from lakh import checkpoint, storage
from lakh.errors import UserError
from lakh.spec import Model, Run
from lakh.workloads.code.adapters import add_adapters, merge, require_base
from lakh.workloads.code.architectures import require_finite
from lakh.workloads.code.formats import gguf, hf
from lakh.workloads.code.model import CodeModel, init_weights

__all__ = ["model_builder", "read_weights"]


def model_builder(run: Run, *, is_new: bool = True) -> Callable[[], CodeModel]:
    """A function that builds the full model with its initial weights, the same on every rank. `is_new` False: a
    checkpoint or another rank provides the trained weights."""
    reads = run.init_from and (is_new or run.adapter.rank)
    weights = read_weights(run.init_from, run.model) if reads else None
    if weights is not None and run.adapter.rank:
        require_base("adapter.base_sha256", run.init_from, weights, run.adapter.base_sha256)

    def build() -> CodeModel:
        model = CodeModel(run.model)
        if weights is None:
            init_weights(model, run.seed, embedding_std=run.train.embedding_init_std)
        else:
            model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
        if run.adapter.rank:
            add_adapters(model, run.adapter, run.seed)
        return model

    return build


def read_weights(source: str, spec: Model) -> dict[str, Tensor]:
    """The weights of `init_from`, checked against the run's model."""
    found, weights = _read(source)
    for field in fields(Model):
        theirs, ours = getattr(found, field.name), getattr(spec, field.name)
        if theirs != ours and (field.name != "context" or spec.traits.has_learned_positions):
            raise UserError(
                f"model.{field.name} = {ours}", f"init_from {source} has {theirs}", f"set model.{field.name} = {theirs}"
            )
    require_finite(source, weights)
    return weights


def _read(source: str) -> tuple[Model, dict[str, Tensor]]:
    if storage.is_local(source) and gguf.is_gguf(storage.local_path(source)):
        loaded = gguf.load(storage.local_path(source))
        return loaded.spec, dict(loaded.weights)
    if not storage.exists(source):
        raise UserError(
            f"init_from = {source}", "no such file or folder", "give the folder of a model, or a .gguf file"
        )
    if "config.json" in storage.list_dir(source):
        return hf.load(source)
    folder = checkpoint.find(source)
    run, weights = checkpoint.read_model(folder)
    if run.adapter.rank:
        base = read_weights(run.init_from, run.model)
        require_base(folder, run.init_from, base, run.adapter.base_sha256)
        weights = merge(folder, base, weights, run.adapter.scale)
    return run.model, weights
