"""How the parameters of a model lie in the tensors of a GGUF file.

Most are there as they are. Differences, with the words of `ParameterInfo.gguf_layout`:

    rotated     rows of queries and keys, and their biases, in files of some architectures, such as "llama": llama.cpp
                rotates neighbouring elements of a head there, lakh element i with i + D/2
    offset      weights of norms, plus 1 (Gemma)
    alternate   gate and up of an expert, whose rows alternate here, are two tensors (GPT-OSS)
    latent      the matrices from latents to keys (transposed) and to values are two tensors; older files have one

Dims have the order of numpy: that of a file, reversed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lakh.spec.model import Model
from lakh.workloads.code.architectures import ParameterInfo, architecture_of

__all__ = ["from_file", "rotated_heads", "to_file", "variants"]

_PARTS = {"alternate": ("gate", "up"), "latent": ("k", "v")}
_NEIGHBOURS_ROTATE = ("llama", "mistral3", "smollm3", "granite")
_WHOLE_LATENT = "kv"  # in older files


def variants(spec: Model, info: ParameterInfo) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that hold a parameter; where there are several ways, the newest first."""
    if info.num_heads:
        return [{info.gguf: (info.num_heads, info.shape[0] // info.num_heads)}]
    if info.gguf_layout not in _PARTS:
        return [{info.gguf: info.shape}]
    names = [info.gguf.format(part) for part in _PARTS[info.gguf_layout]]
    if info.gguf_layout == "alternate":
        experts, rows, columns = info.shape
        shape = (experts, rows // 2, columns) if columns > 1 else (experts, rows // 2)
        return [dict.fromkeys(names, shape)]
    keys, values = names
    split: dict[str, tuple[int, ...]] = {
        keys: (spec.heads, spec.kv_rank, spec.head_dim),
        values: (spec.heads, spec.head_dim, spec.kv_rank),
    }
    return [split, {info.gguf.format(_WHOLE_LATENT): info.shape}]


def to_file(spec: Model, name: str, info: ParameterInfo, values: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of a parameter by their names in the file."""
    if heads := rotated_heads(spec, name):
        halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
        return {info.gguf: np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))}
    if info.gguf_layout == "offset":
        return {info.gguf: values + 1}
    if info.num_heads:
        return {info.gguf: values.reshape(info.num_heads, -1)}
    if info.gguf_layout == "alternate":
        shapes = variants(spec, info)[0]
        return {part: values[:, at::2].reshape(shape) for at, (part, shape) in enumerate(shapes.items())}
    if info.gguf_layout == "latent":
        keys, to_values = values.reshape(spec.heads, 2, spec.head_dim, -1).swapaxes(0, 1)
        parts = np.ascontiguousarray(keys.swapaxes(1, 2)), np.ascontiguousarray(to_values)
        return dict(zip(variants(spec, info)[0], parts, strict=True))
    return {info.gguf: values}


def from_file(spec: Model, name: str, info: ParameterInfo, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The parameter from its tensors, in the order of `variants`; for rotated rows also from their bytes."""
    first = parts[0]
    if heads := rotated_heads(spec, name):
        pairs = first.reshape(heads, len(first) // heads // 2, 2, -1)
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(first.shape))
    if info.gguf_layout == "offset":
        return first - 1
    if info.gguf_layout == "alternate":
        return np.stack(parts, axis=2).reshape(info.shape)
    if info.gguf_layout == "latent" and len(parts) == 2:
        return np.concatenate((first.swapaxes(1, 2), parts[1]), axis=1).reshape(info.shape)
    return first


def rotated_heads(spec: Model, name: str) -> int:
    """Heads of a matrix, or of its bias, whose rows have another order in the file; 0 for other parameters."""
    if architecture_of(spec).gguf not in _NEIGHBOURS_ROTATE:
        return 0
    heads: Mapping[str, Any] = {"q": spec.heads, "k": spec.kv_heads}
    part = name.partition(".attention.")[2].removesuffix(".weight").removesuffix("_bias")
    return int(heads.get(part, 0))
