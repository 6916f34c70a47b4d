"""llama.cpp as a peer: the same weights in a float32 GGUF file, run in process by the wheel `xllamacpp`.

llama.cpp pairs rotary elements 2i and 2i + 1 where lakh pairs i and i + D/2, so the rows of q and k are reordered. The
file is temporary.
"""

from __future__ import annotations

import atexit
import json
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.harness import SystemFailed
from lakh.spec.model import Model

__all__ = ["start", "write_gguf"]

_NAMES = {
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.o": "attn_output",
    "attention_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "ffn.gate": "ffn_gate",
    "ffn.up": "ffn_up",
    "ffn.down": "ffn_down",
}
_OUTER = {"embed": "token_embd", "norm": "output_norm", "head": "output"}
ALIGNMENT = 32


def start(
    spec: Model, weights: Mapping[str, Tensor], tokenizer_json: Path, prompt: list[int], threads: int
) -> Callable[[int], None]:
    import xllamacpp

    scratch = tempfile.TemporaryDirectory(prefix="lakh-gguf-")
    atexit.register(scratch.cleanup)
    path = Path(scratch.name) / "model.gguf"
    write_gguf(path, spec, weights, json.loads(Path(tokenizer_json).read_bytes()))
    options = xllamacpp.CommonParams()
    options.model.path = str(path)
    options.n_ctx = max(len(prompt) + 512, 1024)
    options.n_parallel = 1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    options.warmup = False
    options.verbosity = -1
    server = xllamacpp.Server(options)

    def generate(count: int) -> None:
        request = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        response = server.handle_completions(request)
        made = (json.loads(response) if isinstance(response, str | bytes) else response)["usage"]["completion_tokens"]
        if made != count:
            raise SystemFailed(f"generated {made} of {count} tokens")

    return generate


def write_gguf(path: Path, spec: Model, weights: Mapping[str, Tensor], tokenizer: dict[str, Any]) -> None:
    """Version 3 of the format: metadata, table of tensors, tensors; all float32."""
    tensors = {_gguf_name(name): _reordered(name, tensor.float(), spec) for name, tensor in weights.items()}
    metadata = _metadata(spec, tokenizer)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_text(key) + value for key, value in metadata.items())
    offset = 0
    for name, tensor in tensors.items():
        shape = tuple(reversed(tensor.shape))
        head += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % ALIGNMENT))
        for tensor in tensors.values():
            data = tensor.contiguous().numpy().tobytes()
            file.write(data + bytes(-len(data) % ALIGNMENT))


def _gguf_name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".", 2)
    if parts[0] == "blocks":
        return f"blk.{parts[1]}.{_NAMES[parts[2]]}.weight"
    return f"{_OUTER[parts[0]]}.weight"


def _reordered(name: str, tensor: Tensor, spec: Model) -> Tensor:
    if name.endswith(("attention.q.weight", "attention.k.weight")):
        rows = tensor.view(-1, 2, spec.head_dim // 2, tensor.shape[1])
        return rows.transpose(1, 2).reshape(tensor.shape)
    return tensor.to(torch.float32)


def _metadata(spec: Model, tokenizer: dict[str, Any]) -> dict[str, bytes]:
    vocab = dict(tokenizer["model"]["vocab"])
    special = {item["content"]: item["id"] for item in tokenizer["added_tokens"]}
    words = {number: word for word, number in [*vocab.items(), *special.items()]}
    tokens = [words.get(number, f"[{number}]") for number in range(spec.vocab)]
    kinds = [3 if token in special else 1 for token in tokens]
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in tokenizer["model"]["merges"]]
    numbers = {
        "context_length": spec.context,
        "embedding_length": spec.width,
        "block_count": spec.layers,
        "feed_forward_length": spec.ffn,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads,
        "rope.dimension_count": spec.head_dim,
        "vocab_size": spec.vocab,
    }
    metadata = {"general.architecture": _string("llama"), "general.file_type": _number(0)}
    metadata |= {f"llama.{key}": _number(value) for key, value in numbers.items()}
    metadata["llama.rope.freq_base"] = struct.pack("<If", 6, spec.rope_base)
    metadata["llama.attention.layer_norm_rms_epsilon"] = struct.pack("<If", 6, spec.norm_eps)
    metadata["tokenizer.ggml.model"] = _string("gpt2")
    metadata["tokenizer.ggml.pre"] = _string("smollm")
    metadata["tokenizer.ggml.tokens"] = _texts(tokens)
    metadata["tokenizer.ggml.token_type"] = struct.pack(f"<IIQ{len(kinds)}i", 9, 5, len(kinds), *kinds)
    metadata["tokenizer.ggml.merges"] = _texts(merges)
    metadata["tokenizer.ggml.eos_token_id"] = _number(special.get("<|endoftext|>", 0))
    metadata["tokenizer.ggml.bos_token_id"] = _number(special.get("<|endoftext|>", 0))
    metadata["tokenizer.ggml.add_bos_token"] = struct.pack("<I?", 7, False)
    return metadata


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _string(text: str) -> bytes:
    return struct.pack("<I", 8) + _text(text)


def _number(value: int) -> bytes:
    return struct.pack("<II", 4, value)


def _texts(texts: list[str]) -> bytes:
    return struct.pack("<IIQ", 9, 8, len(texts)) + b"".join(_text(text) for text in texts)
