"""Train a shape on the bytes of Python's standard library, in a given precision."""

from __future__ import annotations

import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bench.train.shapes import BenchShape, BenchSystem
from bench.train.steps import stepper

__all__ = ["train_on_bytes"]

VOCAB = 256  # bytes
MOST_BYTES = 64 << 20


def train_on_bytes(shape: BenchShape, precision: str, steps: int) -> tuple[list[float], float]:
    """The loss of every step, and the seconds of a step. Equal weights and batches for each precision."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = replace(shape, model=replace(shape.model, vocab=VOCAB), sequence=min(shape.sequence, shape.model.context))
    system = BenchSystem(precision, precision=precision, compile="auto" if device.type == "cuda" else "none")
    data = _source_bytes()
    torch.manual_seed(0)
    step = stepper(shape, system, device, batches=lambda number: _rows(data, number, shape))
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


def _rows(data: Tensor, step: int, shape: BenchShape) -> Tensor:
    """The sequences of a step, the same in each run, with one more byte for the targets."""
    size = shape.sequence + 1
    starts = torch.randint(0, len(data) - size, (shape.micro_batch,), generator=torch.Generator().manual_seed(step))
    return torch.stack([data[at : at + size] for at in starts.tolist()]).long()
