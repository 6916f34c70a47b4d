"""The time to send new weights from a trainer to an engine, and the pause in which no step runs.

    python -m bench.serve.weight_sync [--shape 135m|1.2b] [--backend gloo,c3] [--repeats 3]

A trainer's process (rank 0, CPU tensors) sends bf16 weights to an engine's (rank 1, on the GPU where there is one) on
the same machine. Prints, for each backend, the best of the repeats: milliseconds of the transfer, during which the
engine keeps working, of the swap, during which it does not, and of staging the same weights from memory.
"""

import argparse
import datetime
import json
import subprocess
import tempfile
import time

import torch
import torch.distributed as dist

from bench.decode.speed import SHAPES, tokenizer_json
from bench.harness import module_command, module_environment
from lakh.server.engine import Engine
from lakh.server.weights.transfer import WeightReceiver, send
from lakh.tokens.tokenizer import Tokenizer
from lakh.workloads.code.formats import hf


def weights(shape: str) -> dict[str, torch.Tensor]:
    return {name: torch.full(size, 0.01, dtype=torch.bfloat16) for name, size in hf.shapes(SHAPES[shape]).items()}


def rank(number: int, options: argparse.Namespace) -> None:
    if options.backend == "c3":
        from lakh.c3.torch.backend import register

        register()
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)
    where = f"file://{options.store}"
    dist.init_process_group(options.backend, init_method=where, rank=number, world_size=2, timeout=limit)
    spec, state = SHAPES[options.shape], weights(options.shape)
    if number == 0:
        for version in range(options.repeats):
            send(state.__getitem__, spec, version=version, src=0)
    else:
        engine = Engine("m", spec, state, Tokenizer(tokenizer_json(spec.vocab)), cache_tokens=1, precision="bf16")
        receiver = WeightReceiver(engine, src=0)
        got = [receiver.receive() for _ in range(options.repeats)]
        began_s = time.perf_counter()
        staged = engine.stage()
        staged.load(state)
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        row = {"shape": options.shape, "backend": options.backend, "device": engine.device.type}
        row |= {"bytes": 2 * spec.parameters, "stage_ms": (time.perf_counter() - began_s) * 1e3}
        row |= {
            "transfer_ms": min(one.transfer_s for one in got) * 1e3,
            "swap_ms": min(one.swap_s for one in got) * 1e3,
        }
        print(json.dumps({key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()}))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="135m", choices=list(SHAPES))
    parser.add_argument("--backend", default="gloo,c3")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    options = parser.parse_args()
    if options.rank is not None:
        rank(options.rank, options)
        return
    for backend in options.backend.split(","):
        with tempfile.TemporaryDirectory() as folder:
            command = module_command("bench.serve.weight_sync", "--shape", options.shape, "--backend", backend)
            command += ["--repeats", str(options.repeats), "--store", f"{folder}/store", "--rank"]
            both = [subprocess.Popen([*command, str(number)], env=module_environment()) for number in range(2)]
            codes = [one.wait(300) for one in both]
            if any(codes):
                print(json.dumps({"shape": options.shape, "backend": backend, "exit_codes": codes}))


if __name__ == "__main__":
    main()
