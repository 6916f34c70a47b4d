"""Megakernel: a decode step of a single sequence as one persistent CUDA kernel (*.cu), with one block per SM.

With separate kernels (single_sequence.py) memory is idle from the end of one kernel to the first weights of the next,
144 times a step with 24 layers. Here one warp of each block loads the weights of all layers in order, without
waiting for the other warps, and blocks publish their results with ready flags that carry the number of the round.
Products on tensor cores are of bf16, two parts of which make a number of the activations; with weights of 8 bits of
e4m3 times e5m2, three parts; with weights of 4 bits of 8-bit integers (x is two of them, with a scale for 32 columns).
Sums, logits and the residual stream are float32.

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
from lakh.workloads.code.kernels.cuda.tensor_map import TensorMap

__all__ = ["Megakernel", "MegakernelPlan", "plan"]

ARCHITECTURES = ("llama", "mistral", "phi3")
KERNEL_NAME = "decode_step"
WARPS = 8
WGMMA = {16: True, 8: True, 4: False}
"""By bits: whether groups of four warps multiply, on Hopper."""
LOADING_WARPS = {False: 2, True: 4}
"""By whether weights are tiled: one loads them into shared memory, one into L2; with 4 bits one keys and values. Only
four can give registers to others."""
KEPT_BYTES = 49152 + 16
"""Keys and values of a block's first split in shared memory, and two barriers: with 4 bits, where there is room."""
CHUNK_BYTES = {16: 16384, 8: 16384, 4: 18432}
"""By bits; a chunk holds at least one row, and if weights are tiled the same columns of some rows: with WGMMA of 8;
with 4 bits of 16, and then this is the most."""
MIN_SLOTS = 5  # four rows are used at once, and each may have a chunk of its own
MAX_SPLITS = 16
COLUMN_GROUP = 128
"""Bytes of a row that lie in one row of swizzled memory."""
PARTS = {16: 2, 8: 3}
"""By bits, with WGMMA: numbers whose sum is a number of the activations; 2 of e5m2 keep 7 bits of it, 3 keep 11."""
# Weights in flight, and while the block waits for flags, by bits. With more, ready flags arrive late; other numbers
# were slower on an H200 (bench/results/decode_NVIDIA-H200_2026-11-18.md to _2026-11-20.md).
BUSY_BYTES = {16: 49152, 8: 32768, 4: 18432}
QUIET_BYTES = {16: 32768, 8: 8192, 4: 0}
AHEAD_BYTES = {16: 0, 8: 65536, 4: 32768}
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
    wgmma: bool
    keeps_tokens: bool

    @property
    def tile_rows(self) -> int:
        """Rows of a chunk, if one instruction copies it; else 0."""
        return _tile_rows(self.bits, self.wgmma)


