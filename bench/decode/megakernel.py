"""Steps of the megakernel with other constants, and what limits them, on one Hopper GPU.

    PYTHONPATH=src python3 -m bench.decode.megakernel --precision fp8 [--limits] [--phases] [BUSY_BYTES=65536 WGMMA=1]

Random weights in the 1.2B shape and a random KV cache; one sequence from position 512, a step as a CUDA graph, the best
of some bursts. A row for the constants as they are and one for each argument, which sets constants of
server/model/gpu/megakernel/__init__.py (those that are kept by bits: of these bits). The last column compares the
logits with those of the first row. With --limits also kernels that compute wrong numbers: one that awaits no flags of
other blocks, and one that awaits neither flags nor weights and loads none. With --phases each row is followed by the
cycles of a layer's phases: the mean of all blocks and layers, and those of each layer's fastest and slowest block.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bench.decode.speed import SHAPES
from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.gpu import megakernel
from lakh.server.model.gpu.graphs import GraphCapture
from lakh.server.model.gpu.megakernel import Megakernel
from lakh.server.model.gpu.quantized import BITS
from lakh.server.model.inference import InferenceModel
from lakh.server.model.kv_cache import PagedCache
from lakh.workloads.code.formats import hf

__all__ = ["MARKS", "NO_FLAGS", "NO_WEIGHTS", "PHASES", "changed", "constants_of", "phases"]

Edits = Sequence[tuple[str, str]]

POSITION, STEPS, BURSTS = 512, 32, 8
NO_FLAGS = (("if (missing & TAGS) continue;", ""), ("    if (ready) return;\n", "    return;\n"))
NO_WEIGHTS = (
    ("    const u32 all = LAYERS", "    return;\n    const u32 all = LAYERS"),
    ("wait_full(u32 n) const { wait(full + slot(n) * 8, n / SLOTS); }", "wait_full(u32) const {}"),
)
"""Texts of the source, and what takes their place."""

PHASES = (
    ("first weights of qkv", "    if (layer) acquire(ring, after_ffn"),
    ("norm of the input", "    multiply<Qkv, true>"),
    ("queries, keys, values", "ROLLED\n    for (int r = threadIdx.x; r < Qkv::rows()"),
    ("attention", "ROLLED\n    for (int item = blockIdx.x; item < ITEMS; item += BLOCKS) combine("),
    ("its splits", "    Weights<Out> of_out;"),
    ("first weights of output", "    load_activations<Out>"),
    ("attended", "    multiply<Out, false>"),
    ("output", "    add_and_release(residual, other_sums, o_scales"),
    ("first of gate and up", "    acquire(ring, after_attention"),
    ("norm of the residual", "    multiply<GateUp, true>"),
    ("gate and up", "ROLLED\n    for (int at = threadIdx.x; at < (2 * GateUp::lines()"),
    ("first weights of down", "    load_activations<Down>"),
    ("gated", "    multiply<Down, false>"),
    ("down", "    add_and_release(residual, other_sums, down_scales"),
)
"""Of a layer, in order: names, and the text of the source before which each ends."""
FIRST = "    const u32 round = first_round + layer;"
MARKED = 16  # numbers of a layer and block, in the last slots of the KV cache, which belong to no sequence
MARK = (
    "#define MARK(phase) if (threadIdx.x == 0) ((long long*)(values + (((u64)layer * KV_HEADS + blockIdx.x % KV_HEADS)"
    f" * slots + slots - PAGE) * HEAD_DIM))[blockIdx.x / KV_HEADS * {MARKED} + phase] = clock64();\n"
)
MARKS = (
    ('extern "C" __global__', MARK + 'extern "C" __global__'),
    (FIRST, "    MARK(0)\n" + FIRST),
    *((text, f"    MARK({i})\n{text}") for i, (_, text) in enumerate(PHASES, 1)),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp8", "int4"])
    parser.add_argument("--limits", action="store_true")
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("constants", nargs="*")
    options = parser.parse_args()
    with torch.inference_mode():
        steps = MegakernelSteps(options.precision)
        rows: list[tuple[str, dict[str, int], Edits]] = [("", {}, ())]
        rows += [(text, constants_of(text), ()) for text in options.constants]
        if options.limits:
            rows += [("no flags", {}, NO_FLAGS), ("no flags, no weights", {}, NO_FLAGS + NO_WEIGHTS)]
        for name, constants, edits in rows:
            print(f"{options.precision} {name or 'as it is'}: {steps.row(constants, edits)}", flush=True)
            if options.phases:
                steps.print_phases(constants, edits)


def constants_of(text: str) -> dict[str, int]:
    """NAME=NUMBER,NAME=NUMBER."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    unknown = [name for name, _, _ in pairs if not hasattr(megakernel, name)]
    if unknown:
        raise SystemExit(f"{unknown[0]} is no constant of {megakernel.__name__}")
    return {name: int(number) for name, _, number in pairs}


