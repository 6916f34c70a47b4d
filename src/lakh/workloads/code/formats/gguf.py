"""Read and write GGUF, llama.cpp's one-file format: model, weights and tokenizer.

The `gguf` package parses and writes the container and dequantizes tensors; gguf_types.py quantizes them. This module
maps settings to spec.Model, tensor names (architectures/), the order of query and key rows (llama.cpp rotates
neighbouring elements of a head, lakh element i with i + D/2), and the byte-level BPE tokenizer.

Weights stay in the mapped file: each is dequantized when it is asked for. Norms are written as float32. Reading runs no
code from the file: a damaged file is a CorruptCheckpoint, a model or tokenizer that lakh cannot represent is a
UserError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

from lakh import storage
from lakh.errors import ConfigError, CorruptCheckpoint, MissingExtra, UserError
from lakh.spec.model import Model
from lakh.tokens.tokenizer.tokenizer import byte_level_tokenizer
from lakh.workloads.code.architectures import architecture_of, check_weights, parameters
from lakh.workloads.code.formats import gguf_types
from lakh.workloads.code.formats.gguf_types import GgufTensor

if TYPE_CHECKING:
    import gguf

__all__ = ["GgufModel", "GgufWeights", "is_gguf", "load", "save"]

MAGIC = b"GGUF"
CONTROL_TOKEN = 3
PRE_TOKENIZERS = ("gpt-2", "smollm", "default")
_SETTINGS = {
    "layers": "block_count",
    "context": "context_length",
    "width": "embedding_length",
    "ffn": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_base": "rope.freq_base",
    "vocab": "vocab_size",
}
"""Fields of spec.Model and their keys in the file, after the name of the architecture."""
_FLOATS = ("norm_eps", "rope_base")
_FLOAT_TYPES = ("F32", "F16", "BF16", "F64")
_ROLES = {
    "<|endoftext|>": "eos",
    "<|fim_prefix|>": "fim_pre",
    "<|fim_suffix|>": "fim_suf",
    "<|fim_middle|>": "fim_mid",
    "<|fim_pad|>": "fim_pad",
    "<|repo_name|>": "fim_rep",
    "<|file_sep|>": "fim_sep",
}

# Of tokenizer_config.json -> in tokenizer.ggml.*_token_id.
_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True)
class GgufModel:
    name: str
    spec: Model
    weights: GgufWeights
    tokenizer_json: bytes
    tokenizer_configs: dict[str, dict[str, Any]]
    """What a Hugging Face directory has beside tokenizer.json, by file: end tokens, the chat template and its names."""


def is_gguf(path: str | Path) -> bool:
    path = Path(path)
    if not path.is_file():
        return False
    with storage.open_read(path) as file:
        return file.read(4) == MAGIC


# --- reading ------------------------------------------------------------------------------------------------


def load(path: str | Path) -> GgufModel:
    """A Llama model, its weights and its tokenizer."""
    path = Path(path)
    if not is_gguf(path):
        raise UserError(str(path), "is no GGUF file" if path.is_file() else "no such file", "give a .gguf file")
    package, reader = _package(path), _open(path)
    settings = {key: field.contents() for key, field in reader.fields.items()}
    spec = _spec(path, settings, has_head=any(tensor.name == "output.weight" for tensor in reader.tensors))
    names = {info.gguf: name for name, info in parameters(spec).items()}
    tensors: dict[str, Any] = {}
    for tensor in reader.tensors:
        name = names.get(tensor.name)
        if name is None:
            raise UserError(str(path), f"has an unknown tensor {tensor.name}", "lakh loads plain Llama models only")
        try:
            package.quants.dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[:1], tensor.tensor_type)
        except NotImplementedError:
            found = f"has the unsupported type {tensor.tensor_type.name}"
            raise UserError(f"{tensor.name} ({path})", found, "convert it to Q8_0") from None
        tensors[name] = tensor
    weights = GgufWeights(spec, tensors)
    check_weights(str(path), spec, weights.shapes(), todo="download the file again")
    name, tokenizer_json = str(settings.get("general.name") or path.stem), _tokenizer_json(path, settings)
    return GgufModel(name, spec, weights, tokenizer_json, _tokenizer_configs(settings))


class GgufWeights(Mapping[str, Tensor]):
    """The tensors of a file by CodeModel's names: float32 on the CPU, made when asked for, or as stored."""

    def __init__(self, spec: Model, tensors: Mapping[str, Any]) -> None:
        self._spec, self._tensors = spec, tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        values = _package(name).quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        return torch.from_numpy(np.array(self._in_our_order(name, values)))  # a copy: the file is mapped read-only

    def stored(self, name: str) -> GgufTensor:
        tensor = self._tensors[name]
        rows = self._in_our_order(name, tensor.data.reshape(-1, tensor.data.shape[-1]).view(np.uint8))
        return GgufTensor(tensor.tensor_type.name, rows, int(tensor.shape[0]))

    def shapes(self) -> dict[str, Tensor]:
        """The tensors without their numbers."""
        return {
            name: torch.empty(tuple(int(size) for size in tensor.shape[::-1]), device="meta")
            for name, tensor in self._tensors.items()
        }

    @property
    def is_quantized(self) -> bool:
        return any(tensor.tensor_type.name not in _FLOAT_TYPES for tensor in self._tensors.values())

    def _in_our_order(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Numbers or bytes of a tensor with the rows of queries and keys in lakh's order."""
        if not (heads := _rotated_heads(name, self._spec)):
            return rows
        pairs = rows.reshape(heads, len(rows) // heads // 2, 2, rows.shape[1])
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


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
            """Without this check a truncated or hostile file claims more items than it holds, and is read forever."""
            if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError(f"ends before byte {offset + int(count)}")
            return super()._get(offset, dtype, count, override_order)

    try:
        reader: gguf.GGUFReader = CheckedReader(path)
    except (ValueError, KeyError, IndexError, OverflowError, TypeError) as error:
        raise CorruptCheckpoint(str(path), f"cannot be read ({error})", "download the file again") from None
    return reader


def _rotated_heads(name: str, spec: Model) -> int:
    """Heads of a query or key matrix; 0 for other tensors."""
    return {"q.weight": spec.heads, "k.weight": spec.kv_heads}.get(name.partition(".attention.")[2], 0)


def _spec(path: Path, settings: dict[str, Any], *, has_head: bool) -> Model:
    kind = settings.get("general.architecture")
    if kind != "llama":
        raise UserError(f"general.architecture ({path})", f"is {kind!r}", "give a file of the llama architecture")
    scaling = settings.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise UserError(f"rope.scaling ({path})", f"is {scaling!r}", "lakh loads plain Llama models only")

    found = {
        "llama.attention.head_count_kv": settings.get("llama.attention.head_count"),
        "llama.rope.freq_base": 10_000.0,
        **settings,
    }
    if tokens := settings.get("tokenizer.ggml.tokens"):
        found["llama.vocab_size"] = len(tokens)
    fields: dict[str, Any] = {}
    for field, key in _SETTINGS.items():
        value = found.get(f"llama.{key}")
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CorruptCheckpoint(str(path), f"has no number llama.{key}", "download the file again")
        fields[field] = round(float(value), 12) if field in _FLOATS else int(value)
    try:
        return Model(tied=not has_head, **fields)
    except ConfigError as error:
        raise UserError(f"{error.where} ({path})", error.found, error.todo) from None


def _tokenizer_json(path: Path, settings: dict[str, Any]) -> bytes:
    """The byte-level BPE of the file as a tokenizer.json."""
    kind, pre = settings.get("tokenizer.ggml.model"), settings.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise UserError(f"tokenizer ({path})", f"is {kind} with {pre} splitting", "lakh reads byte-level BPE only")
    tokens: list[str] = settings["tokenizer.ggml.tokens"]
    kinds = settings.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in settings.get("tokenizer.ggml.merges", ())]
    try:
        bpe = tokenizers.models.BPE({token: number for number, token in enumerate(tokens)}, merges)
    except Exception as error:  # noqa: BLE001 - the package raises bare Exception
        raise CorruptCheckpoint(str(path), f"has a damaged tokenizer ({error})", "download the file again") from None
    tokenizer = byte_level_tokenizer(bpe, single_digits=pre == "smollm")
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN])
    return bytes(tokenizer.to_str().encode())


