"""Attention of a decode batch on Hopper GPUs (attention.cu), by programmatic dependent launch."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.gpu.batch.product import source
from lakh.server.model.gpu.decode_batch import DecodeBatch
from lakh.server.model.inference import InferenceModel
from lakh.server.model.kv_cache import PagedCache
from lakh.workloads.code.kernels.cuda.nvrtc import CudaKernel

__all__ = ["BatchAttention", "defines"]

WARPS = 4
HEAD_DIMS = (64, 128)
MAX_GROUP = 3  # query heads of a key/value head: with more, registers spill
MIN_BLOCKS_PER_SM = 0.9  # one block has a whole sequence: with fewer, splitting sequences is faster


class BatchAttention:
    """Keys and values of a page go straight into registers, the first before the queries are there."""

    @staticmethod
    def is_supported(network: InferenceModel, cache: PagedCache, tokens: int) -> bool:
        spec, num_sms = network.spec, torch.cuda.get_device_properties(network.device).multi_processor_count
        has_blocks = tokens * spec.kv_heads >= MIN_BLOCKS_PER_SM * num_sms
        is_bf16 = cache.keys_LKCD.dtype == torch.bfloat16
        return has_blocks and is_bf16 and spec.head_dim in HEAD_DIMS and spec.heads // spec.kv_heads <= MAX_GROUP

    def __init__(self, network: InferenceModel, cache: PagedCache, parts: int) -> None:
        """For queries, keys and values in that many parts."""
        spec = network.spec
        self._network, self._cache = network, cache
        self._kernel = _kernel(spec.heads, spec.kv_heads, spec.head_dim, parts, network.device)

    def __call__(self, qkv_PNX: Tensor, layer: int, batch: DecodeBatch) -> Tensor:
        """Adds the parts, stores the new keys and values, and attends: N x heads*head size."""
        spec, tokens = self._network.spec, qkv_PNX.shape[1]
        keys, values, *_ = self._cache.kernel_tensors(layer)
        out = torch.empty(tokens, spec.heads * spec.head_dim, dtype=self._network.dtype, device=qkv_PNX.device)
        self._kernel(
            tokens * spec.kv_heads, qkv_PNX, self._network.cos, self._network.sin, keys, values, batch.tables,
            batch.positions, out, keys.shape[1], batch.tables.shape[1],
        )  # fmt: skip
        return out


def defines(heads: int, kv_heads: int, head_dim: int, parts: int) -> dict[str, object]:
    """The macros that attention.cu needs."""
    sizes: dict[str, object] = {"HEADS": heads, "KV_HEADS": kv_heads, "GROUP": heads // kv_heads, "D": head_dim}
    scale = head_dim**-0.5 * math.log2(math.e)
    return sizes | {"PAGE": BLOCK_TOKENS, "PARTS": parts, "SCALE_LOG2E": f"{scale!r}f"}


@functools.cache
def _kernel(heads: int, kv_heads: int, head_dim: int, parts: int, device: torch.device) -> CudaKernel:
    """Compiled for some tenths of a second; graphs of other sizes share it."""
    return CudaKernel(
        source("attention"),
        "batch_attention",
        defines(heads, kv_heads, head_dim, parts),
        threads=32 * WARPS,
        shared_bytes=0,
        device=device,
        pdl=True,
        architecture_specific=True,
    )
