"""Read and write GGUF, llama.cpp's one-file format: model, weights and tokenizer.

The `gguf` package parses and writes the container and dequantizes tensors; gguf_types.py quantizes them. Settings are
in gguf_config.py, names of tensors in the architecture's table (architectures/), the order of their rows in
gguf_layouts.py, tokenizers in gguf_tokenizer.py.

Weights stay in the mapped file: each is dequantized when it is asked for. Norms, biases and routers are written as
float32. Reading runs no code from the file: a damaged file is a CorruptCheckpoint, a model or tokenizer that lakh
cannot represent is a UserError.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lakh import storage
from lakh.errors import CorruptCheckpoint, MissingExtra, UserError
from lakh.spec.model import Model
from lakh.workloads.code.architectures import architecture_of, parameters, rows_of_file_tensors
from lakh.workloads.code.formats import (
    gguf_config,
    gguf_layouts,
    gguf_parts,
    gguf_rope,
    gguf_tokenizer,
    gguf_tokenizer_save,
    gguf_types,
)
from lakh.workloads.code.formats.gguf_parts import GgufPart
from lakh.workloads.code.formats.gguf_types import GgufTensor

if TYPE_CHECKING:
    import gguf

__all__ = ["GgufModel", "GgufWeights", "is_gguf", "load", "save"]

log = logging.getLogger(__name__)
MAGIC = b"GGUF"
AGAIN = "download the file again"
ROW_BYTES = 1 << 14  # rows are joined up to this size to be dequantized
_FLOAT_TYPES = ("F32", "F16", "BF16", "F64")
_KEPT_FLOAT = (".ffn_gate_inp.", ".ffn_gate_inp_shexp.", "_norm.", "position_embd.")
"""Matrices that are never quantized: routers, whose small differences choose experts, norms of heads, and embeddings of
positions, as llama.cpp keeps them."""


@dataclass(frozen=True)
class GgufModel:
    name: str
    spec: Model
    weights: GgufWeights
    tokenizer_json: bytes
    tokenizer_files: Mapping[str, bytes]
    """What a checkpoint has beside tokenizer.json: roles of special tokens, the chat template."""


def is_gguf(path: str | Path) -> bool:
    path = Path(path)
    if not path.is_file():
        return False
    with storage.open_read(path) as file:
        return file.read(4) == MAGIC


# --- reading ------------------------------------------------------------------------------------------------


def load(path: str | Path) -> GgufModel:
    """A model of a known architecture, its weights and its tokenizer. Of a file in several parts, any of them."""
    path = Path(path)
    if not is_gguf(path):
        raise UserError(str(path), "is no GGUF file" if path.is_file() else "no such file", "give a .gguf file")
    package, (_, settings, tensors_of_file) = _package(path), _read(path)
    found = {tensor.name: tensor for tensor in tensors_of_file}
    if gguf_parts.is_part(settings):
        parts = [_read(part) for part in gguf_parts.find(path, settings)]
        path, settings, _ = parts[0]
        found = gguf_parts.join(parts)
    names = (gguf_rope.FACTORS, gguf_rope.SHORT_FACTORS, gguf_rope.LONG_FACTORS)
    divisors, short, long = (
        None if (tensor := found.pop(name, None)) is None else np.asarray(tensor.data, np.float32).reshape(-1)
        for name in names
    )
    spec = gguf_config.spec_of(
        str(path),
        settings,
        tensors=found.keys(),
        rope_factors=divisors,
        longrope=None if short is None and long is None else (short, long),
    )
    further = int(settings.get(f"{settings['general.architecture']}.{gguf_config.FURTHER_LAYERS}") or 0)
    left_out = tuple(f"blk.{layer}." for layer in range(spec.layers, spec.layers + further))
    if further:
        log.warning("%s: left out %d layers that predict further tokens", path, further)
        found = {name: tensor for name, tensor in found.items() if not name.startswith(left_out)}
    tensors: dict[str, tuple[Any, ...]] = {}
    table = parameters(spec)
    for theirs, rows in rows_of_file_tensors(table, lambda info: info.gguf).items():
        first = table[next(iter(rows))]
        if len(rows) == 1:
            tensors |= dict.fromkeys(rows, _take(str(path), found, gguf_layouts.variants(spec, first)))
            continue
        (whole,) = _take(str(path), found, [{theirs: (sum(rows.values()), *first.shape[1:])}])
        tensors |= {name: (part,) for name, part in zip(rows, _split(whole, list(rows.values())), strict=True)}
    if found:
        todo = f"lakh computes {spec.family_name} without it; {gguf_config.known_architectures()}"
        raise UserError(str(path), f"has an unknown tensor {next(iter(found))}", todo)
    for tensor in (tensor for parts in tensors.values() for tensor in parts):
        try:
            package.quants.dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[:1], tensor.tensor_type)
        except NotImplementedError:
            what = f"has the unsupported type {tensor.tensor_type.name}"
            raise UserError(f"{tensor.name} ({path})", what, "convert it to Q8_0") from None
    weights = GgufWeights(spec, tensors)
    tokenizer_json, files = gguf_tokenizer.read(str(path), settings)
    name = str(settings.get("general.name") or gguf_parts.model_name(path))
    return GgufModel(name, spec, weights, tokenizer_json, files)


def _read(path: Path) -> GgufPart:
    reader = _open(path)
    try:
        settings = {key: field.contents() for key, field in reader.fields.items()}
    except ValueError as error:  # a text that is not UTF-8
        raise CorruptCheckpoint(str(path), f"cannot be read ({error})", AGAIN) from None
    return GgufPart(path, settings, reader.tensors)


def _take(where: str, found: dict[str, Any], variants: list[dict[str, tuple[int, ...]]]) -> tuple[Any, ...]:
    """The tensors of a parameter, removed from those of the file."""
    shapes = next((shapes for shapes in variants if set(shapes) & set(found)), variants[0])
    for name, shape in shapes.items():
        if name not in found:
            raise CorruptCheckpoint(where, f"has no tensor {name}", AGAIN)
        theirs = tuple(int(size) for size in found[name].shape[::-1])
        if theirs not in (shape, shape[1:] if shape[0] == 1 else shape):  # a matrix of one row may be a vector
            what = f"{name} has shape {list(theirs)}; its settings require {list(shape)}"
            raise CorruptCheckpoint(where, what, AGAIN)
    return tuple(found.pop(name) for name in shapes)


def _split(tensor: Any, counts: Sequence[int]) -> list[Any]:
    """The rows of a tensor as several."""
    parts = np.split(tensor.data, np.cumsum(counts)[:-1])
    columns = tensor.shape[0]  # a file has the dims reversed
    return [
        tensor._replace(data=part, shape=np.array([columns, count], np.uint64))
        for part, count in zip(parts, counts, strict=True)
    ]


class GgufWeights(Mapping[str, Tensor]):
    """The tensors of a file by CodeModel's names: float32 on the CPU, made when asked for, or as stored."""

    def __init__(self, spec: Model, tensors: Mapping[str, tuple[Any, ...]]) -> None:
        self._spec, self._tensors, self._table = spec, tensors, parameters(spec)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        parts = [_dequantize(tensor.data, tensor.tensor_type) for tensor in self._tensors[name]]
        # A copy: the file is mapped read-only.
        return torch.from_numpy(np.array(self._in_our_order(name, parts)).reshape(self._table[name].shape))

    def stored(self, name: str) -> GgufTensor:
        """A matrix, or those of all experts, with the bytes of the file; as float32 where several tensors hold it."""
        tensor, *others = self._tensors[name]
        if others:
            values = self[name].reshape(-1, self._table[name].shape[-1]).numpy()
            return GgufTensor("F32", values.view(np.uint8), values.shape[1])
        rows = self._in_our_order(name, [tensor.data.reshape(-1, tensor.data.shape[-1]).view(np.uint8)])
        return GgufTensor(tensor.tensor_type.name, rows, int(tensor.shape[0]))

    @property
    def is_quantized(self) -> bool:
        return any(tensor.tensor_type.name not in _FLOAT_TYPES for parts in self._tensors.values() for tensor in parts)

    def _in_our_order(self, name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
        return gguf_layouts.from_file(self._spec, name, self._table[name], parts)


def _dequantize(data: np.ndarray, kind: Any) -> np.ndarray:
    """As float32. The package takes 16 rows at a time; several short ones are given to it as one, to save calls."""
    joined = math.gcd(data.size // data.shape[-1], 1 << max(0, (ROW_BYTES // data.shape[-1]).bit_length() - 1))
    values = _package(kind.name).quants.dequantize(data.reshape(-1, joined * data.shape[-1]), kind)
    return values.reshape(*data.shape[:-1], -1).astype(np.float32, copy=False)


def _package(where: str | Path) -> Any:
    try:
        import gguf
    except ModuleNotFoundError:
        raise MissingExtra(str(where), "gguf", "gguf") from None
    return gguf


def _open(path: Path) -> gguf.GGUFReader:
    package = _package(path)

    class CheckedReader(package.GGUFReader):  # type: ignore[name-defined]
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            """Without this check a truncated or hostile file claims more items than it holds, and is read forever.

            A plain array of the mapped bytes: slices of numpy's own class for mapped files take much longer to make.
            """
            dtype = np.dtype(dtype).newbyteorder(override_order or self.byte_order)
            if offset + int(count) * dtype.itemsize > len(self.data):
                raise ValueError(f"ends before byte {offset + int(count)}")
            return np.frombuffer(self.data, dtype, int(count), int(offset))

    try:
        reader: gguf.GGUFReader = CheckedReader(path)
    except (ValueError, KeyError, IndexError, OverflowError, TypeError) as error:
        raise CorruptCheckpoint(str(path), f"cannot be read ({error})", AGAIN) from None
    end = 0
    for tensor in sorted(reader.tensors, key=lambda tensor: tensor.data_offset):
        if tensor.data_offset < end:  # another type or place than it was written with
            raise CorruptCheckpoint(str(path), f"{tensor.name} overlaps the tensor before it", AGAIN)
        end = tensor.data_offset + int(tensor.n_bytes)
    return reader


# --- writing ------------------------------------------------------------------------------------------------


def save(
    out: str | Path,
    name: str,
    spec: Model,
    weights: Mapping[str, Tensor],
    tokenizer_json: Path,
    *,
    quantization: str = "q8_0",
) -> int:
    """Write one .gguf file atomically, in one of gguf_types.FORMATS; returns its bytes."""
    keys, architecture = gguf_config.keys_of(spec), architecture_of(spec)
    tokenizer_keys = gguf_tokenizer_save.keys_of(tokenizer_json, spec)
    package = _package(out)
    writer = package.GGUFWriter(None, architecture.gguf)
    file_type = "ALL_F32" if quantization == "f32" else f"MOSTLY_{quantization.upper()}"
    writer.add_file_type(package.LlamaFileType[file_type])
    writer.add_name(name)
    writer.add_quantization_version(package.GGML_QUANT_VERSION)
    for key, value in {
        **{f"{architecture.gguf}.{key}": value for key, value in keys.items()},
        **tokenizer_keys,
    }.items():
        _add(writer, key, value)
    for theirs, divisors in gguf_rope.factors_of(spec).items():
        writer.add_tensor(theirs, divisors)
    table = parameters(spec)
    stored = {name: info for name, info in table.items() if name in weights}  # in order: rows of a tensor are, too
    for name, rows in rows_of_file_tensors(stored, lambda info: info.gguf).items():
        ours, *others = rows
        if not name:
            raise UserError(ours, f"has no name in a GGUF file of {architecture.gguf}", gguf_config.HF)
        values = weights[ours].detach().float().cpu().numpy()
        if others:
            values = np.concatenate((values, *(weights[other].detach().float().cpu().numpy() for other in others)))
        layer = int(ours.split(".")[1]) if ours.startswith("blocks.") else 0
        is_head = ours == ("embed.weight" if spec.tied else "head.weight")
        for theirs, part in gguf_layouts.to_file(spec, ours, table[ours], values).items():
            if not theirs.endswith(".weight") or part.ndim == 1 or any(word in theirs for word in _KEPT_FLOAT):
                writer.add_tensor(theirs, np.ascontiguousarray(part))
                continue
            columns = part.shape[-1]
            kind = gguf_types.type_of_tensor(quantization, theirs, layer, spec.layers, columns, is_head=is_head)
            raw = gguf_types.encode(np.ascontiguousarray(part).reshape(-1, columns), kind)
            raw = raw.reshape(*part.shape[:-1], -1)
            writer.add_tensor(theirs, raw, raw_dtype=package.GGMLQuantizationType[kind])
    with storage.create(out) as file:
        writer.write_header_to_file(Path(file.name))
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Path(file.name).stat().st_size


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A setting with the type that llama.cpp expects for such a value."""
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    kinds: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    kinds[str] = writer.add_string
    kinds[type(value)](key, value)
