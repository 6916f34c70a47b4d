"""llama.cpp in this process (wheel xllamacpp): the reference for GGUF files that lakh writes and reads."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0


class LlamaCpp:
    def __init__(self, path: Path, context: int = 128) -> None:
        import xllamacpp

        options = xllamacpp.CommonParams()
        options.model.path = str(path)
        options.n_ctx, options.n_parallel, options.warmup, options.verbosity = context, 1, False, -1
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
        options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        options.port, options.n_threads_http, options.cache_ram_mib = 0, 1, 0
        self._server = xllamacpp.Server(options)

    def _post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"{self._server.listening_address}/{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)

    def encode(self, text: str, *, begin: bool = False) -> list[int]:
        """The ids of a text, without special tokens in it."""
        found: list[int] = self._post("tokenize", content=text, add_special=begin, parse_special=False)["tokens"]
        return found

    def decode(self, ids: list[int]) -> str:
        return str(self._post("detokenize", tokens=ids)["content"])

    def greedy(self, ids: list[int], num: int) -> list[int]:
        """The most probable continuation."""
        tokens: list[int] = self._complete(ids, num, return_tokens=True)["tokens"]
        return tokens

    def log_probabilities(self, ids: list[int], top: int) -> dict[int, float]:
        """Of the most probable next tokens, which must stand for whole characters."""
        (place,) = self._complete(ids, 1, n_probs=top)["completion_probabilities"]
        return {one["id"]: one["logprob"] for one in place["top_logprobs"]}

    def _complete(self, ids: list[int], num: int, **more: Any) -> Any:
        return self._post("completion", prompt=ids, n_predict=num, samplers=["top_k"], top_k=1, ignore_eos=True, **more)
