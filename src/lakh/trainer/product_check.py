"""Find a device that computes wrong products without an error (silent data corruption). For the time between jobs.

Matrices of -1, 0 and 1 with an inner dim of 256 have products that bf16 and float32 hold exactly: any wrong bit shows.
Each product is checked with Freivalds' method: its sums over random subsets of columns must equal those that the CPU
computes from the factors, in integers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from lakh.health.checks import HealthReading

__all__ = ["count_wrong_products", "read_products"]

INNER = 256
PROBES = 8  # a wrong element is missed with probability 2^-8 in each product
SIZES = {"cuda": 8192, "cpu": 512}


def read_products(node: str, seconds: float) -> list[HealthReading]:
    """Check every GPU, or the CPU if there is none, for `seconds` each."""
    devices = [torch.device("cuda", n) for n in range(torch.cuda.device_count())] or [torch.device("cpu")]
    readings = []
    for device in devices:
        name = f"gpu{device.index}" if device.type == "cuda" else "cpu"
        _, wrong = count_wrong_products(device, seconds)
        readings.append(HealthReading(name, f"{node}/{name}", "wrong_products", wrong))
    return readings


def count_wrong_products(
    device: torch.device, seconds: float, *, multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm
) -> tuple[int, int]:
    """(products computed, wrong ones) within `seconds`; at least one product."""
    size = SIZES[device.type]
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-1, 2, shape, generator=random) for shape in ((size, INNER), (INNER, size)))
    probes = torch.randint(0, 2, (size, PROBES), generator=random)
    expected = left @ (right @ probes)  # int64, on the CPU
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    here = [tensor.to(device, dtype) for tensor in (left, right)]
    probes_here = probes.to(device, torch.float32)
    done = wrong = 0
    deadline_s = time.monotonic() + seconds
    while not done or time.monotonic() < deadline_s:
        sums = multiply(*here).float() @ probes_here  # below 2^24: exact in float32, also through TF32's parts
        wrong += not torch.equal(sums.to("cpu", torch.float64).round().long(), expected)
        done += 1
    return done, wrong
