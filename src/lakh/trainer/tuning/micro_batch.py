"""Find the best micro-batch for this GPU: the largest that fits, unless a smaller one is faster.

Memory grows almost linearly with the micro-batch, so two small trials predict where it reaches the limit. The predicted
size is tried, then smaller or larger ones as needed. It is timed against the next smaller size and against the one that
leaves the fewest multiprocessors idle (spec/gemm_waves.py). `choose` is a pure decision; `try_one` takes a few steps of
the compiled model on random tokens. The result is for one rank; ranks that share the optimizer state have room for
more.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lakh.errors import InfeasiblePlan, UserError
from lakh.spec import Mesh, Run
from lakh.spec.gemm_waves import block_efficiency
from lakh.trainer.optim.optimizer import build_optimizer
from lakh.trainer.step import objective_of, update, uses_bf16
from lakh.trainer.tuning.memory import is_out_of_memory
from lakh.workloads.code.batch import Batch
from lakh.workloads.code.model import CodeModel
from lakh.workloads.code.parallel import ParallelGroups, parallelise

__all__ = ["MicroBatchChoice", "MicroBatchTrial", "choose", "find_micro_batch", "try_one"]

LIMIT_SHARE = 0.93  # of the free memory; fragmentation takes the rest in a long run
WARM_UP_STEPS, TIMED_STEPS = 2, 4
FASTER = 1.01  # below this gain the smaller of two sizes is chosen


@dataclass(frozen=True)
class MicroBatchTrial:
    micro_batch: int
    peak_bytes: int | None
    """None if it did not fit."""
    tok_per_s: float = 0.0


@dataclass(frozen=True)
class MicroBatchChoice:
    micro_batch: int
    reason: str
    tried: tuple[MicroBatchTrial, ...]


def choose(
    sizes: list[int],
    attempt: Callable[[int], MicroBatchTrial],
    limit_bytes: int,
    fullness: Callable[[int], float] = lambda size: 0.0,
) -> MicroBatchChoice:
    """The best of the ascending `sizes`. `fullness`: share of busy multiprocessors, which may favour a smaller size."""
    tried: dict[int, MicroBatchTrial] = {}

    def fits(size: int) -> bool:
        if size not in tried:
            tried[size] = attempt(size)
        peak = tried[size].peak_bytes
        return peak is not None and peak <= limit_bytes

    def choice(size: int, reason: str) -> MicroBatchChoice:
        return MicroBatchChoice(size, reason, tuple(tried[known] for known in sorted(tried)))

    if not fits(sizes[0]):
        found = f"a micro-batch of {sizes[0]} does not fit into {limit_bytes / 2**30:.1f} GiB"
        raise InfeasiblePlan("data.micro_batch", found, "recompute (train.recompute), or use more GPUs")
    if len(sizes) == 1:
        return choice(sizes[0], "the only size that divides the batch")
    fitting, too_large, candidate = [sizes[0]], math.inf, sizes[1]
    while candidate > fitting[-1]:
        if fits(candidate):
            fitting.append(candidate)
        else:
            too_large = candidate
        reach = _reach(tried[fitting[-2]], tried[fitting[-1]], limit_bytes) if len(fitting) > 1 else 0.0
        candidate = max(size for size in sizes if size == fitting[-1] or (size <= reach and size < too_large))
    largest = fitting[-1]
    rivals = {max((size for size in sizes if size < largest), default=largest)}
    rivals.add(max((size for size in sizes if largest / 2 < size <= largest), key=lambda size: (fullness(size), size)))
    contest = [size for size in sorted({*rivals, largest}) if fits(size)]
    best = max(contest, key=lambda size: tried[size].tok_per_s)
    chosen = next(size for size in contest if FASTER * tried[size].tok_per_s > tried[best].tok_per_s)
    if chosen == largest:
        return choice(largest, "the largest that fits, and the fastest")
    gain = tried[largest].tok_per_s / tried[chosen].tok_per_s - 1
    only = " only" if gain > 0 else ""
    return choice(chosen, f"{largest} fits too, and changes tokens/s by {100 * gain:+.1f} %{only}")


def _reach(first: MicroBatchTrial, second: MicroBatchTrial, limit_bytes: int) -> float:
    """The size at which the line through two fitting trials reaches the limit.

    The slope changes where a buffer reaches its maximal size (chunked logits), so the caller repeats this with the two
    largest trials.
    """
    assert first.peak_bytes is not None
    assert second.peak_bytes is not None
    slope = (second.peak_bytes - first.peak_bytes) / (second.micro_batch - first.micro_batch)
    if slope <= 0:
        return math.inf
    return first.micro_batch + (limit_bytes - first.peak_bytes) / slope + 1e-6  # rounding


def find_micro_batch(run: Run, *, progress: Callable[[str], None] = lambda text: None) -> MicroBatchChoice:
    """Try micro-batches on this machine's GPU."""
    if not torch.cuda.is_available():
        raise UserError(
            "micro-batch", "this machine has no GPU to try it on", "lakh train RUN --dry-run estimates memory"
        )
    device = torch.device("cuda")

    def attempt(size: int) -> MicroBatchTrial:
        progress(f"micro-batch {size}")
        return try_one(run, size, device)

    sizes = [size for size in range(1, run.data.batch + 1) if run.data.batch % size == 0]
    _clear(device)
    free_bytes, _ = torch.cuda.mem_get_info(device)  # other processes may use it too
    processors = torch.cuda.get_device_properties(device).multi_processor_count

    def full(size: int) -> float:
        return block_efficiency(run.model, size * run.data.sequence, processors)

    return choose(sizes, attempt, int(LIMIT_SHARE * free_bytes), full)


def try_one(run: Run, micro_batch: int, device: torch.device) -> MicroBatchTrial:
    """Take a few steps with this micro-batch; with two micro-batches per step if the run accumulates gradients, because
    they need memory beside the activations."""
    passes = min(2, run.data.batch // micro_batch)
    data = dataclasses.replace(run.data, batch=passes * micro_batch, micro_batch=micro_batch)
    alone = dataclasses.replace(run, data=data, mesh=Mesh())
    _clear(device)
    tried = MicroBatchTrial(micro_batch, None)
    try:
        tok_per_s = _measure(alone, device)
        peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        tried = MicroBatchTrial(micro_batch, peak_bytes, tok_per_s)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    _clear(device)  # the exception, whose frames hold the model, is gone here
    return tried


def _clear(device: torch.device) -> None:
    """Free compiled code, which holds models, and cached memory."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _measure(run: Run, device: torch.device) -> float:
    """Tokens per second."""

    def build() -> CodeModel:
        with device:
            return CodeModel(run.model)  # speed and memory do not depend on the weights

    bf16 = uses_bf16(run.train, device)
    model = parallelise(run, run.mesh.resolve(1), ParallelGroups(), build, bf16=bf16, device=device)
    optimizer = build_optimizer(model, run.optim)
    shape = (run.data.micro_batch, run.data.sequence + 1)
    rows = torch.randint(0, run.model.vocab, shape, generator=torch.Generator().manual_seed(0)).to(device)
    batches = [Batch(rows[:, :-1], rows[:, 1:])] * run.accumulation(1)
    began_s = 0.0
    for step in range(WARM_UP_STEPS + TIMED_STEPS):
        if step == WARM_UP_STEPS:
            _wait(device)
            began_s = time.monotonic()
        update(
            model, optimizer, batches, lr=run.optim.lr, clip_norm=run.optim.clip_norm, objective=objective_of(run.train)
        )
    _wait(device)
    return TIMED_STEPS * run.tokens_per_step / (time.monotonic() - began_s)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
