"""Low-rank adapters (LoRA, arXiv 2106.09685) of a block's matrices: y = W x + alpha / rank * B (A x), W frozen.

    blocks.N.NAME.lora_a   rank x inputs, random at the start
    blocks.N.NAME.lora_b   outputs x rank, 0 at the start, so that training begins with the base model

adapted_ops.py computes with them, and formats/peft.py reads and writes them as files. `merge` adds them to the base
weights, for serving and export.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lakh.errors import CorruptCheckpoint, UserError
from lakh.spec.run import Adapter
from lakh.workloads.code.kernels import nf4
from lakh.workloads.code.model import CodeModel

__all__ = ["adapted_matrices", "add_adapters", "fingerprint", "merge", "require_base"]

A, B = ".lora_a", ".lora_b"
SAMPLES = 1024  # of each tensor, in its fingerprint


def adapted_matrices(model: CodeModel, settings: Adapter) -> dict[str, Any]:
    """The modules of the targets by name. Raises a UserError for settings that do not fit the model."""
    matrices = {
        f"blocks.{layer}.{name}": module
        for layer, block in zip(model.blocks, model.each_block(), strict=True)
        for name, module in block.matrices()
    }
    known = dict.fromkeys(name.rpartition(".")[2] for name in matrices)
    for target in settings.targets:
        if target not in known:
            found = f"{target!r} is no matrix of this model's blocks"
            raise UserError("adapter.targets", found, f"choose from: {', '.join(known)}")
    if settings.targets:
        matrices = {name: it for name, it in matrices.items() if name.rpartition(".")[2] in settings.targets}
    for name, module in matrices.items():
        columns = module.weight.shape[1]
        if settings.base_bits == 4 and columns % nf4.GROUP:
            found = f"{name} has {columns} columns, not a multiple of {nf4.GROUP}"
            raise UserError("adapter.base_bits", found, "use 16 bits")
    return matrices


def add_adapters(model: CodeModel, settings: Adapter, seed: int) -> None:
    """Freeze the model and add adapters to the targets. Each tensor is random by (seed, name), as initial weights."""
    model.requires_grad_(False)
    for name, module in adapted_matrices(model, settings).items():
        rows, columns = module.weight.shape
        key = hashlib.sha256(f"{seed}:{name}{A}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
        bound = columns**-0.5  # as PEFT
        a = torch.empty(settings.rank, columns).uniform_(-bound, bound, generator=generator)
        module.lora_a, module.lora_b = nn.Parameter(a), nn.Parameter(torch.zeros(rows, settings.rank))
    for block in model.each_block():
        block.adapter_scale = settings.scale
    model.set_ops(model.ops)


def merge(where: str, base: Mapping[str, Tensor], adapters: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The base weights with `scale` B A added, in their type. Raises CorruptCheckpoint if the adapters do not fit."""
    merged = dict(base)
    for stem in dict.fromkeys(name.removesuffix(A).removesuffix(B) for name in adapters):
        weight, a, b = base.get(f"{stem}.weight"), adapters.get(f"{stem}{A}"), adapters.get(f"{stem}{B}")
        if weight is None or a is None or b is None or weight.shape != (b.shape[0], a.shape[1]) or b.shape[1] != len(a):
            raise CorruptCheckpoint(where, f"the adapter of {stem} does not fit the base", "use the base of the run")
        merged[f"{stem}.weight"] = (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)
    return merged


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Identifies a base model: SHA-256 of names, shapes and evenly spaced values of every tensor, as float32."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        values = weights[name].detach().flatten()
        sample = values[:: max(1, len(values) // SAMPLES)].float().cpu().contiguous()
        digest.update(f"{name} {list(weights[name].shape)}\n".encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def require_base(where: str, source: str, weights: Mapping[str, Tensor], expected: str) -> None:
    """Raise UserError unless these are the weights that an adapter was trained on."""
    if expected and fingerprint(weights) != expected:
        found = f"its base is {source}, whose weights are not those that the adapter was trained on"
        raise UserError(where, found, "put the original base model there")
