"""Bits per byte of held-out code for each format of the weights and the KV cache (quantization.py is the command)."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from bench.decode import llama_cpp
from bench.harness import BenchRow, SystemFailed
from lakh.server.model import weights as model_weights
from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.inference import InferenceModel, Precision, SequenceChunk, can_keep_stored
from lakh.server.model.kv_cache import PagedCache
from lakh.server.model.runner import KvDtype
from lakh.server.model.weights import LoadedModel
from lakh.tokens.tokenizer import Tokenizer
from lakh.workloads.code.formats import gguf

__all__ = ["bits_per_byte", "measure"]

PRECISIONS: tuple[Precision, ...] = ("f32", "int8", "int4")
"""Of the engine, from the weights as they are."""


def bits_per_byte(
    loaded: LoadedModel, precision: Precision, texts: Sequence[str], tokens: int, kv_dtype: KvDtype = "auto"
) -> tuple[float, int]:
    """Of the first `tokens` tokens of each text but the first, and the bytes of weights that a step reads. Every token
    attends to keys and values as the cache holds them.
    """
    tokenizer, device = Tokenizer.load(loaded.tokenizer_json), torch.device("cpu")
    network = InferenceModel(loaded.spec, loaded.weights, tokenizer.vocab_size, device, precision)
    dtype = torch.int8 if kv_dtype == "int8" else network.dtype
    cache = PagedCache(loaded.spec, -(-tokens // BLOCK_TOKENS) + 1, device=device, dtype=dtype)
    bits = num_bytes = 0.0
    for text in texts:
        ids = [*tokenizer.begin_ids, *tokenizer.encode(text)][: min(tokens, loaded.spec.context)]
        chunk = SequenceChunk(ids, 0, list(range(cache.num_blocks)), len(ids))
        scores = network.forward([chunk], cache).float().log_softmax(-1)
        bits -= float(scores[:-1].gather(1, torch.tensor(ids[1:])[:, None]).sum()) / math.log(2)
        num_bytes += len(tokenizer.decode(ids[1:]).encode())
    return bits / num_bytes, network.weight_bytes


def measure(
    loaded: LoadedModel,
    formats: Sequence[str],
    texts: Sequence[str],
    tokens: int,
    build: Path | None,
    progress: Callable[[str], object],
) -> Iterator[BenchRow]:
    def row(
        name: str,
        model: LoadedModel,
        precision: Precision,
        file_bytes: int | None = None,
        kv_dtype: KvDtype = "auto",
    ) -> BenchRow:
        progress(name)
        found, step_bytes = bits_per_byte(model, precision, texts, tokens, kv_dtype)
        return {"format": name, "bits_per_byte": found, "step_bytes": step_bytes, "file_bytes": file_bytes}

    for precision in PRECISIONS:
        yield row(f"lakh {precision}", loaded, precision)
        if not loaded.spec.is_latent:
            yield row(f"lakh {precision}, KV cache int8", loaded, precision, kv_dtype="int8")
    for name in formats:
        with tempfile.TemporaryDirectory(prefix="lakh-quantization-") as folder:
            path = Path(folder) / "model.gguf"
            gguf.save(path, "bench", loaded.spec, loaded.weights, loaded.tokenizer_json, quantization=name)
            files = {f"{name} of lakh export": path}
            if build is not None and name.startswith("q"):
                try:
                    theirs = llama_cpp.convert(loaded.spec, loaded.weights, loaded.tokenizer_json, name, build)
                    files[f"{name} of llama-quantize"] = theirs
                except SystemFailed as error:
                    yield {"format": f"{name} of llama-quantize", "failed": str(error)}
            for title, file in files.items():
                model = model_weights.read(file)
                is_stored = can_keep_stored(model.spec, model.weights, torch.device("cpu"))
                yield row(title, model, "stored" if is_stored else "f32", file.stat().st_size)
