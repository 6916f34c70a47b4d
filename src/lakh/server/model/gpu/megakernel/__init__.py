"""A step of one row as a single kernel, which reads weights while its blocks wait for each other (cuda/*.cu).

Kernel after kernel (one.py) memory is idle from the end of one to the first weights of the next: 144 times a step with
24 layers. Here one warp of each block asks for the weights of the whole step, in order, whatever the others wait for,
and blocks tell each other their results by words that carry the number of the round. What is multiplied is bf16, in
tensor cores; sums, scores and the residual are float32.

All blocks have to be on the chip at once, one on each SM: what else runs there has to end by itself, so it is not for
processes that share the SMs among them (MPS) or have kernels that wait for other processes (NCCL). A block that waits
half a minute for a word ends the process's use of the GPU, with an error. Whether it is faster than one.py is for
decode.py to measure.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.gpu.decode_batch import DecodeBatch
from lakh.server.model.gpu.megakernel.nvrtc import CudaKernel
from lakh.server.model.inference import InferenceModel
from lakh.server.model.kv_cache import PagedCache
from lakh.spec.model import Model

__all__ = ["Megakernel", "MegakernelPlan", "plan"]

WARPS = 8
CHUNK_BYTES = 16384  # at least; a chunk holds a row
LEAST_SLOTS = 5  # four rows are used at once, and each may have a chunk of its own
MOST_SPLITS = 16
# Weights under way. A step of 1.2B on an H200: 0.702 ms with these, 0.713 with 32 KiB of both, 0.744 with 48 of both
# (words come late), 0.716 with 64 and 16.
BUSY_BYTES, IDLE_BYTES = 32768, 24576


@dataclass(frozen=True)
class MegakernelPlan:
    """How a model is shared out."""

    blocks: int
    splits: int
    chunk_bytes: int
    slots: int
    shared_bytes: int


def plan(spec: Model, num_ids: int, blocks: int, shared_bytes: int) -> MegakernelPlan | None:
    """For a chip with so many SMs and so much shared memory; None where the shape cannot be shared out."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    if spec.qk_norm or spec.head_dim not in (32, 64, 128, 256):
        return None
    if any(width % (8 * WARPS) for width in (spec.width, queries, spec.ffn)):
        return None
    # Each block tells something that all others wait for: so none is left behind while the words are written anew.
    blocks = min(blocks, max(spec.width, spec.ffn) // 2, queries + 2 * keys)
    splits = 1
    while splits < MOST_SPLITS and 2 * splits * spec.heads <= blocks:
        splits *= 2
    most_rows = max(
        _up(_share(queries + 2 * keys, blocks), 4),
        _up(2 * _share(spec.width // 2, blocks), 4),
        _up(4 * _share(spec.ffn // 2, blocks), 4),
        _up(_share(num_ids, blocks), 4),
    )
    most_x = max(spec.width, queries, spec.ffn, WARPS * (spec.head_dim + 2) + 3 * spec.head_dim)
    residual = _up(2 * _share(spec.width // 2, blocks), 4)
    fixed_bytes = 4 * (most_x + WARPS * most_rows + residual + spec.head_dim + WARPS + 2)
    chunk_bytes = max(CHUNK_BYTES, 2 * max(spec.width, queries, spec.ffn))
    slots = (shared_bytes - fixed_bytes) // (chunk_bytes + 16)  # and two barriers
    if slots < LEAST_SLOTS:
        return None
    return MegakernelPlan(blocks, splits, chunk_bytes, slots, fixed_bytes + slots * (chunk_bytes + 16))


class Megakernel:
    @staticmethod
    def plan(network: InferenceModel) -> MegakernelPlan | None:
        """None where the network or the chip is not of the kind."""
        device = network.device
        if network.dtype != torch.bfloat16 or network.shard.size > 1 or _shares_its_chip():
            return None
        if torch.cuda.get_device_capability(device) < (9, 0):
            return None
        chip = torch.cuda.get_device_properties(device)
        shared_bytes: int = chip.shared_memory_per_block_optin  # type: ignore[attr-defined]
        return plan(network.spec, network.num_ids, chip.multi_processor_count, shared_bytes)

    def __init__(self, network: InferenceModel, cache: PagedCache, plan: MegakernelPlan) -> None:
        """Compiles, some seconds; CudaCompileError where that cannot be."""
        spec, device = network.spec, network.device
        self._network, self._cache, self._blocks = network, cache, plan.blocks
        self._kernel = CudaKernel(
            source(),
            "whole_step",
            defines(spec, network.num_ids, plan),
            threads=32 * (WARPS + 1),
            shared_bytes=plan.shared_bytes,
            device=device,
        )
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        parts = spec.heads * plan.splits * (spec.head_dim + 2)
        # After attention, after the feed-forward, qkv, parts of attention, attended, inner, the best of each block.
        sizes = [spec.width // 2, spec.width // 2, queries + 2 * keys, parts, queries // 2, spec.ffn // 2, plan.blocks]
        self._words = [torch.zeros(size, dtype=torch.int64, device=device) for size in sizes]
        self._counters = torch.zeros(2, dtype=torch.int32, device=device)
        self._logits = torch.zeros(1, network.num_ids, device=device)

    def __call__(self, batch: DecodeBatch) -> None:
        network, cache = self._network, self._cache
        self._kernel(
            self._blocks, network.embed,
            *[network.matrix(name, 0) for name in ("qkv", "o", "gate_up", "down")],  # the other layers' lie behind it
            network.head, network.norms, network.cos, network.sin,
            cache.keys_LKCD, cache.values_LKCD, cache.keys_LKCD.shape[2],
            batch.tables, batch.positions, batch.tokens, batch.steps, batch.history, self._logits,
            *self._words, self._counters,
        )  # fmt: skip
        batch.logits = self._logits


def _shares_its_chip() -> bool:
    """Whether others may hold SMs until somebody else comes: another such step with NVIDIA's multi-process service, or
    the kernels of a group over NCCL.
    """
    if dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        return True
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")).exists()


def source() -> str:
    return "".join(file.read_text() for file in sorted(Path(__file__).parent.glob("*.cu")))


def defines(spec: Model, num_ids: int, plan: MegakernelPlan) -> dict[str, object]:
    """The words that the source leaves open."""
    return {
        "LAYERS": spec.layers,
        "WIDTH": spec.width,
        "HEADS": spec.heads,
        "KV_HEADS": spec.kv_heads,
        "HEAD_DIM": spec.head_dim,
        "FFN": spec.ffn,
        "NUM_IDS": num_ids,
        "NORM_EPS": f"{spec.norm_eps!r}f",
        "PAGE": BLOCK_TOKENS,
        "BLOCKS": plan.blocks,
        "WARPS": WARPS,
        "CHUNK_BYTES": plan.chunk_bytes,
        "SLOTS": plan.slots,
        "BUSY_BYTES": BUSY_BYTES,
        "IDLE_BYTES": IDLE_BYTES,
        "SPLITS": plan.splits,
        "SHARED_BYTES": plan.shared_bytes,
    }


def _share(lines: int, blocks: int) -> int:
    """The most that one block has of them."""
    return -(-lines // blocks)


def _up(count: int, to: int) -> int:
    return -(-count // to) * to
