"""Training speed of lakh's model beside Llama models of transformers and torchtitan of the same shape, in the same run.

Every system does the same work on the same random tokens: forward, backward, clip, fused AdamW. On a GPU, weights,
gradients and moments are bf16 for both ("bf16"); a row with float32 master weights ("mixed") is how `lakh train`
trains. On a CPU both are float32 and alternate, and CPU time, which other load does not change, is measured as well.

MFU is model FLOPs over the dense peak: causal-exact, without recomputation; the PaLM-style figure counts attention
twice. A row that runs out of memory stays in the table with its reason.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.harness import alternate, medians
from lakh.errors import UserError
from lakh.spec import Data, Model, Optimizer, Run, Training
from lakh.trainer.optim.optimizer import build_optimizer
from lakh.trainer.optim.schedule import learning_rate
from lakh.trainer.step import UpdateResult, objective_of, plain_pass, update
from lakh.trainer.tuning.cuda_graphs import GraphedPass
from lakh.trainer.tuning.memory import is_out_of_memory
from lakh.workloads.code.acceleration import choose_ops
from lakh.workloads.code.attention import Documents
from lakh.workloads.code.batch import Batch
from lakh.workloads.code.model import CodeModel, init_weights

__all__ = ["ABLATIONS", "PEERS", "SHAPES", "BenchShape", "BenchSystem", "TrainRow", "bench_train", "measure", "stepper"]

PEAK_FLOPS = {"NVIDIA H200": 989.4e12, "NVIDIA H100 80GB HBM3": 989.4e12}
"""Dense bf16, from NVIDIA's data sheets (half of the figure with sparsity)."""

CPU_STEP_FLOPS = 2e12  # two minutes of two slow cores

_1_2B = Model(layers=24, width=2048, heads=16, kv_heads=8, ffn=5504, vocab=32064, tied=False, context=16384)


@dataclass(frozen=True)
class BenchShape:
    model: Model
    sequence: int
    micro_batch: int
    document: int = 0
    """Length of the documents that a sequence is packed from, separated by masks; 0 for none."""


# Micro-batches of the GPU shapes: the best wave quantization of those that fit an H200 for every system.
SHAPES = {
    "demo": BenchShape(Model(layers=4, width=192, heads=6, kv_heads=2, ffn=512, vocab=4096, context=512), 256, 8),
    "162m-2k": BenchShape(
        Model(layers=16, width=768, heads=12, kv_heads=12, ffn=2048, vocab=32064, tied=False, context=2048), 2048, 66
    ),
    "15m-1k": BenchShape(Model(layers=6, width=320, heads=5, kv_heads=5, ffn=896, vocab=16384, context=1024), 1024, 4),
    "1.2b-4k": BenchShape(_1_2B, 4096, 17),
    "1.2b-16k": BenchShape(_1_2B, 16384, 5),
    "1.2b-16k-packed": BenchShape(_1_2B, 16384, 5, document=2048),
}


@dataclass(frozen=True)
class BenchSystem:
    """One measured configuration: whose model, and with which features."""

    name: str
    is_peer: bool = False
    precision: str = "bf16"
    """bf16 (weights and moments too), mixed (bf16 products, float32 weights), f32."""
    compile: str = "auto"
    attention: str = "auto"
    recompute: str = "none"
    chunked_loss: bool = True
    kernels: bool = True
    graphs: bool = False
    checkout: str = ""
    """Of a peer that is not installed."""

    @property
    def features(self) -> str:
        words = [self.precision, f"compile {self.compile}", f"attention {self.attention}"]
        words += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        words += ["chunked loss"] if self.chunked_loss else []
        words += ["lakh's kernels"] if self.kernels and not self.is_peer else []
        words += ["CUDA graph"] if self.graphs else []
        return ", ".join(words)


LAKH = BenchSystem("lakh")
PEERS = {
    "transformers": BenchSystem("transformers", is_peer=True, compile="model", attention="torch", chunked_loss=False),
    "torchtitan": BenchSystem("torchtitan", is_peer=True, compile="block", attention="torch", chunked_loss=False),
}
ABLATIONS = (
    BenchSystem("eager", compile="none", attention="torch", chunked_loss=False),
    BenchSystem("+compile", compile="block", attention="torch", chunked_loss=False),
    BenchSystem("+attention", compile="block", chunked_loss=False),
    BenchSystem("+chunked loss", compile="block"),
    BenchSystem("whole-model compile", compile="model"),
    BenchSystem("selective recomputation", recompute="selective"),
    BenchSystem("full recomputation", recompute="full"),
    BenchSystem("float32 master weights", precision="mixed"),
    BenchSystem("CUDA graph", graphs=True),
)


