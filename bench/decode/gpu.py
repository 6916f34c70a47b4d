"""Decoding steps on one GPU: correctness of the kernels, and their share of the memory bandwidth.

    PYTHONPATH=src python3 -m bench.decode.gpu [--precision bf16|fp8|int4] [--steps | --quick | --attention]

Random weights in the 1.2B shape. First the captured graph against the plain torch path of the same network (scores,
relative error), then milliseconds per step at batch 1 .. 64 after 512 and 2,048 tokens, with and without programmatic
dependent launch, and the tiles that were chosen (a single sequence: as one kernel, if that is faster). With --steps
instead: steps of several tokens of a sequence (prompts and drafted tokens) as one graph; with --quick a few of both.
"""

import argparse
import dataclasses
import time
from typing import Any

import torch

from bench.decode.speed import SHAPES, read_Bps
from lakh.server.model.gpu import decode, quantized
from lakh.server.model.gpu.decode import Decoder
from lakh.server.model.gpu.prefill import PrefillGraphs
from lakh.server.model.inference import InferenceModel, SequenceChunk
from lakh.server.model.kv_cache import PagedCache
from lakh.workloads.code.formats import hf

CASES = [(1, 5), (1, 15), (1, 60), (1, 250), (1, 500), (1, 1500), (8, 1), (8, 4), (32, 4)]  # rows, tokens of each


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=SHAPES["1.2b"].layers)
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp8", "int4"])
    parser.add_argument("--profile", action="store_true", help="the kernels of a step of 64 sequences")
    parser.add_argument("--attention", action="store_true", help="tiles of attention in a batch of 64, instead")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    spec = dataclasses.replace(SHAPES["1.2b"], layers=options.layers)
    device = torch.device("cuda")
    torch.manual_seed(0)
    began_s = time.perf_counter()
    weights = {
        name: torch.randn(size, device=device, dtype=torch.bfloat16) * 0.03 if len(size) > 1 else torch.ones(size)
        for name, size in hf.shapes(spec).items()
    }
    network = InferenceModel(spec, weights, spec.vocab, device, options.precision)
    del weights
    copy_Bps = read_Bps("cuda")
    print(f"ready after {time.perf_counter() - began_s:.1f} s; copy {copy_Bps / 1e12:.2f} TB/s", flush=True)
    cache = PagedCache(spec, 64 * 160 + 1, device=device, dtype=torch.bfloat16)
    if options.attention:
        attention_tiles(network, cache)
        return
    exact = InferenceModel(spec, _weights(network), spec.vocab, device, "f32")
    if options.steps or options.quick:
        steps(network, exact, cache, [(1, 15)] if options.quick else CASES)
    for pdl in [] if options.steps else [True] if options.quick else [False, True]:
        try:
            decoder = Decoder(network, cache, pdl=pdl)
            check(network, exact, cache, decoder)
            measure(network, decoder, copy_Bps, pdl, [512] if options.quick else [512, 2048])
            if options.profile:
                profile(decoder)
        except Exception as error:  # noqa: BLE001 - the other variant is still worth a line
            print(f"pdl {pdl}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def steps(network: InferenceModel, exact: InferenceModel, cache: PagedCache, cases: list[tuple[int, int]]) -> None:
    """Prompts after a cached prefix, and drafted tokens of several sequences, as one graph: correctness and speed."""
    chunks = PrefillGraphs(network, cache)
    prompt = torch.randint(0, network.spec.vocab, (2048,)).tolist()
    blocks = list(range(160))
    wide = PagedCache(network.spec, 162, device=network.device, dtype=torch.float32)
    for start, count in ((0, 300), (300, 15), (315, 200), (515, 5)):
        segment = SequenceChunk(prompt[start : start + count], start, blocks, min(count, 3))
        plain = network.forward([segment], cache).float()
        found = chunks.launch([segment]).logits.float().clone()
        expected = exact.forward([segment], wide)
        errors = [((scores - expected).norm() / expected.norm()).item() for scores in (found, plain)]
        words = "ok" if errors[0] < 1.2 * errors[1] else "WRONG"
        print(
            f"check {count} at {start}: error to float32: graph {errors[0]:.2e}, torch {errors[1]:.2e}: {words}",
            flush=True,
        )
    for rows, count in cases:
        start = 0 if count == 1500 else 1500
        segments = [
            SequenceChunk(prompt[:count], start, list(range(row * 128, row * 128 + 128)), min(count, 8))
            for row in range(rows)
        ]
        took_ms = {}
        for name, forward in (
            ("graph", lambda some: chunks.launch(some).logits),
            ("torch", lambda some: network.forward(some, cache)),
        ):
            if name == "graph" and not chunks.fits(segments):
                continue
            for _ in range(3):
                forward(segments)
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            for _ in range(10):
                forward(segments).argmax(-1).tolist()
            took_ms[name] = (time.perf_counter() - began_s) * 100
        print(
            f"{rows} rows x {count} tokens after {start}: " + ", ".join(f"{k} {v:.2f} ms" for k, v in took_ms.items()),
            flush=True,
        )


def _weights(network: InferenceModel) -> dict[str, torch.Tensor]:
    """The network's weights under the model's own names."""
    spec = network.spec
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    head = _as_float(network.head_matrix())
    state = {"embed.weight": network.embed, "norm.weight": network.norms[-1], "head.weight": head}
    for layer in range(spec.layers):
        fused = {name: _as_float(network.matrix(name, layer)) for name in ("qkv", "o", "gate_up", "down")}
        q, k, v = fused["qkv"].split([queries, keys, keys])
        gate, up = fused["gate_up"].split([spec.ffn, spec.ffn])
        parts = {"attention.q": q, "attention.k": k, "attention.v": v, "attention.o": fused["o"]}
        parts |= {"ffn.gate": gate, "ffn.up": up, "ffn.down": fused["down"]}
        parts |= {"attention_norm": network.norms[2 * layer], "ffn_norm": network.norms[2 * layer + 1]}
        state |= {f"blocks.{layer}.{name}.weight": tensor for name, tensor in parts.items()}
    return state


def _as_float(matrix: Any) -> torch.Tensor:
    """The numbers that a matrix stands for."""
    return matrix if isinstance(matrix, torch.Tensor) else quantized.dequantize(matrix, torch.float32)


def check(network: InferenceModel, exact: InferenceModel, cache: PagedCache, decoder: Decoder) -> None:
    for rows in (1, 2, 5):
        prompts = torch.randint(0, network.spec.vocab, (rows, 300)).tolist()
        blocks = [list(range(row * 20, row * 20 + 20)) for row in range(rows)]
        lengths = [300 - 37 * row for row in range(rows)]
        for row in range(rows):
            network.forward([SequenceChunk(prompts[row][: lengths[row]], 0, blocks[row], 0)], cache)
        tokens = [7 + row for row in range(rows)]
        segments = [SequenceChunk([tokens[row]], lengths[row], blocks[row], 1) for row in range(rows)]
        plain = network.forward(segments, cache).float()
        _, found = decoder.run(tokens, lengths, blocks, 1)
        wide = PagedCache(network.spec, 128, device=network.device, dtype=torch.float32)
        whole = [[*prompts[row][: lengths[row]], tokens[row]] for row in range(rows)]
        expected = exact.forward([SequenceChunk(whole[row], 0, blocks[row], 1) for row in range(rows)], wide)
        errors = [((scores.float() - expected).norm() / expected.norm()).item() for scores in (found, plain)]
        words = "ok" if errors[0] < 1.2 * errors[1] else "WRONG"
        print(
            f"check rows {rows}: error to float32: graph {errors[0]:.2e}, torch bf16 {errors[1]:.2e}: {words}",
            flush=True,
        )


def attention_tiles(network: InferenceModel, cache: PagedCache) -> None:
    blocks = [list(range(row * 160, row * 160 + 160)) for row in range(64)]
    arguments = ([5] * 64, [512] * 64, blocks)
    for programs in (decode.SPLIT_PROGRAMS, 1024):
        for tile in [(64, 4, 3), (64, 4, 4), (64, 4, 2), (32, 4, 4), (128, 4, 2), (128, 8, 2), (64, 2, 3), (32, 2, 4)]:
            decode.SPLIT_PROGRAMS, decode.ATTENTION_TILE = programs, tile
            try:
                decoder = Decoder(network, cache)
                decoder.run(*arguments, 8)
                torch.cuda.synchronize()
                began_s = time.perf_counter()
                for _ in range(12):
                    decoder.run(*arguments, 8)
                step_ms = (time.perf_counter() - began_s) / 96 * 1e3
                print(f"attention {tile}, {programs} programs: {step_ms:.3f} ms a step of 64", flush=True)
            except Exception as error:  # noqa: BLE001 - too much shared memory, for example
                print(f"attention {tile}, {programs} programs: {type(error).__name__}: {str(error)[:120]}", flush=True)


def profile(decoder: Decoder) -> None:
    blocks = [list(range(row * 160, row * 160 + 160)) for row in range(64)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        decoder.run([5] * 64, [512] * 64, blocks, 8)
        torch.cuda.synchronize()
    print(found.key_averages().table(sort_by="device_time_total", row_limit=16, max_name_column_width=60), flush=True)


def measure(network: InferenceModel, decoder: Decoder, copy_Bps: float, pdl: bool, positions: list[int]) -> None:
    for rows in (1, 2, 8, 64):
        for position in positions:
            blocks = [list(range(row * 160, row * 160 + 160)) for row in range(rows)]
            arguments = ([5] * rows, [position] * rows, blocks)
            decoder.run(*arguments, 8)
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            for _ in range(12):
                decoder.run(*arguments, 8)
            step_s = (time.perf_counter() - began_s) / 96
            kv_bytes = rows * position * network.spec.kv_bytes_per_token(2)
            share = (network.weight_bytes + kv_bytes) / step_s / copy_Bps
            print(
                f"pdl {pdl} rows {rows} at {position}: {step_s * 1e3:.3f} ms, {rows / step_s:,.0f} tok/s, "
                f"{share:.0%} of bandwidth",
                flush=True,
            )
    print(f"megakernel tried: {decoder._megakernel is not None}", flush=True)
    if decoder._single is not None:
        print({"/".join(map(str, key)): config for key, config in decoder._single.tiles.items()}, flush=True)


if __name__ == "__main__":
    main()
