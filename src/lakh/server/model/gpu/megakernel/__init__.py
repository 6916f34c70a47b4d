"""Megakernel: a decode step of a single sequence as one persistent CUDA kernel (*.cu), with one block per SM.

With separate kernels (single_sequence.py) memory is idle from the end of one kernel to the first weights of the next,
144 times a step with 24 layers. Here one warp of each block loads the weights of all layers in order, without
waiting for the other warps, and blocks publish their results with ready flags that carry the number of the round.
Products on tensor cores are of bf16, with weights of 8 bits of f16, and with weights of 4 bits of 8-bit integers (x is
two of them, with a scale for 32 columns); sums, logits and the residual stream are float32.

All blocks must be resident at once, so other kernels on the GPU must end by themselves: not for processes that share
SMs (MPS) or run kernels that wait for other processes (NCCL). A block that waits half a minute for a ready flag traps,
which ends this process's use of the GPU with an error. decode.py measures whether it is faster than separate kernels.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.gpu.decode_batch import DecodeBatch
from lakh.server.model.gpu.quantized import BITS, Fp8Matrix, row_bytes
from lakh.server.model.inference import InferenceModel
from lakh.server.model.kv_cache import PagedCache
from lakh.spec.model import Model
from lakh.workloads.code.architectures import architecture_of
from lakh.workloads.code.kernels.cuda.nvrtc import CudaKernel, ptx

__all__ = ["Megakernel", "MegakernelPlan", "plan"]

ARCHITECTURES = ("llama", "mistral", "phi3")
KERNEL_NAME = "decode_step"
WARPS = 8
CHUNK_BYTES = {16: 16384, 8: 16640, 4: 9728}
"""By bits; a chunk holds at least one row: 4, 8 or 8 rows of 2,048 columns."""
ROW_PADDING = {16: 0, 8: 128, 4: 128}
"""By bits: at most, of a row in shared memory (3_matmul.cu)."""
MIN_SLOTS = 5  # four rows are used at once, and each may have a chunk of its own
MAX_SPLITS = 16
MAX_BATCH = {16: 1, 8: 8, 4: 1}
"""By bits: tiles (8 bits: of 32 columns, 4 bits: of 256) of a row that a warp reads at once; weights of 16 bits have no
such limit. With 2 tiles of 4 bits registers spill."""
# Weights in flight while the warps multiply and while they wait, by bits. With more, ready flags arrive late; other
# numbers were slower on an H200 (bench/results/decode_NVIDIA-H200_2026-11-18.md).
BUSY_BYTES = {16: 32768, 8: 49152, 4: 49152}
IDLE_BYTES = {16: 24576, 8: 8192, 4: 8192}
AHEAD_BYTES = {16: 0, 8: 65536, 4: 65536}
"""By bits: weights asked into L2 before they are loaded. In bf16, where memory is nearly busy, a step takes longer."""


@dataclass(frozen=True)
class MegakernelPlan:
    """How the work is divided over blocks and shared memory."""

    blocks: int
    splits: int
    chunk_bytes: int
    slots: int
    shared_bytes: int
    bits: int


def plan(spec: Model, num_ids: int, blocks: int, shared_bytes: int, bits: int = 16) -> MegakernelPlan | str:
    """The plan for a GPU with `blocks` SMs of `shared_bytes` shared memory and weights of `bits`, or the reason why
    there is none."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    if architecture_of(spec).name not in ARCHITECTURES:
        return f"the megakernel implements {', '.join(ARCHITECTURES)}, and the model is {architecture_of(spec).name}"
    if spec.sliding_window is not None:
        return "the megakernel has no sliding window"
    if spec.head_dim not in (32, 64, 128, 256) or queries != spec.width:
        return f"the megakernel has no {spec.heads} heads of {spec.head_dim} for a width of {spec.width}"
    if any(width % (8 * WARPS) for width in (spec.width, queries, spec.ffn)):
        return f"width, heads and ffn of the megakernel are multiples of {8 * WARPS}"
    # Each block publishes something that all others wait for, so none falls behind while flags are rewritten.
    blocks = min(blocks, max(spec.width, spec.ffn) // 2, queries + 2 * keys)
    splits = 1
    while splits < MAX_SPLITS and 2 * splits * spec.heads <= blocks:
        splits *= 2
    width, ffn = 2 * _share(spec.width // 2, blocks), 4 * _share(spec.ffn // 2, blocks)
    max_rows = _round_up(max(_share(queries + 2 * keys, blocks), width, ffn, _share(num_ids, blocks)), 4)
    scratch = (WARPS + 3) * spec.head_dim + 2 * WARPS  # of attention
    max_x = max(spec.width, queries, spec.ffn, scratch)
    residual = _round_up(width, 4)
    # Scales of the rows of all layers: qkv, o, gate and up, down; and of the head.
    of_layer = [_round_up(rows, 4) for rows in (_share(queries + 2 * keys, blocks), width, ffn, width)]
    scales = spec.layers * sum(of_layer) + _round_up(_share(num_ids, blocks), 4) if bits == 8 else 0
    fixed_bytes = 4 * (max_x + WARPS * max_rows + residual + spec.head_dim + WARPS + 3 + scales)
    chunk_bytes = max(CHUNK_BYTES[bits], row_bytes(max(spec.width, queries, spec.ffn), bits) + ROW_PADDING[bits])
    slots = (shared_bytes - fixed_bytes) // (chunk_bytes + 16)  # and two barriers
    if slots < MIN_SLOTS:
        return f"{slots} chunks of {chunk_bytes} bytes fit into shared memory, and {MIN_SLOTS} are needed"
    return MegakernelPlan(blocks, splits, chunk_bytes, slots, fixed_bytes + slots * (chunk_bytes + 16), bits)


class Megakernel:
    @staticmethod
    def plan(network: InferenceModel, kv_dtype: torch.dtype = torch.bfloat16) -> MegakernelPlan | str:
        """The plan for this model, the type of its cache and this GPU, or the reason why there is none."""
        device = network.device
        if kv_dtype == torch.int8:
            return "the megakernel has no KV cache of int8"
        if network.dtype != torch.bfloat16 or network.shard.size > 1:
            return "the megakernel computes a whole model in bf16"
        if _shares_gpu():
            return "the megakernel needs all SMs, and MPS or NCCL is in use"
        if torch.cuda.get_device_capability(device) < (9, 0):
            return "the megakernel needs compute capability 9.0"
        gpu = torch.cuda.get_device_properties(device)
        shared_bytes: int = gpu.shared_memory_per_block_optin  # type: ignore[attr-defined]
        bits = BITS.get(network.precision, 16)
        return plan(network.spec, network.num_ids, gpu.multi_processor_count, shared_bytes, bits)

    def __init__(self, network: InferenceModel, cache: PagedCache, plan: MegakernelPlan) -> None:
        """Compiles for some seconds; raises CudaCompileError if that fails."""
        spec, device = network.spec, network.device
        self._network, self._cache, self._blocks = network, cache, plan.blocks
        self._kernel = CudaKernel(
            source(),
            KERNEL_NAME,
            defines(spec, network.num_ids, plan),
            threads=32 * (WARPS + 2),
            shared_bytes=plan.shared_bytes,
            device=device,
        )
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        parts = spec.heads * plan.splits * (spec.head_dim + 2)
        # After attention, after the feed-forward, qkv, splits of attention, attended, inner, the best of each block.
        pair = torch.int64 if plan.bits == 16 else torch.int32
        flags = [(spec.width // 2, pair), (spec.width // 2, pair), (queries + 2 * keys, torch.int64)]
        flags += [(parts, torch.int64), (queries // 2, pair), (spec.ffn // 2, pair), (plan.blocks, torch.int64)]
        self._flags = [torch.zeros(size, dtype=dtype, device=device) for size, dtype in flags]
        self._counters = torch.zeros(2, dtype=torch.int32, device=device)
        self._logits = torch.zeros(1, network.num_ids, device=device)

    def __call__(self, batch: DecodeBatch) -> None:
        network, cache = self._network, self._cache
        # Of the first layer: the others follow in memory.
        weights = [network.matrix(name, 0) for name in ("qkv", "o", "gate_up", "down")]
        weights.append(network.head_matrix())
        values = [w if isinstance(w, Tensor) else w.values for w in weights]
        scales = [w.scales if isinstance(w, Fp8Matrix) else network.norms for w in weights]  # any address if unused
        self._kernel(
            self._blocks, network.embed, *values, *scales, network.norms, network.cos, network.sin,
            cache.keys_LKCD, cache.values_LKCD, cache.keys_LKCD.shape[2],
            batch.tables, batch.positions, batch.tokens, batch.steps, batch.history, self._logits,
            *self._flags, self._counters,
        )  # fmt: skip
        batch.logits = self._logits


def _shares_gpu() -> bool:
    """Whether other kernels may hold SMs while they wait: another megakernel under MPS, or NCCL."""
    if dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        return True
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")).exists()


def source() -> str:
    return ptx() + "".join(file.read_text() for file in sorted(Path(__file__).parent.glob("*.cu")))


def defines(spec: Model, num_ids: int, plan: MegakernelPlan) -> dict[str, object]:
    """The macros that the source needs."""
    names = ("layers", "width", "heads", "kv_heads", "head_dim", "ffn")
    sizes = {name: getattr(spec, name) for name in names} | asdict(plan)
    return {name.upper(): size for name, size in sizes.items()} | {
        "NUM_IDS": num_ids,
        "NORM_EPS": f"{spec.norm_eps!r}f",
        "PAGE": BLOCK_TOKENS,
        "WARPS": WARPS,
        "MAX_BATCH": MAX_BATCH[plan.bits],
        "BUSY_BYTES": BUSY_BYTES[plan.bits],
        "IDLE_BYTES": IDLE_BYTES[plan.bits],
        "AHEAD_BYTES": AHEAD_BYTES[plan.bits],
    }


def _share(lines: int, blocks: int) -> int:
    """The largest number of lines of one block."""
    return -(-lines // blocks)


def _round_up(count: int, to: int) -> int:
    return -(-count // to) * to
