"""Product of two matrices of 8-bit integers with a scale for each row, in bf16.

cuBLAS writes such products as 32-bit integers, whose scaling would take another pass over four bytes a number; these
kernels scale them where they are computed. Sums are exact.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lakh.workloads.code.kernels.cuda.int8_product import Int8Product
from lakh.workloads.code.kernels.cuda.nvrtc import CudaCompileError

__all__ = ["int8_product"]

_log = logging.getLogger(__name__)


@torch.library.custom_op("lakh::int8_product", mutates_args=())
def int8_product(a_NK: Tensor, a_scale: Tensor, b_MK: Tensor, b_scale: Tensor) -> Tensor:
    """(a * a_scale) @ (b * b_scale)^T in bf16; scales are N 1 and M 1. K and M are multiples of 16."""
    y_NM = a_NK.new_empty(a_NK.shape[0], b_MK.shape[0], dtype=torch.bfloat16)
    _kernel(a_NK.device)(a_NK, a_scale, b_MK, b_scale, y_NM)
    return y_NM


@int8_product.register_fake
def _(a_NK: Tensor, a_scale: Tensor, b_MK: Tensor, b_scale: Tensor) -> Any:
    return a_NK.new_empty(a_NK.shape[0], b_MK.shape[0], dtype=torch.bfloat16)


@functools.cache
def _kernel(device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:
        try:
            return Int8Product(device)
        except CudaCompileError as error:
            _log.warning("products of 8-bit integers use Triton: %s", error)
    from lakh.workloads.code.kernels.eight_bit import triton_int8_product

    return triton_int8_product.int8_product