def _tokenizer_configs(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    tokens: list[str] = settings["tokenizer.ggml.tokens"]
    ids = {name: settings.get(f"tokenizer.ggml.{field}_token_id") for name, field in _NAMED_TOKENS.items()}
    config: dict[str, Any] = {name: tokens[at] for name, at in ids.items() if at is not None and 0 <= at < len(tokens)}
    for name, key in {
        "chat_template": "tokenizer.chat_template",
        "add_bos_token": "tokenizer.ggml.add_bos_token",
    }.items():
        if isinstance(settings.get(key), str | bool):
            config[name] = settings[key]
    ends = [ids["eos_token"], settings.get("tokenizer.ggml.eot_token_id")]
    # A chat model ends a turn with eos and a text with this token, as in training; llama.cpp ends at both, too.
    ends += [at for at, token in enumerate(tokens) if token == "<|endoftext|>"]
    found = [int(at) for at in ends if at is not None]
    return {"tokenizer_config.json": config} | ({"generation_config.json": {"eos_token_id": found}} if found else {})


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
    architecture = architecture_of(spec)
    if architecture.gguf is None:
        raise UserError("--format gguf", f"lakh writes no GGUF of {architecture.name}", "export it with --format hf")
    if spec.rope_scaling is not None or spec.heads * spec.head_dim != spec.width:
        what = "scaled positions" if spec.rope_scaling is not None else f"heads of {spec.head_dim}"
        raise UserError("--format gguf", f"lakh writes no GGUF with {what}", "export it with --format hf")
    package = _package(out)
    writer = package.GGUFWriter(None, architecture.gguf)
    file_type = "ALL_F32" if quantization == "f32" else f"MOSTLY_{quantization.upper()}"
    writer.add_file_type(package.LlamaFileType[file_type])
    _add_settings(writer, package, name, spec)
    _add_tokenizer(writer, spec, json.loads(tokenizer_json.read_bytes()))
    table = parameters(spec)
    for ours, tensor in weights.items():
        theirs, values = table[ours].gguf, tensor.detach().float().cpu().numpy()
        if values.ndim == 1:
            writer.add_tensor(theirs, values)
            continue
        if heads := _rotated_heads(ours, spec):
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        layer = int(ours.split(".")[1]) if ours.startswith("blocks.") else 0
        is_head = ours == ("embed.weight" if spec.tied else "head.weight")
        columns = values.shape[1]
        kind = gguf_types.type_of_tensor(quantization, theirs, layer, spec.layers, columns, is_head=is_head)
        raw = gguf_types.encode(np.ascontiguousarray(values), kind)
        writer.add_tensor(theirs, raw, raw_dtype=package.GGMLQuantizationType[kind])
    with storage.create(out) as file:
        writer.write_header_to_file(Path(file.name))
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Path(file.name).stat().st_size


def _add_settings(writer: gguf.GGUFWriter, package: Any, name: str, spec: Model) -> None:
    writer.add_name(name)
    writer.add_quantization_version(package.GGML_QUANT_VERSION)
    for field, key in _SETTINGS.items():
        add = writer.add_float32 if field in _FLOATS else writer.add_uint32
        add(f"{writer.arch}.{key}", getattr(spec, field))
    writer.add_rope_dimension_count(spec.head_dim)


def _add_tokenizer(writer: gguf.GGUFWriter, spec: Model, tokenizer: Mapping[str, Any]) -> None:
    """The tokenizer that lakh trains: byte-level BPE with single digits, which GGUF calls "smollm". Its
    fill-in-the-middle tokens get their roles, so that llama.cpp's /infill finds them."""
    vocab: dict[str, int] = dict(tokenizer["model"]["vocab"])
    if tokenizer["model"].get("type") != "BPE" or '"Digits"' not in json.dumps(tokenizer.get("pre_tokenizer")):
        raise UserError("tokenizer.json", "is not of the kind that lakh trains", "export it with --format hf")
    special = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    by_id = {number: token for token, number in (vocab | special).items()}
    tokens = [by_id.get(number, f"<|unused_{number}|>") for number in range(spec.vocab)]
    kinds = [CONTROL_TOKEN if token in special or n not in by_id else 1 for n, token in enumerate(tokens)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    for token, role in _ROLES.items():
        if token in special:
            writer.add_uint32(f"tokenizer.ggml.{role}_token_id", special[token])
    writer.add_add_bos_token(False)
