"""Reading GGUF, the one-file format of llama.cpp: model, weights and tokenizer, with numpy alone.

    "GGUF", version, number of tensors, number of settings; settings; name, shape, type and offset of every tensor;
    then the tensors, each beginning at a multiple of general.alignment

Little-endian throughout. Tensor shapes stand innermost first. Quantized tensors are blocks of 32 or 256 values with
scales of their own and become float32. llama.cpp rotates neighbouring elements of a head where lakh rotates element i
with i + D/2, so the rows of query and key are put back in that order.

Knows bytes; runs no code from the file. A file that is cut off, lies about its sizes or holds types this does not know
is a DataError or UserError that says which. Format: the specification in docs/gguf.md of the ggml repository.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lakh import storage
from lakh.errors import ConfigError, CorruptCheckpoint, UserError
from lakh.spec.model import Model
from lakh.workloads.code.tensors import check_weights

__all__ = ["GgufModel", "is_gguf", "load"]

MAGIC = b"GGUF"
MOST_ITEMS = 1 << 24  # of one array, or tensors, or settings: a hostile file must not cost memory before it fails

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# type -> (name, values in a block, bytes of a block)
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}

_OUTER = {"token_embd": "embed", "output_norm": "norm", "output": "head"}
_BLOCK = {
    "attn_norm": "attention_norm",
    "attn_q": "attention.q",
    "attn_k": "attention.k",
    "attn_v": "attention.v",
    "attn_output": "attention.o",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "ffn.gate",
    "ffn_up": "ffn.up",
    "ffn_down": "ffn.down",
}


@dataclass(frozen=True)
class GgufModel:
    name: str
    spec: Model
    weights: dict[str, Tensor]
    """By CodeModel's names, float32, on the CPU."""
    tokenizer_json: bytes


def is_gguf(path: str | Path) -> bool:
    path = Path(path)
    if not path.is_file():
        return False
    with storage.open_read(path) as file:
        return file.read(4) == MAGIC


def load(path: str | Path) -> GgufModel:
    """A Llama model, its weights and its tokenizer."""
    path = Path(path)
    if not path.is_file():
        raise UserError(str(path), "no such file", "give a .gguf file")
    data = np.memmap(path, dtype=np.uint8, mode="r")
    reader = _Reader(path, data)
    settings, tensors = reader.header()
    spec = _spec(path, settings, has_head="output.weight" in tensors)
    weights: dict[str, Tensor] = {}
    for theirs, (shape, kind, start) in tensors.items():
        ours = _our_name(theirs)
        if ours is None:
            if theirs == "rope_freqs.weight":
                raise UserError(str(path), "scales its rotary positions", "lakh loads plain Llama models only")
            raise UserError(str(path), f"has a tensor {theirs}", "lakh loads plain Llama models only")
        values = reader.tensor(theirs, shape, kind, start)
        if ours.endswith(("attention.q.weight", "attention.k.weight")):
            heads = spec.heads if ours.endswith("q.weight") else spec.kv_heads
            values = _halves_first(values, heads)
        weights[ours] = torch.from_numpy(values)
    check_weights(str(path), spec, weights, todo="download the file again")
    name = str(settings.get("general.name") or path.stem)
    return GgufModel(name, spec, weights, _tokenizer_json(path, settings))


def _our_name(theirs: str) -> str | None:
    stem = theirs.removesuffix(".weight")
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if found:
        return f"blocks.{found[1]}.{_BLOCK[found[2]]}.weight" if found[2] in _BLOCK else None
    return f"{_OUTER[stem]}.weight" if stem in _OUTER else None


def _halves_first(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from neighbouring pairs (0, 1), (2, 3), ... to first elements, then second elements."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def _spec(path: Path, settings: dict[str, Any], *, has_head: bool) -> Model:
    kind = settings.get("general.architecture")
    if kind != "llama":
        raise UserError(f"general.architecture ({path})", f"is {kind!r}", "give a file of the llama architecture")
    scaling = settings.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise UserError(f"rope.scaling ({path})", f"is {scaling!r}", "lakh loads plain Llama models only")

    def number(field: str, default: float | None = None) -> Any:
        value = settings.get(f"llama.{field}", default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise _corrupt(path, f"has no number llama.{field}")
        return value

    heads = int(number("attention.head_count"))
    try:
        return Model(
            layers=int(number("block_count")),
            width=int(number("embedding_length")),
            heads=heads,
            kv_heads=int(number("attention.head_count_kv", heads)),
            ffn=int(number("feed_forward_length")),
            vocab=len(settings.get("tokenizer.ggml.tokens", ())) or int(number("vocab_size")),
            tied=not has_head,
            rope_base=float(number("rope.freq_base", 10_000.0)),
            context=int(number("context_length")),
            norm_eps=round(float(number("attention.layer_norm_rms_epsilon")), 12),
        )
    except ConfigError as error:
        raise UserError(f"{error.where} ({path})", error.found, error.todo) from None


def _tokenizer_json(path: Path, settings: dict[str, Any]) -> bytes:
    """The byte-level BPE of the file as a tokenizer.json."""
    kind, pre = settings.get("tokenizer.ggml.model"), settings.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in ("gpt-2", "smollm", "default"):
        raise UserError(f"tokenizer ({path})", f"is {kind} with {pre} splitting", "lakh reads byte-level BPE only")
    tokens: list[str] = settings["tokenizer.ggml.tokens"]
    kinds = settings.get("tokenizer.ggml.token_type", [1] * len(tokens))
    special = [
        {"id": i, "content": token, "special": True, "normalized": False, "single_word": False, "lstrip": False,
         "rstrip": False}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == 3  # a control token
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split: dict[str, Any] = byte_level
    if pre == "smollm":
        digits = {"type": "Digits", "individual_digits": True}
        split = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in settings.get("tokenizer.ggml.merges", ())],
        },
    }
    return json.dumps(document, ensure_ascii=False).encode()


