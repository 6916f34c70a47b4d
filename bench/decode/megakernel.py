"""Steps of the megakernel with other constants, and what limits them, on one Hopper GPU.

    PYTHONPATH=src python3 -m bench.decode.megakernel --precision fp8 [--limits] [BUSY_BYTES=65536,PARTS=2 WGMMA=1 ...]

Random weights in the 1.2B shape and a random KV cache; one sequence from position 512, a step as a CUDA graph, the best
of some bursts. A row for the constants as they are and one for each argument, which sets constants of
server/model/gpu/megakernel/__init__.py (those that are kept by bits: of these bits). The last column compares the
logits with those of the first row. With --limits also kernels that compute wrong numbers: one that awaits no flags of
other blocks, and one that awaits neither flags nor weights and loads none.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bench.decode.speed import SHAPES
from lakh.server.model.gpu import megakernel
from lakh.server.model.gpu.graphs import GraphCapture
from lakh.server.model.gpu.megakernel import Megakernel
from lakh.server.model.gpu.quantized import BITS
from lakh.server.model.inference import InferenceModel
from lakh.server.model.kv_cache import PagedCache
from lakh.workloads.code.formats import hf

__all__ = ["NO_FLAGS", "NO_WEIGHTS", "changed", "constants_of"]

Edits = Sequence[tuple[str, str]]

POSITION, STEPS, BURSTS = 512, 32, 8
NO_FLAGS = (("if (missing & TAGS) continue;", ""), ("    if (ready) return;\n", "    return;\n"))
NO_WEIGHTS = (
    ("    const u32 all = LAYERS", "    return;\n    const u32 all = LAYERS"),
    ("wait_full(u32 n) const { wait(full + slot(n) * 8, n / SLOTS); }", "wait_full(u32) const {}"),
    ("Ring::wait(ring.full + slot_of(i) * 8, turn + (slot + i >= SLOTS));", ";"),
)
"""Texts of the source, and what takes their place."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp8", "int4"])
    parser.add_argument("--limits", action="store_true")
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
        with changed(self._bits, constants, edits):
            plan = Megakernel.plan(self._network)
            if isinstance(plan, str):
                return plan
            kernel = Megakernel(self._network, self._cache, plan)
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
        return f"{best_ms:.4f} ms a step, {plan.slots} slots, logits {apart:.1e} apart"


if __name__ == "__main__":
    main()
