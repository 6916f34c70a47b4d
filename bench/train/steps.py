"""Training speed of lakh's model beside those of transformers, PEFT and torchtitan of the same shape, in the same run.

Every system does the same work on the same random tokens: forward, backward, clip, fused AdamW. On a GPU, weights,
gradients and moments are bf16 for both ("bf16"); a row with float32 master weights ("mixed") is how `lakh train`
trains. Steps of lakh and of the system that it is compared with alternate where both fit into a GPU's memory: the clock
of a GPU falls while it gets warm, which would favour the one that is measured first. On a CPU all are float32 and
alternate, and CPU time, which other load does not change, is measured as well.

MFU is model FLOPs over the dense peak: causal-exact, without recomputation, of the experts that a token uses, and
without the gradients of frozen weights; the PaLM-style figure counts attention twice. A row that fails, such as by
running out of memory, stays in the table with its reason.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness import alternate, medians
from bench.train.emulated_fp8 import emulated_linear
from bench.train.peers import TransformersModel, next_token_loss
from bench.train.shapes import FULL, LAKH, PEERS, SHAPES, BenchShape, BenchSystem, compared_systems, systems_of
from lakh.errors import UserError
from lakh.spec import Data, Mesh, Optimizer, Run, Training
from lakh.trainer.optim.optimizer import build_optimizer
from lakh.trainer.optim.schedule import learning_rate
from lakh.trainer.step import UpdateResult, objective_of, plain_pass, update
from lakh.trainer.tuning.cuda_graphs import GraphedPass
from lakh.trainer.tuning.memory import is_out_of_memory
from lakh.workloads.code.acceleration import choose_ops
from lakh.workloads.code.adapters import add_adapters
from lakh.workloads.code.attention import Documents
from lakh.workloads.code.batch import Batch
from lakh.workloads.code.model import INIT_STD, CodeModel, init_weights
from lakh.workloads.code.parallel import ParallelGroups, parallelise

__all__ = ["BenchTraining", "TrainRow", "bench_train", "measure", "measure_in_turn", "stepper"]

PEAK_FLOPS = {"NVIDIA H200": 989.4e12, "NVIDIA H100 80GB HBM3": 989.4e12}
"""Dense bf16, from NVIDIA's data sheets (half of the figure with sparsity)."""

CPU_STEP_FLOPS = 2e12  # two minutes of two slow cores


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
    full_ratio: float | None = None
    """Of adapters: tokens/s over those of full training with float32 weights."""
    full_memory: float | None = None
    """Of adapters: peak memory over that of full training with float32 weights."""
    cpu_s: float | None = None
    """CPU time of a step, over all threads; on a CPU only."""
    alternates_with: str = ""
    """The systems whose steps were measured in turn with those of this one."""
    failed: str = ""


