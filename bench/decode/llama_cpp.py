"""llama.cpp as a peer: the same weights in a GGUF file, run in process by the wheel `xllamacpp`."""

from __future__ import annotations

import atexit
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from bench.harness import SystemFailed
from lakh.errors import UserError
from lakh.spec.model import Model
from lakh.workloads.code.formats import gguf

__all__ = ["convert", "start"]


def convert(spec: Model, weights: Mapping[str, Tensor], tokenizer_json: Path, quantization: str) -> Path:
    """The weights as a GGUF file, "f32" or "q8_0", which is removed at exit."""
    scratch = tempfile.TemporaryDirectory(prefix="lakh-gguf-")
    atexit.register(scratch.cleanup)
    path = Path(scratch.name) / "model.gguf"
    try:
        gguf.save(path, "bench", spec, weights, Path(tokenizer_json), quantize=quantization == "q8_0")
    except UserError as error:
        raise SystemFailed(str(error)) from None
    return path


def start(path: Path, prompt: list[int], threads: int) -> Callable[[int], None]:
    """A function that generates N tokens after the prompt."""
    import xllamacpp

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
