"""Training speed of lakh's model beside transformers' LlamaForCausalLM of the same shape, in the same run.

Every system does the same work on the same random tokens: forward, backward, clip, fused AdamW. On a GPU weights,
gradients and moments are bf16 for both ("bf16"), and a row with float32 master weights ("mixed"), which is how `lakh
train` trains, stands beside them; on a CPU both are float32, and alternate so that a busy moment hits both; the time
of the processor, which other work on the machine does not take from, stands beside the time of the clock.

MFU is model FLOPs over the dense peak: causal-exact, nothing for recomputation; the PaLM-style figure, which counts
attention twice, stands beside it. A row that runs out of memory stays in the table with its reason.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lakh.errors import UserError
from lakh.spec import Data, Model, Optimizer, Run, Training
from lakh.trainer.graphs import Graphed
from lakh.trainer.memory import ran_out
from lakh.trainer.optim import build_optimizer
from lakh.trainer.step import Updated, objective_of, plain_pass, update
from lakh.workloads.code.acceleration import speed_up
from lakh.workloads.code.attention import Documents
from lakh.workloads.code.batch import Batch
from lakh.workloads.code.loss import next_token_loss
from lakh.workloads.code.model import CodeModel, init_weights

__all__ = ["ABLATIONS", "PEERS", "SHAPES", "Row", "Shape", "System", "bench_train", "measure"]

PEAK_FLOPS = {"NVIDIA H200": 989.4e12, "NVIDIA H100 80GB HBM3": 989.4e12}
"""Dense bf16, from NVIDIA's data sheets (half of the figure with sparsity)."""

CPU_STEP_FLOPS = 2e12  # two minutes of two slow cores

_1_2B = Model(layers=24, width=2048, heads=16, kv_heads=8, ffn=5504, vocab=32064, tied=False, context=16384)


@dataclass(frozen=True)
class Shape:
    model: Model
    sequence: int
    micro_batch: int
    document: int = 0
    """Tokens of the documents that a row is packed from, kept apart by masks; 0 for none."""


# Micro-batches of the GPU shapes: the fullest waves (waves.py) of those that fit into an H200 for every system.
SHAPES = {
    "demo": Shape(Model(layers=4, width=192, heads=6, kv_heads=2, ffn=512, vocab=4096, context=512), 256, 8),
    "162m-2k": Shape(
        Model(layers=16, width=768, heads=12, kv_heads=12, ffn=2048, vocab=32064, tied=False, context=2048), 2048, 66
    ),
    "15m-1k": Shape(Model(layers=6, width=320, heads=5, kv_heads=5, ffn=896, vocab=16384, context=1024), 1024, 4),
    "1.2b-4k": Shape(_1_2B, 4096, 17),
    "1.2b-16k": Shape(_1_2B, 16384, 5),
    "1.2b-16k-packed": Shape(_1_2B, 16384, 5, document=2048),
}


@dataclass(frozen=True)
class System:
    """What is measured: whose model, and with which features."""

    name: str
    is_peer: bool = False
    precision: str = "bf16"
    """bf16 (weights and moments too), mixed (bf16 products, float32 weights), f32."""
    compile: str = "auto"
    attention: str = "auto"
    recompute: str = "none"
    chunked_loss: bool = True
    kernels: bool = True
    products: str = "auto"
    graphs: bool = False

    @property
    def features(self) -> str:
        words = [self.precision, f"compile {self.compile}", f"attention {self.attention}"]
        words += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        words += ["chunked loss"] if self.chunked_loss else []
        words += ["lakh's kernels"] if self.kernels and not self.is_peer else []
        words += [f"products {self.products}"] if not self.is_peer else []
        words += ["CUDA graph"] if self.graphs else []
        return ", ".join(words)


LAKH = System("lakh")
PEERS = {"transformers": System("transformers", is_peer=True, compile="model", attention="torch", chunked_loss=False)}
ABLATIONS = (
    System("eager", compile="none", attention="torch", chunked_loss=False, products="library"),
    System("+compile", compile="block", attention="torch", chunked_loss=False, products="library"),
    System("+attention", compile="block", chunked_loss=False, products="library"),
    System("+chunked loss", compile="block", products="library"),
    System("+measured products", compile="block"),
    System("whole-model compile", compile="model"),
    System("selective recomputation", recompute="selective"),
    System("full recomputation", recompute="full"),
    System("float32 master weights", precision="mixed"),
    System("CUDA graph", graphs=True),
)


