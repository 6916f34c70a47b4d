"""Low-rank adapters (LoRA) beside the weights of a served model: many of them, chosen per sequence, in one batch.

The base is never copied: every token goes through the base's matrices, and the tokens of an adapter get its update
B (A x) on top, in the same step as tokens of other adapters and of none. Such a step uses the generic path of
InferenceModel on every device.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lakh import checkpoint, storage
from lakh.errors import DataError, UserError
from lakh.spec.model import Model
from lakh.workloads.code.architectures import parameters
from lakh.workloads.code.formats import peft

__all__ = [
    "AdapterFile",
    "AdapterRows",
    "LowRankUpdate",
    "ServedAdapter",
    "UpdatedMatrix",
    "place_adapter",
    "read_adapter",
    "with_updates",
]

A, B = ".lora_a", ".lora_b"
REMEDY = "give a folder with an adapter_config.json (PEFT, lakh export --format adapter), or a run of lakh tune"


class LowRankUpdate(NamedTuple):
    """The update of one matrix inside a fused one: rows `first` and following get `b` (`a` x)."""

    first: int
    a: Tensor
    b: Tensor
    """Times the adapter's scale."""


@dataclass(frozen=True, eq=False)
class ServedAdapter:
    name: str
    digest: str
    """Identifies its numbers: part of the keys of cached prefixes and completions."""
    updates: Mapping[tuple[str, int], tuple[LowRankUpdate, ...]]
    """By fused matrix and layer."""


@dataclass(frozen=True)
class AdapterFile:
    """What a folder of adapters holds, by lakh's names of matrices."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """blocks.N.NAME -> A and B."""
    scale: float
    base_sha256: str
    """Fingerprint of the base; empty where another tool made the adapter."""
    digest: str


class AdapterRows(NamedTuple):
    """The tokens of a step that use one adapter."""

    adapter: ServedAdapter
    rows: Any
    """A slice or an index of tokens."""


class UpdatedMatrix(NamedTuple):
    base: Any
    """What the model's own `linear` takes."""
    updates: Sequence[tuple[Any, Sequence[LowRankUpdate]]]
    """Rows of tokens, and what they get."""


def with_updates(linear: Callable[[Tensor, Any], Tensor]) -> Callable[[Tensor, Any], Tensor]:
    """`linear` that also takes an UpdatedMatrix."""

    def compute(x_NI: Tensor, weight: Any) -> Tensor:
        if not isinstance(weight, UpdatedMatrix):
            return linear(x_NI, weight)
        y_NO = linear(x_NI, weight.base)
        for rows, updates in weight.updates:
            own_NI = x_NI[rows]
            for first, a_RI, b_OR in updates:
                y_NO[rows, first : first + len(b_OR)] += F.linear(F.linear(own_NI, a_RI), b_OR)
        return y_NO

    return compute


def read_adapter(folder: str, spec: Model) -> AdapterFile:
    """Read a PEFT folder or a run of `lakh tune`, and check that it fits the model's matrices."""
    if not storage.exists(folder):
        raise UserError(folder, "no such folder", REMEDY)
    names = storage.list_dir(folder)
    if peft.CONFIG in names:
        config = peft.read_config(folder)
        tensors, scale, base_sha256 = peft.load(folder, spec), config.scale, config.base_sha256
    elif {"run.toml", "checkpoints"} & set(names):
        run, tensors = checkpoint.read_model(checkpoint.find(folder))
        if not run.adapter.rank:
            raise UserError(folder, "has no adapters: its run trained every weight", "serve it as a model of its own")
        scale, base_sha256 = run.adapter.scale, run.adapter.base_sha256
    else:
        raise UserError(folder, "holds no adapter", REMEDY)
    pairs = {
        name.removesuffix(A): (tensor, tensors[f"{name.removesuffix(A)}{B}"])
        for name, tensor in tensors.items()
        if name.endswith(A) and f"{name.removesuffix(A)}{B}" in tensors
    }
    if not pairs or 2 * len(pairs) != len(tensors):
        raise UserError(folder, "has tensors that are not pairs of an adapter's two matrices", REMEDY)
    table = parameters(spec)
    for name, (a, b) in pairs.items():
        info = table.get(f"{name}.weight")
        if info is None or (b.shape[0], a.shape[1]) != tuple(info.shape) or a.shape[0] != b.shape[1]:
            raise UserError(folder, f"its adapter of {name} does not fit this model", "use the adapter's own base")
        if not (a.isfinite().all() and b.isfinite().all()):
            found = f"its adapter of {name} has numbers that are NaN or infinite"
            raise DataError(folder, found, "export it again from an earlier checkpoint")
    digest = hashlib.sha256(f"{scale}".encode())
    for name in sorted(pairs):
        for tensor in pairs[name]:
            digest.update(name.encode() + tensor.float().contiguous().numpy().tobytes())
    return AdapterFile(pairs, scale, base_sha256, digest.hexdigest()[:16])


def place_adapter(
    name: str,
    folder: str,
    file: AdapterFile,
    rows: Mapping[str, tuple[str, int, int | None]],
    device: torch.device,
    dtype: torch.dtype,
) -> ServedAdapter:
    """`rows`: of each matrix of a block its fused tensor and first row there."""
    updates: dict[tuple[str, int], list[LowRankUpdate]] = defaultdict(list)
    for stem, (a, b) in file.pairs.items():
        _, layer, part = (*stem.split(".", 2), "", "")[:3]  # the head is in no layer
        if part not in rows:
            raise UserError(folder, f"adapts {stem}, which cannot be adapted while serving", "merge it: lakh export")
        fused, first, _ = rows[part]
        scaled = (b.float() * file.scale).to(device, dtype)
        updates[fused, int(layer)].append(LowRankUpdate(first, a.to(device, dtype), scaled))
    return ServedAdapter(name, file.digest, {key: tuple(of_matrix) for key, of_matrix in updates.items()})