def bench_train(
    shapes: Sequence[str],
    *,
    peers: Sequence[str] = ("transformers",),
    checkouts: Mapping[str, str] | None = None,
    ablations: bool = False,
    fp8: bool = False,
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
    wanted = [replace(PEERS[name], checkout=(checkouts or {}).get(name, "")) for name in peers]
    rows: list[TrainRow] = []
    for name, shape in chosen.items():
        if on_gpu:
            systems = systems_of(shape, wanted, ablations=ablations, fp8=fp8)
            measured = _measure_on_gpu(name, shape, systems, repeats, progress, found)
        else:
            progress(name)
            measured = _measure_alternately(name, shape, _on_cpu(shape, wanted), repeats)
        rows += _with_ratios(measured)
    return rows


def _on_cpu(shape: BenchShape, peers: list[BenchSystem]) -> list[BenchSystem]:
    """Without the variants that differ only on a GPU, and without torchtitan's experts, which need one."""
    systems = [*peers, LAKH, BenchSystem(FULL, full=True)]
    if shape.model.experts is not None:
        systems = [system for system in systems if system.name != "torchtitan"]
    return [replace(system, precision="f32", compile="none") for system in systems if system.can_measure(shape)]


def _with_ratios(rows: list[TrainRow]) -> list[TrainRow]:
    worked = [row for row in rows if not row.failed]
    peer = next((row for row in worked if row.system in PEERS), None)
    full = next((row for row in worked if row.system == FULL), None)

    def compared(row: TrainRow) -> TrainRow:
        if row.failed:
            return row
        ratio = row.tok_per_s / peer.tok_per_s if peer else None
        if full is None:
            return replace(row, ratio=ratio)
        memory = row.peak_bytes / full.peak_bytes if row.peak_bytes and full.peak_bytes else None
        return replace(row, ratio=ratio, full_ratio=row.tok_per_s / full.tok_per_s, full_memory=memory)

    return [compared(row) for row in rows]


def _refuse_long_steps(name: str, shape: BenchShape) -> None:
    """A step of the GPU shapes takes a second on a GPU and an hour on a CPU."""
    step_flops = shape.micro_batch * shape.sequence * shape.model.flops_per_token(shape.sequence)
    if step_flops > CPU_STEP_FLOPS:
        found = f"one step is {step_flops / 1e12:,.0f} TFLOP, and there is no GPU here"
        raise UserError(f"--shapes {name}", found, "measure it on a GPU; here: demo, or 15m-1k")


def _measure_on_gpu(
    name: str,
    shape: BenchShape,
    systems: Sequence[BenchSystem],
    repeats: int,
    progress: Callable[[str], None],
    found: Callable[[TrainRow], None],
) -> list[TrainRow]:
    """The two systems that are compared in turn, and the others one after the other."""
    rows: dict[str, TrainRow] = {}
    groups = [compared_systems(systems), *([system] for system in systems)]
    for group in groups:
        missing = [system for system in group if system.name not in rows]
        if missing:
            progress(f"{name}: {', '.join(system.name for system in missing)}")
        for row in measure_in_turn(name, shape, missing, repeats=repeats):
            found(row)
            rows[row.system] = row
    return [rows[system.name] for system in systems]


def _measure_alternately(name: str, shape: BenchShape, systems: Sequence[BenchSystem], repeats: int) -> list[TrainRow]:
    device = torch.device("cpu")
    steps = {system: stepper(shape, system, device) for system in systems}
    found = alternate(
        {system.name: functools.partial(_timed, step) for system, step in steps.items()}, repeats, warmup=2
    )
    rows = []
    for system in systems:
        step_s, cpu_s = medians(found[system.name].measured)
        rows.append(replace(_row(name, shape, system, step_s, None), cpu_s=cpu_s))
    return _alternating(rows)


def _alternating(rows: list[TrainRow]) -> list[TrainRow]:
    names = [row.system for row in rows]
    return [replace(row, alternates_with=", ".join(name for name in names if name != row.system)) for row in rows]


def measure(name: str, shape: BenchShape, system: BenchSystem, *, repeats: int = 8, warmup: int = 4) -> TrainRow:
    """Median step time and peak memory of one system on the GPU."""
    return measure_in_turn(name, shape, [system], repeats=repeats, warmup=warmup)[0]


def measure_in_turn(
    name: str, shape: BenchShape, systems: Sequence[BenchSystem], *, repeats: int = 8, warmup: int = 4
) -> list[TrainRow]:
    """Median step times on the GPU, each round one step of each system, and the peak memory of each by itself. Systems
    that fail beside the first one, such as by running out of memory, have no row."""
    try:
        return _measure_built(name, shape, systems, repeats, warmup)
    except Exception as error:  # noqa: BLE001
        if len(systems) == 1:
            reason = "out of memory"
            if not is_out_of_memory(error):  # the other systems are measured all the same
                traceback.print_exc()
                reason = f"{type(error).__name__}: {str(error).strip()[:200]}"
            return [replace(_row(name, shape, systems[0], float("inf"), None), failed=reason)]
    return measure_in_turn(name, shape, systems[:1], repeats=repeats, warmup=warmup)


def _measure_built(
    name: str, shape: BenchShape, systems: Sequence[BenchSystem], repeats: int, warmup: int
) -> list[TrainRow]:
    device = torch.device("cuda")
    steps: list[Callable[[], object]] = []
    peaks: list[int] = []
    with _clean_gpu():
        for system in systems:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            try:
                step = stepper(shape, system, device)
                for _ in range(warmup):
                    step()
            except Exception:
                if not steps:
                    raise
                break  # the earlier ones are ready
            steps.append(step)
            peaks.append(torch.cuda.max_memory_allocated() - before)
        measured = zip(systems, _median_step_s(steps, repeats), peaks, strict=False)
        return _alternating([_row(name, shape, system, step_s, peak) for system, step_s, peak in measured])


def _median_step_s(steps: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Of each, by events on the GPU's own clock, without waiting between steps, as in training."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats * len(steps) + 1)]
    marks[0].record()
    for step, mark in zip(itertools.cycle(steps), marks[1:], strict=False):
        step()
        mark.record()
    torch.cuda.synchronize()
    times_s = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
    return [statistics.median(times_s[number :: len(steps)]) for number in range(len(steps))]


@contextlib.contextmanager
def _clean_gpu() -> Iterator[None]:
    torch.compiler.reset()
    torch._functorch.config.activation_memory_budget = 1.0  # a row with recompute = budget changed it
    gc.collect()
    torch.cuda.empty_cache()
    yield


def _row(name: str, shape: BenchShape, system: BenchSystem, step_s: float, peak_bytes: int | None) -> TrainRow:
    tok_per_s = shape.micro_batch * shape.sequence / step_s
    peak = PEAK_FLOPS.get(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    span = shape.document or shape.sequence
    frozen = shape.adapter is not None and not system.full
    exact, palm = (
        tok_per_s * shape.model.flops_per_token(span, causal=causal, frozen=frozen) / peak if peak else None
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


@dataclass(frozen=True)
class BenchTraining:
    """Real training instead of the same step again and again."""

    steps: int
    optim: Optimizer
    batches: Callable[[int], Tensor]
    """The sequences of a step, with one more token for the targets."""
    embedding_std: float
    seed: int = 0
    """Of the initial weights."""


@dataclass(frozen=True)
class Stepper:
    """Called, it makes one whole optimizer update of `model`."""

    model: nn.Module
    _step: Callable[[], UpdateResult]

    def __call__(self) -> UpdateResult:
        return self._step()


def stepper(
    shape: BenchShape, system: BenchSystem, device: torch.device, training: BenchTraining | None = None
) -> Stepper:
    """Updates of this system, on the same random sequences and with the same learning rate each time, or the next one
    of `training`."""
    run = Run(
        name="bench",
        model=shape.model,
        data=Data(sequence=shape.sequence, batch=shape.micro_batch, micro_batch=shape.micro_batch),
        train=Training(steps=10_000 if training is None else training.steps),
        optim=Optimizer(lr=1e-4) if training is None else training.optim,
    )
    batch = _batch(shape, device)
    adapter = None if system.full else shape.adapter
    if system.is_peer:
        model = _peer_model(shape, system, device)
    elif adapter is not None:
        run = replace(run, adapter=adapter, init_from="random weights", train=_training(system))
        model = _adapted_model(run, device, bf16=system.precision != "f32")
    else:
        std, seed = (INIT_STD, 0) if training is None else (training.embedding_std, training.seed)
        model = lakh_model(shape, system, device, std, seed)
    optimizer = build_optimizer(model, run.optim)
    objective = objective_of(run.train)
    graphed = GraphedPass(plain_pass(objective)) if system.graphs else None
    settings: dict[str, Any] = {"clip_norm": run.optim.clip_norm, "objective": objective, "run_pass": graphed}
    counter = itertools.count()

    def step() -> UpdateResult:
        if training is None:
            return update(model, optimizer, [batch], lr=learning_rate(100, run.optim, run.train.steps), **settings)
        number = next(counter)
        rows = training.batches(number)
        lr = learning_rate(number, run.optim, run.train.steps)
        return update(model, optimizer, [Batch(rows[:, :-1], rows[:, 1:])], lr=lr, **settings)

    return Stepper(model, step)


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


def _adapted_model(run: Run, device: torch.device, *, bf16: bool) -> nn.Module:
    """As `lakh tune` makes it: frozen bf16 matrices and float32 adapters on a GPU."""

    def build() -> CodeModel:
        model = CodeModel(run.model)
        init_weights(model, seed=0)
        add_adapters(model, run.adapter, seed=0)
        return model

    return parallelise(run, Mesh(), ParallelGroups(), build, bf16=bf16, device=device)


def _training(system: BenchSystem) -> Training:
    choices: dict[str, Any] = {"attention": system.attention, "recompute": system.recompute, "compile": system.compile}
    if system.precision.startswith("fp8"):
        ends = {f"num_layers_at_{end}_in_bf16": system.bf16_ends for end in ("start", "end")}
        choices |= {"fp8": True, "fp8_recipe": system.recipe, **ends}
    return Training(steps=10_000, **choices)


def lakh_model(
    shape: BenchShape, system: BenchSystem, device: torch.device, embedding_std: float = INIT_STD, seed: int = 0
) -> nn.Module:
    """lakh's model of this shape with the initial weights of a run and the operations of a system."""
    with device:
        model = CodeModel(shape.model)
    init_weights(model, seed=seed, embedding_std=embedding_std)
    model.dtype = torch.bfloat16 if system.precision.endswith("mixed") else None
    if system.precision in ("bf16", "fp8"):
        model.bfloat16()
    bf16 = (model.dtype or next(model.parameters()).dtype) == torch.bfloat16
    ops, mode, _ = choose_ops(shape.model, _training(system), kernels=system.kernels, bf16=bf16, device=device.type)
    if system.precision.startswith("emulated-fp8"):
        last = shape.model.layers - system.bf16_ends
        plain = frozenset(layer for layer in range(shape.model.layers) if not system.bf16_ends <= layer < last)
        ops = replace(ops, linear=emulated_linear(system.recipe), bf16_layers=plain)
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
    model: nn.Module
    if system.name == "torchtitan":
        from bench.train.torchtitan import TorchtitanModel

        compiled = system.compile != "none"
        model = TorchtitanModel(shape.model, shape.sequence, device, system.checkout, compiled=compiled)
    else:
        model = TransformersModel(shape.model, device, shape.adapter)
    if system.precision == "bf16":
        for parameter in model.parameters():  # not buffers: rotary tables stay as the peer has them
            parameter.data = parameter.data.bfloat16()
    return torch.compile(model, dynamic=False) if system.compile == "model" else model  # type: ignore[return-value]


def _timed(step: Callable[[], object]) -> tuple[float, float]:
    """Wall seconds, and CPU seconds over all threads."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - began_s, time.process_time() - began_cpu_s