@dataclass(frozen=True)
class TrainRow:
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
    """tokens/s over those of the first peer."""
    features: str
    cpu_s: float | None = None
    """CPU time of a step, over all threads; on a CPU only."""
    failed: str = ""


def bench_train(
    shapes: Sequence[str],
    *,
    peers: Sequence[str] = ("transformers",),
    checkouts: Mapping[str, str] | None = None,
    ablations: bool = False,
    repeats: int = 7,
    micro_batch: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
    found: Callable[[TrainRow], None] = lambda row: None,
) -> list[TrainRow]:
    """A row for each peer, for lakh and, with `ablations`, for each feature added in turn. Calls `found` with each row
    of a GPU as soon as it is measured.
    """
    on_gpu = torch.cuda.is_available()
    chosen = {
        name: SHAPES[name] if micro_batch is None else replace(SHAPES[name], micro_batch=micro_batch) for name in shapes
    }
    if not on_gpu:
        for name, shape in chosen.items():
            _refuse_long_steps(name, shape)
    systems = [replace(PEERS[name], checkout=(checkouts or {}).get(name, "")) for name in peers] + [LAKH]
    if on_gpu:
        systems += ABLATIONS if ablations else [BenchSystem("lakh, float32 weights", precision="mixed")]
    else:
        systems = [replace(system, precision="f32", compile="none") for system in systems]
    rows: list[TrainRow] = []
    for name, shape in chosen.items():
        if on_gpu:
            measured = _measure_one_by_one(name, shape, systems, repeats, progress, found)
        else:
            progress(name)
            measured = _measure_alternately(name, shape, systems, repeats)
        base = next((row.tok_per_s for row in measured if row.system in PEERS and not row.failed), None)
        rows += [replace(row, ratio=row.tok_per_s / base if base and not row.failed else None) for row in measured]
    return rows


def _refuse_long_steps(name: str, shape: BenchShape) -> None:
    """A step of the GPU shapes takes a second on a GPU and an hour on a CPU."""
    step_flops = shape.micro_batch * shape.sequence * shape.model.flops_per_token(shape.sequence)
    if step_flops > CPU_STEP_FLOPS:
        found = f"one step is {step_flops / 1e12:,.0f} TFLOP, and there is no GPU here"
        raise UserError(f"--shapes {name}", found, "measure it on a GPU; here: demo, or 15m-1k")


def _measure_one_by_one(
    name: str,
    shape: BenchShape,
    systems: Sequence[BenchSystem],
    repeats: int,
    progress: Callable[[str], None],
    found: Callable[[TrainRow], None],
) -> list[TrainRow]:
    """One after the other: a GPU's clock is steady, and two large models do not fit at once."""
    rows = []
    for system in systems:
        if not can_measure(system, shape):
            continue
        progress(f"{name}: {system.name}")
        row = measure(name, shape, system, repeats=repeats)
        found(row)
        rows.append(row)
    return rows


def _measure_alternately(name: str, shape: BenchShape, systems: Sequence[BenchSystem], repeats: int) -> list[TrainRow]:
    device = torch.device("cpu")
    systems = [system for system in systems if can_measure(system, shape)]
    steps = {system: stepper(shape, system, device) for system in systems}
    found = alternate(
        {system.name: functools.partial(_timed, step) for system, step in steps.items()}, repeats, warmup=2
    )
    rows = []
    for system in systems:
        step_s, cpu_s = medians(found[system.name].measured)
        rows.append(replace(_row(name, shape, system, step_s, None), cpu_s=cpu_s))
    return rows


def can_measure(system: BenchSystem, shape: BenchShape) -> bool:
    """Peers have no document masks here, and torchtitan's Llama does not tie its embeddings."""
    return not (system.is_peer and shape.document) and not (system.name == "torchtitan" and shape.model.tied)


def measure(name: str, shape: BenchShape, system: BenchSystem, *, repeats: int = 8, warmup: int = 4) -> TrainRow:
    """Median step time and peak memory of one system on the GPU."""
    device = torch.device("cuda")
    with _clean_gpu():
        try:
            step = stepper(shape, system, device)
            for _ in range(warmup):
                step()
            step_s = _median_step_s(step, repeats)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return replace(_row(name, shape, system, float("inf"), None), failed="out of memory")
        return _row(name, shape, system, step_s, torch.cuda.max_memory_allocated())


