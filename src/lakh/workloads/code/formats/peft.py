"""Read and write adapters in the format of PEFT, which transformers, vLLM and SGLang load.

    adapter_model.safetensors   base_model.model.NAME.lora_A.weight and ...lora_B.weight, NAME as in the base model; its
                                metadata holds the fingerprint of the base, `base_sha256`
    adapter_config.json         written last: the base model, rank, alpha, targets

A tensor of the base that holds several matrices (Phi-3's qkv_proj, GPT-BigCode's c_attn) has one adapter there, and
each of its matrices one here: these are joined to one of a larger rank, and all others are filled with zeros to it.

Adapters with more than plain low-rank updates (DoRA, trained biases, a rank per matrix) are a UserError.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from lakh import storage
from lakh.errors import CorruptCheckpoint, UserError
from lakh.spec.model import Model
from lakh.spec.run import Adapter
from lakh.workloads.code.architectures import join_rows, parameters, rows_of_file_tensors, split_rows

__all__ = ["CONFIG", "WEIGHTS", "PeftConfig", "load", "read_config", "save"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_sha256"
PREFIX = "base_model.model."
SUFFIXES = {".lora_a": ".lora_A.weight", ".lora_b": ".lora_B.weight"}
# Settings that change what an adapter computes, with the values that lakh computes.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None, True),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "layer_replication": (None, []),
}
# Settings that change nothing in a saved adapter, or show in the names of its tensors.
NEUTRAL = {
    *("auto_mapping", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern"),
    *("layers_to_transform", "loftq_config", "lora_bias", "megatron_config", "target_modules", "target_parameters"),
    *("trainable_token_indices", "runtime_config", "eva_config", "corda_config", "lora_ga_config"),
    "ensure_weight_tying",
}
# Initial values that PEFT subtracts from the base: the adapters belong to weights that the base's folder does not hold.
CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")


@dataclass(frozen=True)
class PeftConfig:
    base: str
    """Folder of the base model."""
    rank: int
    scale: float
    base_sha256: str
    """Empty where another tool made the adapters."""


def save(folder: str | Path, spec: Model, weights: Mapping[str, Tensor], settings: Adapter, base: str) -> list[str]:
    """Write the adapters (lakh's names, ending in .lora_a and .lora_b) and return the names of the files."""
    pairs = {name: (weights[f"{name}.lora_a"], weights[f"{name}.lora_b"]) for name in _adapted(weights)}
    table = parameters(spec)
    modules = rows_of_file_tensors(table, lambda info: info.hf.removesuffix(".weight"))
    matrices = {theirs: rows for theirs, rows in modules.items() if any(_stem(name) in pairs for name in rows)}
    most = max(sum(_stem(name) in pairs for name in rows) for rows in matrices.values())
    tensors: dict[str, Tensor] = {}
    for theirs, rows in matrices.items():
        own = [(pairs.get(_stem(name)), count) for name, count in rows.items()]
        whole_a, parts_b = _joined(own, settings.rank * most)
        whole_b = join_rows(spec, table[next(iter(rows))], parts_b)
        for suffix, tensor in zip(SUFFIXES.values(), (whole_a, whole_b), strict=True):
            tensors[f"{PREFIX}{theirs}{suffix}"] = tensor
    metadata = {"format": "pt", BASE: settings.base_sha256}
    storage.remove_tree(storage.join(folder, CONFIG))
    storage.write_bytes(storage.join(folder, WEIGHTS), safetensors.torch.save(tensors, metadata))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank * most,
        "lora_alpha": settings.alpha * _divisor(most, settings.rank_stabilized),
        "use_rslora": settings.rank_stabilized,
        "lora_dropout": 0.0,
        "target_modules": _targets(matrices, modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    storage.write_bytes(storage.join(folder, CONFIG), f"{json.dumps(config, indent=2)}\n".encode())
    return [WEIGHTS, CONFIG]


def _targets(adapted: Collection[str], modules: Collection[str]) -> list[str]:
    """The ends of the names of adapted modules that no other has: attn.c_proj of GPT-BigCode, beside mlp.c_proj."""
    others = {name.rpartition(".")[2] for name in modules if name not in adapted}
    parts = [name.split(".") for name in adapted]
    return sorted({".".join(path[-2:]) if path[-1] in others else path[-1] for path in parts})


def _divisor(rank: int, is_rank_stabilized: bool) -> float:
    """Of alpha."""
    return math.sqrt(rank) if is_rank_stabilized else rank


def _stem(name: str) -> str:
    return name.removesuffix(".weight")


def _adapted(weights: Mapping[str, Tensor]) -> list[str]:
    """The matrices that have adapters."""
    return [name.removesuffix(".lora_a") for name in weights if name.endswith(".lora_a")]


def _joined(own: list[tuple[tuple[Tensor, Tensor] | None, int]], rank: int) -> tuple[Tensor, list[Tensor]]:
    """One adapter of `rank` for a tensor whose rows are several matrices: A of all of them one after the other, and the
    rows of B for each matrix, which are 0 in the columns of the others. `own`: the adapter of each matrix, and its
    rows."""
    pairs = [pair for pair, _ in own if pair is not None]
    parts = [a.detach().cpu() for a, _ in pairs]
    missing = rank - sum(len(a) for a in parts)
    whole_a = torch.cat([*parts, parts[0].new_zeros(missing, parts[0].shape[1])])
    parts_b, column = [], 0
    for pair, count in own:
        parts_b.append(pairs[0][1].new_zeros(count, rank, device="cpu"))
        if pair is not None:
            parts_b[-1][:, column : column + len(pair[0])] = pair[1].detach().cpu()
            column += len(pair[0])
    return whole_a, parts_b


def read_config(folder: str | Path) -> PeftConfig:
    where = storage.join(folder, CONFIG)
    try:
        config = json.loads(storage.read_bytes(where))
        rank, alpha, base = config["r"], config["lora_alpha"], config["base_model_name_or_path"]
        if type(rank) is not int or rank < 1 or not isinstance(base, str):
            raise ValueError(f"r is {rank!r}, the base {base!r}")
        scale = float(alpha) / _divisor(rank, bool(config.get("use_rslora")))
        if isinstance(alpha, bool) or not math.isfinite(scale):
            raise ValueError(f"lora_alpha is {alpha!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        found = f"is not the configuration of a LoRA adapter ({error})"
        raise CorruptCheckpoint(where, found, "copy it again") from None
    for key, values in PLAIN.items():
        if config.get(key, values[0]) not in values:
            todo = "train plain LoRA adapters, or merge them with the tool that made them"
            raise UserError(where, f"{key} is {config[key]!r}, which lakh does not compute", todo)
    for key in config.keys() - NEUTRAL - PLAIN.keys():  # of a newer PEFT
        if config[key] is True or (config[key] and isinstance(config[key], dict | list)):
            todo = "merge the adapters with the tool that made them"
            raise UserError(where, f"{key} is {config[key]!r}, a setting that lakh does not know", todo)
    initial = config.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(CHANGES_BASE):
        todo = "save them with PEFT's path_initial_model_for_weight_conversion, or merge them with PEFT"
        raise UserError(where, f"init_lora_weights is {initial!r}, which changes the base model", todo)
    return PeftConfig(base, rank, scale, _read_metadata(folder).get(BASE, ""))


def load(folder: str | Path, spec: Model) -> dict[str, Tensor]:
    """The adapters by lakh's names. Raises UserError for those of another architecture, and CorruptCheckpoint for
    tensors that are no adapters of the rank in the configuration."""
    rank, where = read_config(folder).rank, storage.join(folder, WEIGHTS)
    with _opened(folder) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a dict
    table = {name: info for name, info in parameters(spec).items() if len(info.shape) == 2}
    matrices = rows_of_file_tensors(table, lambda info: info.hf.removesuffix(".weight"))
    found: dict[str, Tensor] = {}
    for theirs, tensor in tensors.items():
        ours = next((ours for ours, suffix in SUFFIXES.items() if theirs.endswith(suffix)), "")
        rows = matrices.get(theirs.removeprefix(PREFIX).removesuffix(SUFFIXES.get(ours, "")))
        if rows is None or not ours or not theirs.startswith(PREFIX):
            what = f"{theirs} is no adapter of a matrix of the base model"
            raise UserError(where, what, "use the adapter's own base")
        if tensor.dim() != 2 or tensor.shape[ours == ".lora_b"] != rank or not tensor.is_floating_point():
            what = f"{theirs} is {str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
            raise CorruptCheckpoint(where, f"{what}, and the rank is {rank}", "copy the adapters again")
        if not tensor.isfinite().all():
            what = f"{theirs} has numbers that are NaN or infinite"
            raise CorruptCheckpoint(where, what, "export them again from an earlier checkpoint")
        parts = [tensor] * len(rows)  # matrices that are the rows of one tensor share A
        if ours == ".lora_b" and len(rows) > 1 and len(tensor) == sum(rows.values()):
            parts = split_rows(spec, table[next(iter(rows))], tensor, list(rows.values()))
        found |= {f"{name.removesuffix('.weight')}{ours}": part for name, part in zip(rows, parts, strict=True)}
    if not found:
        raise CorruptCheckpoint(where, "holds no adapter", "copy the adapters again")
    return found


def _read_metadata(folder: str | Path) -> dict[str, str]:
    with _opened(folder) as file:
        return dict(file.metadata() or {})


@contextlib.contextmanager
def _opened(folder: str | Path) -> Iterator[Any]:
    path = storage.join(folder, WEIGHTS)
    if not storage.exists(path):
        raise UserError(str(folder), f"has an {CONFIG} and no {WEIGHTS}", "copy the adapters again")
    try:
        with safetensors.safe_open(storage.local_path(path), "pt") as file:
            yield file
    except (safetensors.SafetensorError, OSError) as error:
        raise CorruptCheckpoint(path, f"cannot be read ({error})", "copy the adapters again") from None
