"""Writing GGUF, the one-file format of llama.cpp: what gguf.py reads, from lakh's names and tokenizer.

Matrices become 8-bit integers in blocks of 32 with a 16-bit scale each (Q8_0: 8.5 bits a weight), norms stay float32.
The rows of query and key are put into the order in which llama.cpp rotates them. The tokenizer must be the one that
lakh trains (byte-level BPE, digits one by one, which GGUF calls "smollm"); its fill-in-the-middle marks are named, so
that llama.cpp's /infill finds them.

Fails with UserError for what the format cannot say: a norm on queries and keys, another kind of tokenizer.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lakh import storage
from lakh.errors import UserError
from lakh.spec.model import Model
from lakh.workloads.code.formats.gguf import MAGIC

__all__ = ["quantize_q8_0", "save"]

ALIGNMENT = 32
BLOCK = 32
F32, Q8_0 = 0, 8
FILE_TYPE_MOSTLY_Q8_0 = 7
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
NORMAL, CONTROL = 1, 3

_NAMES = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.o": "attn_output",
    "ffn_norm": "ffn_norm",
    "ffn.gate": "ffn_gate",
    "ffn.up": "ffn_up",
    "ffn.down": "ffn_down",
}
_FIM = {"<|fim_prefix|>": "fim_pre", "<|fim_suffix|>": "fim_suf", "<|fim_middle|>": "fim_mid", "<|fim_pad|>": "fim_pad"}
_FIM |= {"<|repo_name|>": "fim_rep", "<|file_sep|>": "fim_sep"}


def save(
    out: str | Path,
    name: str,
    spec: Model,
    weights: Mapping[str, Tensor],
    tokenizer_json: Path,
    *,
    quantize: bool = True,
) -> int:
    """Write one .gguf file, whole or not at all; returns its bytes. `quantize=False` keeps float32."""
    if spec.qk_norm:
        raise UserError("model.qk_norm", "GGUF's llama has no norm on queries and keys", "export it with --format hf")
    settings = _settings(name, spec, json.loads(tokenizer_json.read_bytes()))
    tensors = [(_their_name(ours), *_stored(ours, tensor, spec, quantize)) for ours, tensor in weights.items()]
    head = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(settings))]
    head += [_string(key) + value for key, value in settings.items()]
    offset = 0
    for theirs, shape, kind, data in tensors:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head.append(_string(theirs) + dims + struct.pack("<IQ", kind, offset))
        offset += _aligned(len(data))
    header = b"".join(head)
    with storage.create(out) as file:
        file.write(header.ljust(_aligned(len(header)), b"\0"))
        for _, _, _, data in tensors:
            file.write(data.ljust(_aligned(len(data)), b"\0"))
    return _aligned(len(header)) + offset


def quantize_q8_0(values: np.ndarray) -> bytes:
    """Blocks of 32 values of a row: the largest over 127 as float16, then the values in units of it."""
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, BLOCK)
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype("<f2")
    unit = scale.astype(np.float32)
    quants = np.rint(np.divide(blocks, unit, out=np.zeros_like(blocks), where=unit > 0)).clip(-127, 127)
    return np.concatenate([scale.view(np.uint8), quants.astype(np.int8).view(np.uint8)], axis=1).tobytes()


def _stored(name: str, tensor: Tensor, spec: Model, quantize: bool) -> tuple[tuple[int, ...], int, bytes]:
    """(shape, type, bytes) of a tensor in the file."""
    values = tensor.detach().float().cpu().numpy()
    if name.endswith(("attention.q.weight", "attention.k.weight")):
        values = _pairs_first(values, spec.heads if name.endswith("q.weight") else spec.kv_heads)
    if values.ndim == 1 or values.shape[-1] % BLOCK or not quantize:
        return values.shape, F32, np.ascontiguousarray(values, "<f4").tobytes()
    return values.shape, Q8_0, quantize_q8_0(values)


def _pairs_first(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from first elements, then second elements, to neighbouring pairs."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _their_name(ours: str) -> str:
    stem = ours.removesuffix(".weight")
    if stem.startswith("blocks."):
        _, number, inner = stem.split(".", 2)
        return f"blk.{number}.{_NAMES[inner]}.weight"
    return f"{_NAMES[stem]}.weight"


def _settings(name: str, spec: Model, tokenizer: Mapping[str, Any]) -> dict[str, bytes]:
    """The settings of the file, each already in the form of the format."""
    vocab: dict[str, int] = dict(tokenizer["model"]["vocab"])
    if tokenizer["model"].get("type") != "BPE" or '"Digits"' not in json.dumps(tokenizer.get("pre_tokenizer")):
        raise UserError("tokenizer.json", "is not the kind that lakh trains", "export it with --format hf")
    special = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    vocab |= special
    by_id = {number: token for token, number in vocab.items()}
    tokens = [by_id.get(number, f"<|unused_{number}|>") for number in range(spec.vocab)]
    kinds = [CONTROL if token in special or number not in by_id else NORMAL for number, token in enumerate(tokens)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    found = {
        "general.architecture": _text("llama"),
        "general.name": _text(name),
        "general.alignment": _uint32(ALIGNMENT),
        "general.file_type": _uint32(FILE_TYPE_MOSTLY_Q8_0),
        "general.quantization_version": _uint32(2),
        "llama.block_count": _uint32(spec.layers),
        "llama.context_length": _uint32(spec.context),
        "llama.embedding_length": _uint32(spec.width),
        "llama.feed_forward_length": _uint32(spec.ffn),
        "llama.attention.head_count": _uint32(spec.heads),
        "llama.attention.head_count_kv": _uint32(spec.kv_heads),
        "llama.attention.layer_norm_rms_epsilon": struct.pack("<If", _FLOAT32, spec.norm_eps),
        "llama.rope.freq_base": struct.pack("<If", _FLOAT32, spec.rope_base),
        "llama.rope.dimension_count": _uint32(spec.head_dim),
        "llama.vocab_size": _uint32(spec.vocab),
        "tokenizer.ggml.model": _text("gpt2"),
        "tokenizer.ggml.pre": _text("smollm"),
        "tokenizer.ggml.tokens": _strings(tokens),
        "tokenizer.ggml.token_type": struct.pack("<IIQ", _ARRAY, _INT32, len(kinds)) + np.array(kinds, "<i4").tobytes(),
        "tokenizer.ggml.merges": _strings(merges),
    }
    roles = {**_FIM, "<|endoftext|>": "eos"}
    found |= {f"tokenizer.ggml.{roles[mark]}_token_id": _uint32(special[mark]) for mark in roles if mark in special}
    return found | {"tokenizer.ggml.add_bos_token": struct.pack("<I?", _BOOL, False)}


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _text(text: str) -> bytes:
    return struct.pack("<I", _STRING) + _string(text)


def _uint32(number: int) -> bytes:
    return struct.pack("<II", _UINT32, number)


def _strings(texts: list[str]) -> bytes:
    def parts() -> Iterator[bytes]:
        yield struct.pack("<IIQ", _ARRAY, _STRING, len(texts))
        yield from map(_string, texts)

    return b"".join(parts())


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