class _Reader:
    """A place in the bytes of the file, which only moves forward while the header is read."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path, self.data, self.at = path, data, 0

    def header(self) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, int]]]:
        """The settings, and (shape, type, first byte) of every tensor by its name."""
        if self._take(4) != MAGIC:
            raise UserError(str(self.path), "is no GGUF file", "give a .gguf file")
        version = self._number("I")
        if version not in (2, 3):
            raise UserError(str(self.path), f"has version {version} of the format", "convert it with a newer llama.cpp")
        num_tensors, num_settings = self._count(), self._count()
        settings = {self._string(): self._value(self._number("I")) for _ in range(num_settings)}
        found = []
        for _ in range(num_tensors):
            name = self._string()
            num_dims = self._number("I")
            if num_dims > 4:
                raise _corrupt(self.path, f"{name} has {num_dims} dims")
            dims = tuple(self._number("Q") for _ in range(num_dims))
            found.append((name, dims[::-1], self._number("I"), self._number("Q")))
        alignment = settings.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 4096:
            raise _corrupt(self.path, f"has the alignment {alignment!r}")
        base = -(-self.at // alignment) * alignment
        return settings, {name: (shape, kind, base + offset) for name, shape, kind, offset in found}

    def tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> np.ndarray:
        """Its values as float32."""
        if kind not in _TYPES:
            raise UserError(f"{name} ({self.path})", f"has the type {kind}", f"lakh reads {_known_types()}")
        type_name, block, block_bytes = _TYPES[kind]
        values = math.prod(shape)
        size_bytes = values // block * block_bytes
        if values % block or start + size_bytes > len(self.data):
            raise _corrupt(self.path, f"{name} reaches beyond the end of the file, or is no whole number of blocks")
        raw = np.asarray(self.data[start : start + size_bytes])
        return _dequantize(type_name, raw.reshape(-1, block_bytes) if block > 1 else raw).reshape(shape)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._number("I"), self._count()
            if inner in _SCALARS:
                form = np.dtype(f"<{_SCALARS[inner]}")
                return np.frombuffer(self._take(count * form.itemsize), form).tolist()
            return [self._value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise _corrupt(self.path, f"has a setting of type {kind}")
        return self._number(_SCALARS[kind])

    def _string(self) -> str:
        try:
            return self._take(self._count()).decode()
        except UnicodeDecodeError:
            raise _corrupt(self.path, "has a string that is not UTF-8") from None

    def _count(self) -> int:
        count = self._number("Q")
        if count > MOST_ITEMS:
            raise _corrupt(self.path, f"claims {count:,} items")
        return count

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(form)))[0]

    def _take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise _corrupt(self.path, "ends in the middle of its header")
        self.at += count
        return self.data[self.at - count : self.at].tobytes()


# --- numbers -------------------------------------------------------------------------------------------------


def _dequantize(kind: str, raw: np.ndarray) -> np.ndarray:
    """float32 values of some blocks: raw is bytes, one row per block where a block has more than one value."""
    if kind == "F32":
        return raw.view("<f4").copy()
    if kind == "F16":
        return raw.view("<f2").astype(np.float32)
    if kind == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if kind == "Q6_K":
        return _q6_k(raw)
    scale = raw[:, :2].copy().view("<f2").astype(np.float32)
    if kind == "Q8_0":
        return scale * raw[:, 2:].view(np.int8).astype(np.float32)
    has_minimum = kind.endswith("_1")
    body = 4 if has_minimum else 2
    low = raw[:, -16:]
    quants = np.concatenate((low & 15, low >> 4), axis=1).astype(np.int16)  # value i and i + 16 share a byte
    if kind.startswith("Q5"):
        bits = np.unpackbits(raw[:, body : body + 4], axis=1, bitorder="little")
        quants |= bits.astype(np.int16) << 4
    if has_minimum:
        return scale * quants + raw[:, 2:4].copy().view("<f2").astype(np.float32)
    return scale * (quants - (16 if kind.startswith("Q5") else 8))


def _q6_k(raw: np.ndarray) -> np.ndarray:
    """256 values: 128 bytes of low 4 bits, 64 bytes of high 2 bits, 16 scales of 8 bits, one scale for all."""
    low, high = raw[:, :128].reshape(-1, 2, 2, 32), raw[:, 128:192].reshape(-1, 2, 1, 32)
    scales = raw[:, 192:208].view(np.int8).astype(np.float32)
    scale = raw[:, 208:210].copy().view("<f2").astype(np.float32)
    low4 = np.concatenate((low & 15, low >> 4), axis=2)  # four rows of 32 in each half
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    quants = (low4 | (((high >> shifts) & 3) << 4)).astype(np.int8) - 32
    values = quants.reshape(-1, 16, 16).astype(np.float32) * scales[:, :, None]
    return (values.reshape(-1, 256) * scale).astype(np.float32)


def _known_types() -> str:
    return ", ".join(name for name, _, _ in _TYPES.values())


def _corrupt(path: Path, found: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(str(path), found, "download the file again")