@dataclass(frozen=True)
class Row:
    system: str
    shape: str
    params: int
    seq: int
    micro_batch: int
    step_s: float
    tok_per_s: float
    mfu: float | None
    mfu_palm: float | None
    peak_bytes: int | None
    ratio: float | None
    """Of tokens/s to the first peer's; 1 for the peer itself."""
    features: str
    cpu_s: float | None = None
    """Processor time of a step, over all threads; on a CPU only."""
    failed: str = ""


def bench_train(
    shapes: Sequence[str],
    *,
    peers: Sequence[str] = ("transformers",),
    ablations: bool = False,
    repeats: int = 7,
    micro_batch: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
    found: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """A row for each peer, for lakh and, if asked for, for each feature switched on after the other; on a GPU, where
    each takes its time, `found` hears of each at once.
    """
    on_gpu = torch.cuda.is_available()
    chosen = {
        name: SHAPES[name] if micro_batch is None else replace(SHAPES[name], micro_batch=micro_batch) for name in shapes
    }
    if not on_gpu:
        for name, shape in chosen.items():
            _refuse_hours(name, shape)
    systems = [PEERS[name] for name in peers] + [LAKH]
    if on_gpu:
        systems += ABLATIONS if ablations else [System("lakh, float32 weights", precision="mixed")]
    else:
        systems = [replace(system, precision="f32", compile="none") for system in systems]
    rows: list[Row] = []
    for name, shape in chosen.items():
        if on_gpu:
            measured = _measure_apart(name, shape, systems, repeats, progress, found)
        else:
            progress(name)
            measured = _measure_alternately(name, shape, systems, repeats)
        base = next((row.tok_per_s for row in measured if row.system in PEERS and not row.failed), None)
        rows += [replace(row, ratio=row.tok_per_s / base if base and not row.failed else None) for row in measured]
    return rows


def _refuse_hours(name: str, shape: Shape) -> None:
    """A step of these shapes takes a GPU a second, and a CPU an hour."""
    step_flops = shape.micro_batch * shape.sequence * shape.model.flops_per_token(shape.sequence)
    if step_flops > CPU_STEP_FLOPS:
        found = f"one step is {step_flops / 1e12:,.0f} TFLOP, and there is no GPU here"
        raise UserError(f"--shapes {name}", found, "measure it on a GPU; here: demo, or 15m-1k")


def _measure_apart(
    name: str,
    shape: Shape,
    systems: Sequence[System],
    repeats: int,
    progress: Callable[[str], None],
    found: Callable[[Row], None],
) -> list[Row]:
    """One after the other: a GPU's clock is steady, and two large models do not fit side by side."""
    rows = []
    for system in systems:
        if system.is_peer and shape.document:
            continue  # it has no document masks in this form
        progress(f"{name}: {system.name}")
        row = measure(name, shape, system, repeats=repeats)
        found(row)
        rows.append(row)
    return rows


def _measure_alternately(name: str, shape: Shape, systems: Sequence[System], repeats: int) -> list[Row]:
    device = torch.device("cpu")
    steps = {system: stepper(shape, system, device) for system in systems}
    times: dict[System, list[tuple[float, float]]] = {system: [] for system in systems}
    for _ in range(2 + repeats):
        for system, step in steps.items():
            times[system].append(_timed(step))
    rows = []
    for system in systems:
        step_s, cpu_s = (statistics.median(kind) for kind in zip(*times[system][2:], strict=True))
        rows.append(replace(_row(name, shape, system, step_s, None), cpu_s=cpu_s))
    return rows


def measure(name: str, shape: Shape, system: System, *, repeats: int = 8, warmup: int = 4) -> Row:
    """Median step time of one system on the GPU, and the most memory it held."""
    device = torch.device("cuda")
    with _clean_gpu():
        try:
            step = stepper(shape, system, device)
            for _ in range(warmup):
                step()
            step_s = _median_step_s(step, repeats)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            return replace(_row(name, shape, system, float("inf"), None), failed="out of memory")
        return _row(name, shape, system, step_s, torch.cuda.max_memory_allocated())


def _median_step_s(step: Callable[[], object], repeats: int) -> float:
    """By events on the GPU's own clock, without waiting between steps: as in training."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / 1e3


@contextlib.contextmanager
def _clean_gpu() -> Iterator[None]:
    torch.compiler.reset()
    torch._functorch.config.activation_memory_budget = 1.0  # a row with recompute = budget changed it
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield


def _row(name: str, shape: Shape, system: System, step_s: float, peak_bytes: int | None) -> Row:
    tok_per_s = shape.micro_batch * shape.sequence / step_s
    peak = PEAK_FLOPS.get(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    span = shape.document or shape.sequence
    exact, palm = (
        tok_per_s * shape.model.flops_per_token(span, causal=causal) / peak if peak else None
        for causal in (True, False)
    )
    return Row(
        system=system.name,
        shape=name,
        params=shape.model.parameters,
        seq=shape.sequence,
        micro_batch=shape.micro_batch,
        step_s=step_s,
        tok_per_s=tok_per_s,
        mfu=exact,
        mfu_palm=palm,
        peak_bytes=peak_bytes,
        ratio=None,
        features=system.features,
    )


def stepper(
    shape: Shape, system: System, device: torch.device, batches: Callable[[int], Tensor] | None = None
) -> Callable[[], Updated]:
    """A function that makes one whole optimizer update of this system, on the same random rows each time or on those
    of `batches(step)`."""
    run = Run(
        name="bench",
        model=shape.model,
        data=Data(sequence=shape.sequence, batch=shape.micro_batch, micro_batch=shape.micro_batch),
        train=Training(steps=10_000),
        optim=Optimizer(lr=1e-4),
    )
    batch = _batch(shape, device)
    model = _PeerModel(shape.model, device) if system.is_peer else _lakh_model(shape, system, device)
    model.to(device)
    if system.precision in ("bf16", "fp8"):
        model.bfloat16()
    if system.is_peer and system.compile != "none":
        model = torch.compile(model, dynamic=False)  # type: ignore[assignment]
    optimizer = build_optimizer(model, run.optim)
    graphed = Graphed(plain_pass(objective_of(run))) if system.graphs else None
    counter = itertools.count()

    def step() -> Updated:
        if batches is None:
            return update(run, model, optimizer, [batch], step=100, graphed=graphed)
        rows = batches(next(counter)).to(device)
        return update(run, model, optimizer, [Batch(rows[:, :-1], rows[:, 1:])], step=100, graphed=graphed)

    return step


def _batch(shape: Shape, device: torch.device) -> Batch:
    B, T = shape.micro_batch, shape.sequence
    rows = torch.randint(0, shape.model.vocab, (B, T + 1), generator=torch.Generator().manual_seed(0)).to(device)
    if not shape.document:
        return Batch(rows[:, :-1], rows[:, 1:])
    place = torch.arange(T, device=device).expand(B, T)
    return Batch(
        rows[:, :-1],
        rows[:, 1:],
        documents=(place // shape.document).int(),
        positions=place % shape.document,
        cu_seqlens=torch.arange(0, B * T + 1, shape.document, dtype=torch.int32, device=device),
        longest=shape.document,
    )


def _lakh_model(shape: Shape, system: System, device: torch.device) -> nn.Module:
    with device:
        model = CodeModel(shape.model)
    if device.type == "cpu":
        init_weights(model, seed=0)
    else:
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
    model.dtype = {"mixed": torch.bfloat16}.get(system.precision)
    if system.precision in ("bf16", "fp8"):
        model.bfloat16()
    speed_up(
        model,
        attention=system.attention,
        recomputation=system.recompute,
        compilation=system.compile,
        kernels=system.kernels,
        products=system.products,
        tokens=shape.micro_batch * shape.sequence,
        run_flops=float("inf"),
        fp8=system.precision == "fp8",
        device=device.type,
    )
    return model if system.chunked_loss else _WithLogits(model)


class _WithLogits(nn.Module):
    """lakh's model with the loss from whole logits: what the chunked loss is compared with."""

    def __init__(self, inner: CodeModel) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self, inputs: Tensor, positions: Tensor | None, *, targets_BT: Tensor, documents: Documents | None, **_: object
    ) -> Tensor:
        return next_token_loss(self.inner(inputs, positions, documents=documents), targets_BT)


class _PeerModel(nn.Module):
    """transformers' Llama of the same shape, called like ours."""

    def __init__(self, spec: Model, device: torch.device) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = LlamaConfig(
            vocab_size=spec.vocab,
            hidden_size=spec.width,
            intermediate_size=spec.ffn,
            num_hidden_layers=spec.layers,
            num_attention_heads=spec.heads,
            num_key_value_heads=spec.kv_heads,
            max_position_embeddings=spec.context,
            tie_word_embeddings=spec.tied,
            attn_implementation="sdpa",  # type: ignore[call-arg]
        )
        with device:
            self.inner = LlamaForCausalLM(shape)

    def forward(self, inputs: Tensor, positions: Tensor | None, *, targets_BT: Tensor, **_: object) -> Tensor:
        return next_token_loss(self.inner(inputs, use_cache=False).logits, targets_BT)


def _timed(step: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the clock, and of the processor over all threads."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - began_s, time.process_time() - began_cpu_s