def _median_step_s(step: Callable[[], object], repeats: int) -> float:
    """By events on the GPU's own clock, without waiting between steps, as in training."""
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


def _row(name: str, shape: BenchShape, system: BenchSystem, step_s: float, peak_bytes: int | None) -> TrainRow:
    tok_per_s = shape.micro_batch * shape.sequence / step_s
    peak = PEAK_FLOPS.get(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    span = shape.document or shape.sequence
    exact, palm = (
        tok_per_s * shape.model.flops_per_token(span, causal=causal) / peak if peak else None
        for causal in (True, False)
    )
    return TrainRow(
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
    shape: BenchShape, system: BenchSystem, device: torch.device, batches: Callable[[int], Tensor] | None = None
) -> Callable[[], UpdateResult]:
    """A function that makes one whole optimizer update of this system, on the same random sequences each time or on
    those of `batches(step)`."""
    run = Run(
        name="bench",
        model=shape.model,
        data=Data(sequence=shape.sequence, batch=shape.micro_batch, micro_batch=shape.micro_batch),
        train=Training(steps=10_000),
        optim=Optimizer(lr=1e-4),
    )
    batch = _batch(shape, device)
    model = _peer_model(shape, system, device) if system.is_peer else _lakh_model(shape, system, device)
    model.to(device)
    if system.precision in ("bf16", "fp8"):
        model.bfloat16()
    if system.is_peer and system.compile == "model":
        model = torch.compile(model, dynamic=False)  # type: ignore[assignment]
    optimizer = build_optimizer(model, run.optim)
    objective = objective_of(run.train)
    graphed = GraphedPass(plain_pass(objective)) if system.graphs else None
    lr = learning_rate(100, run.optim, run.train.steps)
    settings: dict[str, Any] = {"lr": lr, "clip_norm": run.optim.clip_norm, "objective": objective, "graphed": graphed}
    counter = itertools.count()

    def step() -> UpdateResult:
        if batches is None:
            return update(model, optimizer, [batch], **settings)
        rows = batches(next(counter)).to(device)
        return update(model, optimizer, [Batch(rows[:, :-1], rows[:, 1:])], **settings)

    return step


def _batch(shape: BenchShape, device: torch.device) -> Batch:
    B, T = shape.micro_batch, shape.sequence
    rows = torch.randint(0, shape.model.vocab, (B, T + 1), generator=torch.Generator().manual_seed(0)).to(device)
    if not shape.document:
        return Batch(rows[:, :-1], rows[:, 1:])
    place = torch.arange(T, device=device).expand(B, T)
    starts = torch.arange(0, B * T + 1, shape.document, dtype=torch.int32, device=device)
    return Batch(
        rows[:, :-1],
        rows[:, 1:],
        positions=place % shape.document,
        documents=Documents.padded(starts, shape.document, T),
    )


def _lakh_model(shape: BenchShape, system: BenchSystem, device: torch.device) -> nn.Module:
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
    choices: dict[str, Any] = {"attention": system.attention, "recompute": system.recompute, "compile": system.compile}
    settings = Training(fp8=system.precision == "fp8", **choices)
    bf16 = (model.dtype or next(model.parameters()).dtype) == torch.bfloat16
    ops, mode, _ = choose_ops(shape.model, settings, kernels=system.kernels, bf16=bf16, device=device.type)
    model.set_ops(ops)
    model.compile_model(mode)
    return model if system.chunked_loss else _WithLogits(model)


class _WithLogits(nn.Module):
    """lakh's model with the loss of full logits, for comparison with the chunked loss."""

    def __init__(self, inner: CodeModel) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self, inputs: Tensor, positions: Tensor | None, *, targets_BT: Tensor, documents: Documents | None, **_: object
    ) -> Tensor:
        return next_token_loss(self.inner(inputs, positions, documents=documents), targets_BT)


def _peer_model(shape: BenchShape, system: BenchSystem, device: torch.device) -> nn.Module:
    if system.name == "transformers":
        return _TransformersModel(shape.model, device)
    from bench.train.torchtitan import TorchtitanModel

    return TorchtitanModel(shape.model, shape.sequence, device, system.checkout, compiled=system.compile != "none")


class _TransformersModel(nn.Module):
    """transformers' Llama of the same shape, with the call signature of lakh's model."""

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


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Computed in float32 for logits of any type: the sum over a vocabulary needs it."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def _timed(step: Callable[[], object]) -> tuple[float, float]:
    """Wall seconds, and CPU seconds over all threads."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - began_s, time.process_time() - began_cpu_s
