"""Train a shape on the bytes of Python's standard library, in a given precision, as `lakh train` does: its initial
weights, its learning rate with warm-up and cosine decay, and float32 weights where the precision has them.

The trained weights are evaluated on other bytes, in a precision that is the same for all: the loss of a step in 8 bits
has the rounding of its own products, and the weights are served without it.
"""

from __future__ import annotations

import functools
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench.train.shapes import BenchShape, BenchSystem
from bench.train.steps import BenchTraining, lakh_model, stepper
from lakh.spec import Optimizer

__all__ = ["VOCAB", "TrainedOnBytes", "source_bytes", "train_on_bytes"]

VOCAB = 256  # bytes
MOST_BYTES = 64 << 20
WARM_UP = 10  # one step of so many
HELD_OUT = 32  # one byte of so many, the last ones
HELD_OUT_BATCHES = 64


class TrainedOnBytes(NamedTuple):
    losses: list[float]
    """Of every step."""
    step_s: float
    held_out: float
    """Loss of the trained weights on bytes that were not trained on."""
    model: nn.Module
    """Evaluated as all others are."""


def train_on_bytes(
    shape: BenchShape,
    system: BenchSystem,
    steps: int,
    *,
    lr: float,
    embedding_std: float,
    evaluated_as: BenchSystem,
    seed: int = 0,
) -> TrainedOnBytes:
    """Equal weights and batches for each system and seed. `evaluated_as` has the precision of the evaluation."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    shape = replace(shape, model=replace(shape.model, vocab=VOCAB), sequence=min(shape.sequence, shape.model.context))
    # A graph, because Python launches the kernels of a small batch more slowly than the GPU runs them.
    system = replace(system, graphs=on_gpu)
    data, kept_apart = (part.to(device) for part in source_bytes())
    starts = _starts(len(data), steps, shape, seed).to(device)
    offsets = torch.arange(shape.sequence + 1, device=device)

    def batch(step: int) -> Tensor:
        return data[starts[step][:, None] + offsets].long()

    training = BenchTraining(steps, Optimizer(lr=lr, warmup_steps=steps // WARM_UP), batch, embedding_std, seed)
    step = stepper(shape, system, device, training)
    losses = [step().loss]
    float(losses[0])  # compiled from here on
    began_s = time.perf_counter()
    losses += [step().loss for _ in range(steps - 1)]
    found = torch.stack(losses).tolist()
    step_s = (time.perf_counter() - began_s) / (steps - 1)
    plain = lakh_model(shape, replace(evaluated_as, compile="none"), device)
    plain.load_state_dict(step.model.state_dict())
    return TrainedOnBytes(found, step_s, _loss(plain, kept_apart, shape), plain)


def _loss(model: nn.Module, data: Tensor, shape: BenchShape) -> float:
    """Mean over sequences that are spread evenly over `data`."""
    count = HELD_OUT_BATCHES * shape.micro_batch
    starts = torch.linspace(0, len(data) - shape.sequence - 1, count, device=data.device).long()
    rows = data[starts[:, None] + torch.arange(shape.sequence + 1, device=data.device)].long()
    with torch.no_grad():
        losses = [model(part[:, :-1], targets_BT=part[:, 1:]) for part in rows.split(shape.micro_batch)]
    return float(torch.stack(losses).mean())


@functools.cache
def source_bytes() -> tuple[Tensor, Tensor]:
    """Python's standard library, without its tests: what is trained on, and what is kept apart."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(folder.rglob("*.py")) if not {"test", "tests", "site-packages"} & {*path.parts}]
    text = b"".join(path.read_bytes() for path in paths)[:MOST_BYTES]
    source = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    kept_apart = len(source) // HELD_OUT
    return source[:-kept_apart], source[-kept_apart:]


def _starts(size: int, steps: int, shape: BenchShape, seed: int) -> Tensor:
    """Where the sequences of each step start, the same in each run of a seed."""
    last = size - shape.sequence - 1
    return torch.randint(0, last, (steps, shape.micro_batch), generator=torch.Generator().manual_seed(seed))
