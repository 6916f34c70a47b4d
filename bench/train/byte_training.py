"""Train a shape on the bytes of Python's standard library, in a given precision, as `lakh train` does: its initial
weights, its learning rate with warm-up and cosine decay, and float32 weights where the precision has them."""

from __future__ import annotations

import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bench.train.shapes import BenchShape, BenchSystem
from bench.train.steps import BenchTraining, stepper
from lakh.spec import Optimizer

__all__ = ["train_on_bytes"]

VOCAB = 256  # bytes
MOST_BYTES = 64 << 20
WARM_UP = 10  # one step of so many


def train_on_bytes(
    shape: BenchShape, system: BenchSystem, steps: int, *, lr: float, embedding_std: float
) -> tuple[list[float], float]:
    """The loss of every step, and the seconds of a step. Equal weights and batches for each system."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    shape = replace(shape, model=replace(shape.model, vocab=VOCAB), sequence=min(shape.sequence, shape.model.context))
    # A graph, because Python launches the kernels of a small batch more slowly than the GPU runs them.
    system = replace(system, graphs=on_gpu)
    data = _source_bytes().to(device)
    starts = _starts(len(data), steps, shape).to(device)
    offsets = torch.arange(shape.sequence + 1, device=device)

    def batch(step: int) -> Tensor:
        return data[starts[step][:, None] + offsets].long()

    training = BenchTraining(steps, Optimizer(lr=lr, warmup_steps=steps // WARM_UP), batch, embedding_std)
    step = stepper(shape, system, device, training)
    losses = [step().loss]
    float(losses[0])  # compiled from here on
    began_s = time.perf_counter()
    losses += [step().loss for _ in range(steps - 1)]
    found = torch.stack(losses).tolist()
    return found, (time.perf_counter() - began_s) / (steps - 1)


def _source_bytes() -> Tensor:
    """Python's standard library, without its tests."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(folder.rglob("*.py")) if not {"test", "tests", "site-packages"} & {*path.parts}]
    text = b"".join(path.read_bytes() for path in paths)[:MOST_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _starts(size: int, steps: int, shape: BenchShape) -> Tensor:
    """Where the sequences of each step start, the same in each run."""
    last = size - shape.sequence - 1
    return torch.randint(0, last, (steps, shape.micro_batch), generator=torch.Generator().manual_seed(0))