def plan(
    spec: Model, num_ids: int, blocks: int, shared_bytes: int, bits: int = 16, wgmma: bool | None = None
) -> MegakernelPlan | str:
    """The plan for a GPU with `blocks` SMs of `shared_bytes` shared memory and weights of `bits`, or the reason why
    there is none. `wgmma` is by default that of WGMMA."""
    wgmma = WGMMA[bits] if wgmma is None else wgmma
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    if architecture_of(spec).name not in ARCHITECTURES:
        return f"the megakernel implements {', '.join(ARCHITECTURES)}, and the model is {architecture_of(spec).name}"
    if spec.has_biases:
        return "the megakernel has no biases"
    if spec.sliding_window is not None:
        return "the megakernel has no sliding window"
    if spec.head_dim not in (32, 64, 128, 256) or queries != spec.width:
        return f"the megakernel has no {spec.heads} heads of {spec.head_dim} for a width of {spec.width}"
    if any(width % (8 * WARPS) for width in (spec.width, queries, spec.ffn)):
        return f"width, heads and ffn of the megakernel are multiples of {8 * WARPS}"
    # Rows of matrices are divided over blocks in multiples, gate and up together.
    tile = _tile_rows(bits, wgmma)
    of_qkv, of_width, of_gates = (tile, tile, tile // 2) if tile else (1, 2, 2)
    # Each block publishes something that all others wait for, so none falls behind while flags are rewritten.
    blocks = min(blocks, max(spec.width // of_width, spec.ffn // of_gates), (queries + 2 * keys) // of_qkv)
    splits = 1
    while splits < MAX_SPLITS and 2 * splits * spec.heads <= blocks:
        splits *= 2
    qkv, width = _share(queries + 2 * keys, of_qkv, blocks), _share(spec.width, of_width, blocks)
    ffn, ids = 2 * _share(spec.ffn, of_gates, blocks), _share(num_ids, of_qkv, blocks)
    max_rows = _round_up(max(qkv, width, ffn, ids), 4)
    scratch = (WARPS + 3) * spec.head_dim + 2 * WARPS  # of attention
    largest = max(spec.width, queries, spec.ffn)
    chunk_bytes = CHUNK_BYTES[bits]
    if wgmma:
        # Published activations (the inputs of the output and down projections) have no remainders in bf16.
        of_row = [_round_up(size * bits // 8, chunk_bytes // 8) for size in (spec.width, largest)]
        max_x = max(of_row[0] * PARTS[bits], of_row[1] * (1 if bits == 16 else PARTS[bits]), 4 * scratch) // 4
    elif bits == 4:
        max_x = max(largest // 32 * 18, scratch)
        # Chunks of equal size for a group of rows.
        columns = _column_groups(spec.width)
        chunk_bytes = COLUMN_GROUP * tile * -(-columns // -(-columns // (chunk_bytes // COLUMN_GROUP // tile)))
    else:
        max_x = max(largest, scratch)
        chunk_bytes = max(chunk_bytes, row_bytes(largest, bits))
    residual = _round_up(width, 4)
    # Scales of the rows of all layers: qkv, o, gate and up, down; and of the head.
    of_layer = [_round_up(rows, 4) for rows in (qkv, width, ffn, width)]
    scales = spec.layers * sum(of_layer) + _round_up(ids, 4) if bits == 8 else 0
    chunk_warps = 4 if wgmma else WARPS  # that have sums of a row
    sums = chunk_warps * (max_rows + _round_up(width, 4))
    fixed_bytes = 4 * (max_x + sums + residual + spec.head_dim + WARPS + 3 + scales)
    # The scales of a row of 4 bits are in its last chunk, so all chunks of a group of rows are used at once.
    needed = max(2, -(-_column_groups(largest) * COLUMN_GROUP * tile // chunk_bytes)) if bits == 4 else MIN_SLOTS
    keeps_tokens = bits == 4 and (shared_bytes - fixed_bytes - KEPT_BYTES) // (chunk_bytes + 16) >= needed
    fixed_bytes += KEPT_BYTES * keeps_tokens
    slots = (shared_bytes - fixed_bytes) // (chunk_bytes + 16)  # and two barriers
    if slots < needed:
        return f"{slots} chunks of {chunk_bytes} bytes fit into shared memory, and {needed} are needed"
    shared_bytes = fixed_bytes + slots * (chunk_bytes + 16)
    return MegakernelPlan(blocks, splits, chunk_bytes, slots, shared_bytes, bits, wgmma, keeps_tokens)


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
        is_hopper = torch.cuda.get_device_capability(device)[0] == 9
        if bits == 8 and not is_hopper:
            return "the megakernel multiplies weights of 8 bits with instructions that only Hopper has"
        wgmma = bool(WGMMA[bits]) and is_hopper
        return plan(network.spec, network.num_ids, gpu.multi_processor_count, shared_bytes, bits, wgmma)

    def __init__(self, network: InferenceModel, cache: PagedCache, plan: MegakernelPlan) -> None:
        """Compiles for some seconds; raises CudaCompileError if that fails."""
        spec, device = network.spec, network.device
        self._network, self._cache, self._plan = network, cache, plan
        self.blocks = plan.blocks
        self._kernel = CudaKernel(
            source(),
            KERNEL_NAME,
            defines(spec, network.num_ids, plan),
            threads=32 * (WARPS + LOADING_WARPS[plan.tile_rows > 0]),
            shared_bytes=plan.shared_bytes,
            device=device,
            architecture_specific=plan.tile_rows > 0,
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
        chunks: list[TensorMap] = []
        if self._plan.tile_rows:
            layers = [network.spec.layers] * 4 + [1]
            for count, matrix, is_two in zip(layers, values, (False, False, True, False, False), strict=True):
                chunks.append(_chunks(matrix, count, is_two, self._plan))
        self._kernel(
            self.blocks, network.embed, *values, *scales, network.norms, network.cos, network.sin,
            cache.keys_LKCD, cache.values_LKCD, cache.keys_LKCD.shape[2],
            batch.tables, batch.positions, batch.tokens, batch.steps, batch.history, self._logits,
            *self._flags, self._counters, *chunks,
        )  # fmt: skip
        batch.logits = self._logits


def _shares_gpu() -> bool:
    """Whether other kernels may hold SMs while they wait: another megakernel under MPS, or NCCL."""
    if dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        return True
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")).exists()


def source() -> str:
    return ptx() + "".join(file.read_text() for file in sorted(Path(__file__).parent.glob("*.cu")))


def _tile_rows(bits: int, wgmma: bool) -> int:
    return 8 if wgmma else 16 if bits == 4 else 0


def _column_groups(columns: int) -> int:
    """Of a row of 4 bits."""
    return -(-row_bytes(columns, 4) // COLUMN_GROUP)


def _chunks(matrix: Tensor, layers: int, is_two: bool, plan: MegakernelPlan) -> TensorMap:
    """Chunks of the first of some matrices that follow each other: some rows, or with `is_two` half as many and those
    half a matrix after them, of groups of columns. Its dimensions: bytes of a group, rows, halves, groups."""
    rows, row_bytes = matrix.shape[0], matrix.shape[1] * matrix.element_size()
    halves, apart = (2, rows // 2) if is_two else (1, 0)
    sizes = (min(row_bytes, COLUMN_GROUP), layers * rows - apart, halves, -(-row_bytes // COLUMN_GROUP))
    strides = (row_bytes, (apart or rows) * row_bytes, COLUMN_GROUP)
    box = (COLUMN_GROUP, plan.tile_rows // halves, halves, plan.chunk_bytes // plan.tile_rows // COLUMN_GROUP)
    return TensorMap(matrix, sizes, strides, box)


def defines(spec: Model, num_ids: int, plan: MegakernelPlan) -> dict[str, object]:
    """The macros that the source needs."""
    names = ("layers", "width", "heads", "kv_heads", "head_dim", "ffn")
    sizes = {name: getattr(spec, name) for name in names} | asdict(plan)
    return {name.upper(): size for name, size in sizes.items()} | {
        "NUM_IDS": num_ids,
        "NORM_EPS": f"{spec.norm_eps!r}f",
        "PAGE": BLOCK_TOKENS,
        "WARPS": WARPS,
        "WGMMA": int(plan.wgmma),
        "KEEPS_TOKENS": int(plan.keeps_tokens),
        "LOADING_WARPS": LOADING_WARPS[plan.tile_rows > 0],
        "PARTS": PARTS.get(plan.bits, 1),
        "BUSY_BYTES": BUSY_BYTES[plan.bits],
        "QUIET_BYTES": QUIET_BYTES[plan.bits],
        "AHEAD_BYTES": AHEAD_BYTES[plan.bits],
    }


def _share(lines: int, multiple: int, blocks: int) -> int:
    """The largest number of lines of one block."""
    groups = -(-lines // multiple)
    return -(-groups // blocks) * multiple


def _round_up(count: int, to: int) -> int:
    return -(-count // to) * to