@contextmanager
def changed(bits: int, constants: Mapping[str, int], edits: Edits) -> Iterator[None]:
    """The megakernel's module with these constants and this source."""
    before = {name: getattr(megakernel, name) for name in (*constants, "source")}
    text = megakernel.source()
    for old, new in edits:
        if old not in text:
            raise SystemExit(f"the source has no {old!r} any more")
        text = text.replace(old, new)
    for name, number in constants.items():
        by_bits = isinstance(before[name], dict)
        setattr(megakernel, name, {**before[name], bits: number} if by_bits else number)
    megakernel.source = lambda: text
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(megakernel, name, value)


class MegakernelSteps:
    def __init__(self, precision: str) -> None:
        from lakh.server.model.gpu.decode import Decoder  # imports Triton

        spec, device = SHAPES["1.2b"], torch.device("cuda")
        torch.manual_seed(0)
        weights = {
            name: torch.randn(size, device=device, dtype=torch.bfloat16) * 0.02 if len(size) > 1 else torch.ones(size)
            for name, size in hf.shapes(spec).items()
        }
        self._network = InferenceModel(spec, weights, spec.vocab, device, precision)  # type: ignore[arg-type]
        self._bits = BITS.get(self._network.precision, 16)
        self._cache = PagedCache(spec, 257, device=device, dtype=torch.bfloat16)
        self._cache.keys_LKCD.normal_(), self._cache.values_LKCD.normal_()
        self._decoder = Decoder(self._network, self._cache, use_graphs=False)
        self._capture = GraphCapture(device)
        self._first: Tensor | None = None

    def row(self, constants: Mapping[str, int], edits: Edits) -> str:
        kernel = self._kernel(constants, edits)
        if isinstance(kernel, str):
            return kernel
        load = lambda: self._decoder.load_batch([7], [POSITION], [range(256)])  # noqa: E731
        batch = load()
        kernel(batch)
        logits = batch.logits.clone()
        self._first = logits if self._first is None else self._first
        apart = float((logits - self._first).norm() / self._first.norm())
        replay = self._capture(lambda: kernel(batch), prepare=batch.steps.zero_)
        best_ms = float("inf")
        for _ in range(BURSTS):
            load()
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            for _ in range(STEPS):
                replay()
            ended.record()
            ended.synchronize()
            best_ms = min(best_ms, began.elapsed_time(ended) / STEPS)
        return f"{best_ms:.4f} ms a step, {kernel.blocks} blocks, logits {apart:.1e} apart"

    def print_phases(self, constants: Mapping[str, int], edits: Edits) -> None:
        kernel = self._kernel(constants, (*edits, *MARKS))
        if isinstance(kernel, str):
            return
        batch = self._decoder.load_batch([7], [POSITION], [range(256)])
        for _ in range(STEPS):  # the marks are of the last
            kernel(batch)
        for name, *cycles in phases(self._cache.values_LKCD.cpu(), kernel.blocks):
            print(f"  {name:24}" + "".join(f" {count:8,.0f}" for count in cycles), flush=True)

    def _kernel(self, constants: Mapping[str, int], edits: Edits) -> Megakernel | str:
        with changed(self._bits, constants, edits):
            plan = Megakernel.plan(self._network)
            return plan if isinstance(plan, str) else Megakernel(self._network, self._cache, plan)


def phases(values_LKCD: Tensor, blocks: int) -> list[tuple[str, float, float, float]]:
    """From the marks in a KV cache: cycles of each phase, the mean of all blocks and layers, and the means over layers
    of the block that takes least and of that which takes longest."""
    layers, heads = values_LKCD.shape[:2]
    marks = values_LKCD[:, :, -BLOCK_TOKENS:].contiguous().view(torch.int64).reshape(layers, heads, -1, MARKED)
    marks_LBP = marks.transpose(1, 2).flatten(1, 2)[:, :blocks, : len(PHASES) + 1]
    cycles_LBP = marks_LBP.diff(dim=2).double()
    rows = [(name, cycles_LBP[:, :, i]) for i, (name, _) in enumerate(PHASES)]
    rows.append(("a layer", marks_LBP[:, :, 0].diff(dim=0).double()))
    return [(name, float(of.mean()), float(of.amin(1).mean()), float(of.amax(1).mean())) for name, of in rows]


if __name__ == "__main__":
    main()
