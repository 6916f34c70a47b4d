"""One kind of GPU: its data-sheet numbers, and what is published about the parts of its family.

`Gpu` holds what a cluster file states. Everything the planner needs beyond that (multiprocessors, matrix tile width,
attention kernels, power limits) belongs to the family of the part: gpu_families.toml.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from lakh.config import from_dict, read_toml, require
from lakh.errors import ConfigError

__all__ = ["GPU_FAMILIES", "Gpu", "GpuFamily", "gpu_family"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFamily:
    dense_bf16_TFLOPs: float | None = None
    """Dense bf16 peak of the data sheet, which prints twice as much ("with sparsity") from the A100 on."""
    processors: int = 100
    """Streaming multiprocessors, from NVIDIA's white papers: tiles of a matrix product computed at once."""
    tile_columns: int = 128
    """Width of cuBLAS's usual tiles of large products: 128 x 256 or 256 x 256 from the H100 on."""
    switch_reduces: bool = False
    """NVSwitch reduces and multicasts in the switch (third generation, H100), so that the members of a node
    synchronise once; without it a ring or tree visits them one after another."""
    attention_gain: float = 1.0
    """Speed of attention kernels written for this part over FlashAttention-2. FlashAttention-3 on an H100: 1.5 to 2.0
    times forward, 1.5 to 1.75 backward, which is 2.5 of 3.5 parts of the work (arXiv 2407.08608); cuDNN 9 is close."""
    softmax_head_dim: float = 0.0
    """Head size whose matrix products take as long as the exponentials of its scores. A multiprocessor computes 16
    exponentials per clock (CUDA programming guide) beside 4,096 dense FLOPs on an H100, 8,192 on Blackwell; a score
    takes one exponential and four FLOPs per head element. On older parts they are hidden: fits of A100 rows find no
    such term."""
    precisions: tuple[str, ...] = ("bf16", "fp8", "nvfp4")
    """Precisions of its matrix units; all, for a part that is not in the file."""
    power_limit_W: float | None = None
    """Set for parts of one design that run at their power limit under matrix products."""


GPU_FAMILIES = {
    name: from_dict(GpuFamily, family, origin=f"gpu_families.toml [{name}]")
    for name, family in read_toml(Path(__file__).with_name("gpu_families.toml")).items()
}


@functools.cache
def gpu_family(kind: str) -> str:
    """The family of a part's name: "H100-SXM" is an H100. An unknown part is its own family."""
    for name in sorted(GPU_FAMILIES, key=len, reverse=True):
        if kind.upper().startswith(name):
            return name
    return kind


MOST_MEMORY_GIB = 4096.0
"""Several times the largest that is announced (1 TB, Rubin Ultra)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    kind: str
    """Name of the part, e.g. "H100-SXM"; "cpu" for a machine without a GPU."""
    memory_GiB: float
    """Memory of one accelerator."""
    dense_bf16_TFLOPs: float
    """Peak of dense bf16 matrix products: what MFU is measured against, never the sparse figure."""
    memory_bandwidth_GBps: float
    """Peak bandwidth of its memory."""
    source: str
    """Where these numbers come from."""
    power_W: float | None = None
    """Board power of one accelerator, for plans of power and cost."""

    def __post_init__(self) -> None:
        positive = ("memory_GiB", "dense_bf16_TFLOPs", "memory_bandwidth_GBps", "power_W")
        require(self, positive, lambda value: value > 0, "is not positive", "give the data-sheet value")
        too_much = "is more than any accelerator has"
        require(self, "memory_GiB", lambda value: value <= MOST_MEMORY_GIB, too_much, "give GiB of one GPU")
        if not self.source.strip():
            raise ConfigError("source", "is empty", "say where the numbers come from")
        dense = self.traits.dense_bf16_TFLOPs
        if dense is not None and self.dense_bf16_TFLOPs > 1.1 * dense:
            found = f"{self.dense_bf16_TFLOPs:g} is more than a {self.kind} can do in dense bf16 ({dense:g})"
            found += ": data sheets print the figure with sparsity, or that of fp8"
            raise ConfigError("dense_bf16_TFLOPs", found, f"give the dense figure, {dense:g}")

    @property
    def family(self) -> str:
        return gpu_family(self.kind)

    @property
    def traits(self) -> GpuFamily:
        return GPU_FAMILIES.get(self.family, GpuFamily())

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions of its matrix products."""
        return ("bf16",) if self.kind == "cpu" else self.traits.precisions

    @property
    def peak_FLOPs(self) -> float:
        """Dense bf16 FLOP/s of the data sheet."""
        return self.dense_bf16_TFLOPs * 1e12

    @property
    def sustained_FLOPs(self) -> float:
        """The peak, corrected for parts of one design that differ by their power limit.

        Clocks at the power limit follow the power: at the lowest voltage power is proportional to the clock. So these
        parts sustain more or less than their data-sheet peaks say, relative to the B200 (1,000 W, 2,250 TFLOP/s).
        """
        if (limit_W := self.traits.power_limit_W) is None:
            return self.peak_FLOPs
        base = GPU_FAMILIES["B200"]
        assert base.power_limit_W is not None
        assert base.dense_bf16_TFLOPs is not None
        return self.peak_FLOPs * (limit_W / base.power_limit_W * base.dense_bf16_TFLOPs / self.dense_bf16_TFLOPs)

    @property
    def memory_bytes(self) -> float:
        return self.memory_GiB * 2**30

    @property
    def memory_Bps(self) -> float:
        return self.memory_bandwidth_GBps * 1e9
