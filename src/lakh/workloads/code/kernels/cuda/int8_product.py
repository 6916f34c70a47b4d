"""Product of two matrices of 8-bit integers with a scale for each row, on Hopper GPUs (int8_product.cu)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lakh.workloads.code.kernels.cuda.nvrtc import CudaKernel, ptx
from lakh.workloads.code.kernels.cuda.tensor_map import tiles

__all__ = ["SETTINGS", "Int8Product", "defines", "source"]

CLUSTER, ROWS, COLUMNS, DEPTH = 2, 128, 256, 128
SETTINGS = {"STAGES": 3, "GROUP": 16}
"""The fastest of those that bench/train/fp8_sweep.py tries, on an H200."""


class Int8Product:
    def __init__(self, device: torch.device) -> None:
        """Compiles for some tenths of a second; raises CudaCompileError if that fails."""
        stage_bytes = (ROWS + COLUMNS) * DEPTH
        self._kernel = CudaKernel(
            source(),
            "int8_product",
            defines(),
            threads=128 * (ROWS // 64 + 1),
            shared_bytes=SETTINGS["STAGES"] * (stage_bytes + 16) + 1024,
            device=device,
            architecture_specific=True,
        )
        self._most_clusters = torch.cuda.get_device_properties(device).multi_processor_count // CLUSTER

    def __call__(self, a_NK: Tensor, a_scale: Tensor, b_MK: Tensor, b_scale: Tensor, y_NM: Tensor) -> None:
        (N, K), M = a_NK.shape, b_MK.shape[0]
        clusters = min(-(-N // (CLUSTER * ROWS)) * -(-M // COLUMNS), self._most_clusters)
        a, b = tiles(a_NK, ROWS, DEPTH), tiles(b_MK, COLUMNS // CLUSTER, DEPTH)
        self._kernel(CLUSTER * clusters, a, b, a_scale, b_scale, y_NM, N, M, K)


def defines() -> dict[str, object]:
    """The macros that the source needs."""
    return {**SETTINGS, "CLUSTER": CLUSTER, "ROWS": ROWS, "COLUMNS": COLUMNS, "DEPTH": DEPTH}


def source() -> str:
    return ptx() + Path(__file__).with_suffix(".cu").read_text()
