"""Where the time of a training step goes on this GPU: GEMMs, attention kernels, whole steps, and a profile.

    python -m bench.train.sweep [--tiny] [part ...]      parts: documents gemm attention steps profile adapters
                                                         fp8_products int8_products fp8_tiles adapter_kernels
                                                         (GPU only)

`--tiny` runs everything on a CPU at toy size. A part that fails is printed, and the next one runs.
"""

import argparse
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from bench.train import steps as step_bench
from bench.train.adapter_sweep import adapter_kernels
from bench.train.fp8_sweep import fp8_products, fp8_tiles, int8_products
from bench.train.shapes import SHAPES, BenchShape, BenchSystem
from lakh.spec import Model
from lakh.workloads.code.attention import KERNELS, Documents

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32


def timed_ms(function, repeats=10):
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        if CUDA:
            torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        if CUDA:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def gemm(tiny):
    tokens = 256 if tiny else 32768
    for name, n, k in [
        ("qkv", 4096, 2048), ("o", 2048, 2048), ("gate-up", 11008, 2048), ("down", 2048, 5504), ("head", 32064, 2048),
        ("162m qkv", 2304, 768), ("162m o", 768, 768), ("162m gate-up", 4096, 768), ("162m down", 768, 2048),
        ("162m head", 32064, 768),
    ]:  # fmt: skip
        if tiny:
            n, k = n // 32, k // 32
        m = tokens * 4 if name.startswith("162m") and "head" not in name and not tiny else tokens
        x, w = torch.randn(m, k, device=DEVICE, dtype=DTYPE), torch.randn(n, k, device=DEVICE, dtype=DTYPE)
        g = torch.randn(m, n, device=DEVICE, dtype=DTYPE)
        flops = 2 * m * n * k
        pairs = ((x, w.T), (g, w), (g.T, x))
        ms = [timed_ms(lambda a=a, b=b: a @ b) for a, b in pairs]
        rates = " ".join(f"{what} {flops / t / 1e9:.0f}" for what, t in zip(("fwd", "dx", "dw"), ms, strict=True))
        print(f"gemm {name} {m}x{n}x{k}: {rates} TFLOP/s, {sum(ms):.2f} ms")


def attention(tiny):
    cases = [(8, 16, 8, 4096, 128), (2, 16, 8, 16384, 128), (64, 12, 12, 2048, 64), (32, 6, 6, 2048, 128)]
    for B, H, K, T, D in cases:
        if tiny:
            B, T = 1, T // 32
        q, k, v = (
            torch.randn(B, T, heads, D, device=DEVICE, dtype=DTYPE).transpose(1, 2).requires_grad_()
            for heads in (H, K, K)
        )
        grad = torch.randn(B, T, H, D, device=DEVICE, dtype=DTYPE).transpose(1, 2)
        flops = 2 * B * H * T * T * D  # causal forward
        for name, kernel in KERNELS.items():
            try:
                forward_ms = timed_ms(lambda: kernel(q, k, v, None))  # noqa: B023
                y = kernel(q, k, v, None)
                backward_ms = timed_ms(lambda: torch.autograd.grad(y, (q, k, v), grad, retain_graph=True))  # noqa: B023
                rate = 3 * flops / (forward_ms + backward_ms) / 1e9
                print(
                    f"attention {name} B{B} H{H}/{K} T{T} D{D}: forward {forward_ms:.2f} ms "
                    f"{flops / forward_ms / 1e9:.0f} TFLOP/s, backward {backward_ms:.2f} ms "
                    f"{2 * flops / backward_ms / 1e9:.0f}, both {rate:.0f}; y stride {tuple(y.stride())}"
                )
            except Exception as error:  # noqa: BLE001
                print(f"attention {name}: {type(error).__name__} {str(error)[:150]}")


STEPS = [
    ("1.2b-16k-packed", 5, BenchSystem("packed")),
    ("1.2b-4k", 8, BenchSystem("selective", recompute="selective")),
    ("1.2b-4k", 8, BenchSystem("fp8", precision="fp8")),
    ("1.2b-4k", 8, BenchSystem("without own kernels", kernels=False)),
    ("1.2b-4k", 8, BenchSystem("and without chunked loss", kernels=False, chunked_loss=False)),
    ("1.2b-4k", 8, BenchSystem("and with flash", kernels=False, chunked_loss=False, attention="flash")),
    ("1.2b-4k", 8, BenchSystem("eager", kernels=False, chunked_loss=False, compile="none")),
    ("1.2b-4k", 8, BenchSystem("full", recompute="full")),
    ("1.2b-4k", 8, BenchSystem("CUDA graph", graphs=True)),
    ("15m-1k", 4, BenchSystem("plain", precision="mixed")),
    ("15m-1k", 4, BenchSystem("CUDA graph", precision="mixed", graphs=True)),
]


def toy(shape):
    model = replace(shape.model, layers=2, width=64, heads=4, kv_heads=2, ffn=96, vocab=160, context=64)
    return BenchShape(model, 64, 2, document=16 if shape.document else 0, adapter=shape.adapter)


