"""llama.cpp as a peer: the same weights in a GGUF file.

It runs in process (wheel `xllamacpp`), or as the `llama-bench` of a build. A wheel is compiled for any CPU of
its kind: that of aarch64 has no dot-product instructions, so a build on the machine itself is the stronger peer:

    cmake -B build -DGGML_NATIVE=ON && cmake --build build --target llama-bench llama-quantize
    lakh bench decode MODEL --systems lakh-int8,llama.cpp-q8_0 --llama-cpp build/bin
"""

from __future__ import annotations

import atexit
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from bench.harness import SystemFailed, measure_process
from lakh.errors import UserError
from lakh.spec.model import Model
from lakh.workloads.code.formats import gguf

__all__ = ["convert", "require_build", "start", "start_build", "wheel_features"]

RUN_TIMEOUT_S = 600.0


def require_build(folder: str) -> Path:
    """The folder with the programs of a build."""
    missing = [name for name in ("llama-bench", "llama-quantize") if not (Path(folder) / name).is_file()]
    if missing:
        raise UserError(f"--llama-cpp {folder}", f"has no {' and no '.join(missing)}", "name the bin folder of a build")
    return Path(folder)


def convert(
    spec: Model, weights: Mapping[str, Tensor], tokenizer_json: Path, quantization: str, build: Path | None
) -> Path:
    """The weights as a GGUF file that is removed at exit, quantized by the build's own program if there is one."""
    scratch = tempfile.TemporaryDirectory(prefix="lakh-gguf-")
    atexit.register(scratch.cleanup)
    path, quantized = Path(scratch.name) / "model.gguf", Path(scratch.name) / f"{quantization}.gguf"
    is_theirs = build is not None and quantization != "f32"
    own = "f32" if is_theirs else quantization
    try:
        gguf.save(path, "bench", spec, weights, Path(tokenizer_json), quantization=own)
    except UserError as error:
        raise SystemFailed(str(error)) from None
    if build is None or not is_theirs:
        return path
    command = [str(build / "llama-quantize"), str(path), str(quantized), quantization.upper()]
    measure_process(command, timeout_s=RUN_TIMEOUT_S)
    path.unlink()
    return quantized


def wheel_features() -> str:
    """The instruction sets that the wheel was compiled for."""
    import xllamacpp

    return ", ".join(re.findall(r"(\w+) = 1", xllamacpp.get_system_info()))


def start(path: Path, prompt: list[int], threads: int) -> Callable[[int], None]:
    """A function that generates N tokens after the prompt, with the wheel."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = str(path)
    options.n_ctx = max(len(prompt) + 512, 1024)
    options.n_parallel = 1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    options.warmup = False
    options.verbosity = -1
    try:
        server = xllamacpp.Server(options)
    except RuntimeError as error:
        raise SystemFailed(f"llama.cpp does not load {path.name}: {error}") from None

    def generate(count: int) -> None:
        request = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        response = server.handle_completions(request)
        made = (json.loads(response) if isinstance(response, str | bytes) else response)["usage"]["completion_tokens"]
        if made != count:
            raise SystemFailed(f"generated {made} of {count} tokens")

    return generate


def start_build(build: Path, path: Path, prompt: list[int], threads: int) -> Callable[[int], tuple[float, float]]:
    """A function that generates N tokens after as many prompt tokens, with `llama-bench`; returns wall and CPU seconds.

    Wall seconds are llama-bench's own, without loading the model. CPU seconds are its process's, with loading and one
    round of warm-up: both are the same for every N, so that the difference of two N is exact.
    """

    def generate(count: int) -> tuple[float, float]:
        shape = ["-p", "0", "-n", "0", "-pg", f"{len(prompt)},{count}", "-t", str(threads), "-r", "1"]
        command = [str(build / "llama-bench"), "-m", str(path), *shape, "-o", "json"]
        usage = measure_process(command, timeout_s=RUN_TIMEOUT_S)
        (found,) = json.loads(usage.stdout)
        return found["avg_ns"] / 1e9, usage.cpu_s

    return generate