def steps(tiny):
    for name, micro_batch, system in STEPS:
        began = time.perf_counter()
        try:
            if tiny:
                precision = {"bf16": "f32", "fp8": "f32"}.get(system.precision, system.precision)
                system = replace(system, attention="torch", precision=precision, graphs=False)
                step = step_bench.stepper(toy(SHAPES[name]), system, DEVICE)
                print(f"step {name} {system.name}: {float(step().loss):.4f}")
            else:
                row = step_bench.measure(name, replace(SHAPES[name], micro_batch=micro_batch), system)
                gib = (row.peak_bytes or 0) / 2**30
                print(
                    f"step {name} x{micro_batch} {system.name}: {row.step_s * 1e3:.1f} ms {row.tok_per_s:,.0f} tok/s "
                    f"mfu {100 * (row.mfu or 0):.1f} % {gib:.1f} GiB {row.failed} "
                    f"({time.perf_counter() - began:.0f} s in all)",
                    flush=True,
                )
        except Exception:  # noqa: BLE001
            print(f"step {name} {system.name} FAILED: {traceback.format_exc()[-900:]}", flush=True)


def adapters(tiny):
    """The kernels of a step with adapters, and of one that trains all weights."""
    profile(tiny, ("lora-1.2b",))
    profile(tiny, ("lora-1.2b",), full=True)


def profile(tiny, names=("1.2b-4k", "162m-2k"), full=False):
    for name in names:
        system = BenchSystem(
            "p", compile="block", attention="torch" if tiny else "auto", precision="f32" if tiny else "bf16", full=full
        )
        with step_bench._clean_gpu() if CUDA else torch.no_grad():
            pass
        step = step_bench.stepper(toy(SHAPES[name]) if tiny else SHAPES[name], system, DEVICE)
        for _ in range(3):
            step()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities[1:] if CUDA else activities[:1]) as found:
            step()
            if CUDA:
                torch.cuda.synchronize()
        events = [(e.device_time_total if CUDA else e.cpu_time_total, e.count, e.key) for e in found.key_averages()]
        total = sum(t for t, _, _ in events)
        print(f"profile {name}: {total / 1e3:.1f} ms in all")
        for micros, count, key in sorted(events, reverse=True)[:28]:
            print(f"  {micros / 1e3:8.2f} ms {count:5d} x {key[:110]}")


def documents(tiny):
    """Attention kernels with document masks, on 4 sequences of 16k tokens in documents of 2k."""
    B, H, K, T, D, span = (2, 4, 2, 64, 16, 16) if tiny else (4, 16, 8, 16384, 128, 2048)
    q, k, v = (
        torch.randn(B, T, heads, D, device=DEVICE, dtype=DTYPE).transpose(1, 2).requires_grad_() for heads in (H, K, K)
    )
    grad = torch.randn(B, T, H, D, device=DEVICE, dtype=DTYPE).transpose(1, 2)
    starts = torch.arange(0, B * T + 1, span, dtype=torch.int32, device=DEVICE)
    packed = Documents(starts, span)
    flops = 2 * B * H * T * span * D

    def with_flex():
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def mask(b, h, i, j):
            return (i >= j) & (i // span == j // span)

        blocks = create_block_mask(mask, B, None, T, T, device=DEVICE)
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda q, k, v, _: compiled(q, k, v, block_mask=blocks, enable_gqa=True)

    makers = {name: (lambda kernel=kernel: kernel) for name, kernel in KERNELS.items()}
    results = {}
    for name, make in {**makers, "flex": with_flex}.items():
        if name == "torch" and CUDA:
            continue
        try:
            kernel = make()
            forward_ms = timed_ms(lambda: kernel(q, k, v, packed))  # noqa: B023
            y = kernel(q, k, v, packed)
            backward_ms = timed_ms(lambda: torch.autograd.grad(y, (q, k, v), grad, retain_graph=True))  # noqa: B023
            grads = torch.autograd.grad(y, (q, k, v), grad)
            results[name] = (y, *grads)
            first = next(iter(results.values()))
            errors = [
                float((a - b).detach().float().norm() / b.detach().float().norm())
                for a, b in zip(results[name], first, strict=True)
            ]
            rate = 3 * flops / (forward_ms + backward_ms) / 1e9
            print(f"documents {name}: {forward_ms:.2f} + {backward_ms:.2f} ms, {rate:.0f} TFLOP/s, errors {errors}")
        except Exception:  # noqa: BLE001
            print(f"documents {name} FAILED: {traceback.format_exc()[-600:]}")


PARTS = {"documents": documents, "gemm": gemm, "attention": attention, "steps": steps, "profile": profile}
MORE_PARTS: dict[str, Callable[[bool], None]] = {
    "adapters": adapters,
    "adapter_kernels": adapter_kernels,
    "fp8_products": partial(fp8_products, timed_ms),
    "int8_products": partial(int8_products, timed_ms),
    "fp8_tiles": partial(fp8_tiles, timed_ms),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    arguments = parser.parse_args()
    print(torch.__version__, torch.cuda.get_device_name() if CUDA else "cpu", Model.__name__)
    for part in arguments.parts:
        try:
            (PARTS | MORE_PARTS)[part](arguments.tiny)
        except Exception:  # noqa: BLE001
            print(f"{part} FAILED: {traceback.format_exc()[-1500:]}", flush=True)
