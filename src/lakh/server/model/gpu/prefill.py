"""A step of any few tokens of any sequences on the GPU as one CUDA graph: prompts, draft tokens, sampled decode steps.

Launched one by one, the kernels of such a step cost more than their work, and each launch takes Python's lock. Here a
step is one transfer in, one launch, one transfer of the most likely ids out, and logits that stay on the device.

There is a graph for each bucket of tokens (16 .. 2,048); a step runs in the smallest that holds it, and padding writes
to a scratch block. New keys and values are stored first; then tiles of consecutive tokens of one sequence attend to its
blocks, so that a tile reads them once (step_inputs.py).

All graphs share one memory pool.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.gpu import attention_kernels as kernels
from lakh.server.model.gpu.batch.layers import BatchLayers
from lakh.server.model.gpu.graphs import GraphCapture, StepFunction
from lakh.server.model.gpu.layers import run_layers
from lakh.server.model.gpu.step_inputs import MAX_SCORED, MAX_SEQUENCES, StepInputs
from lakh.server.model.gpu.transfer import TokenTransfer
from lakh.server.model.inference import InferenceModel, SequenceChunk
from lakh.server.model.kv_cache import PagedCache
from lakh.server.model.launched_step import LaunchedStep
from lakh.workloads.code.kernels.cuda.nvrtc import CudaCompileError

_log = logging.getLogger(__name__)

__all__ = ["BUCKETS", "PrefillGraphs"]

BUCKETS = (16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048)
SPLIT_PROGRAMS = 264  # attention is split until about this many programs run: twice the SMs of an H200
MAX_SPLITS = 8


class _Bucket:
    """The inputs, outputs and graph of steps of up to a number of tokens."""

    def __init__(self, inputs: StepInputs, device: torch.device) -> None:
        self.inputs, self.tokens, self.tile, self.tiles = inputs, inputs.tokens, inputs.tile, inputs.tiles
        self.logits = torch.empty(0)
        self.most_likely = torch.empty(0)
        self.token_transfer = TokenTransfer(inputs.scored, device)
        self.replay: StepFunction = lambda: None

    def __getitem__(self, name: str) -> Tensor:
        return self.inputs[name]


class PrefillGraphs:
    def __init__(self, network: InferenceModel, cache: PagedCache, *, use_graphs: bool = True) -> None:
        """The last block of `cache` belongs to no sequence: padding writes there."""
        self.network, self.cache = network, cache
        self._capture = GraphCapture(network.device, use_graphs=use_graphs)
        self._scratch_slot = (cache.num_blocks - 1) * BLOCK_TOKENS
        self._table_width = -(-network.spec.context // BLOCK_TOKENS)
        self._group = 1 << (network.spec.heads // network.spec.kv_heads - 1).bit_length()
        self._buckets: dict[int, _Bucket] = {}

    def fits(self, chunks: Sequence[SequenceChunk]) -> bool:
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        if num_tokens > BUCKETS[-1] or len(chunks) > MAX_SEQUENCES:
            return False
        size = _bucket_of(num_tokens)
        return sum(chunk.scored for chunk in chunks) <= min(size, MAX_SCORED)

    @torch.inference_mode()
    def launch(self, chunks: Sequence[SequenceChunk]) -> LaunchedStep:
        """Read the most likely ids before the next launch."""
        bucket = self._bucket(_bucket_of(sum(len(chunk.tokens) for chunk in chunks)))
        num_scored = bucket.inputs.send(chunks)
        bucket.replay()
        return LaunchedStep(bucket.logits[:num_scored], bucket.token_transfer.start(bucket.most_likely[:num_scored]))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture all graphs now."""
        for size in BUCKETS:
            self._bucket(size)

    def _bucket(self, size: int) -> _Bucket:
        if size not in self._buckets:
            tile_rows = 16 if size <= 128 else 64  # of the tensor-core product: queries x heads that share keys
            tile = max(tile_rows // self._group, 1)
            inputs = StepInputs(size, tile, self._table_width, self._scratch_slot, self.network.device)
            bucket = _Bucket(inputs, self.network.device)
            step = self._fastest(bucket)

            def step_and_choose() -> None:
                step()
                bucket.most_likely = bucket.logits.argmax(dim=-1)

            bucket.replay = self._capture(step_and_choose)
            self._buckets[size] = bucket
        return self._buckets[size]

    def _fastest(self, bucket: _Bucket) -> StepFunction:
        """Layers with cuBLAS, or those of batch/ where they are supported and faster with a bucket of padding."""

        def plain() -> None:
            self._step(bucket)

        if not self._capture.use_graphs or BatchLayers.obstacle(self.network, bucket.tokens) is not None:
            return plain
        try:
            overlapping = partial(self._step, bucket, BatchLayers(self.network, bucket.tokens))
            return overlapping if self._capture.time_s(overlapping) < self._capture.time_s(plain) else plain
        except CudaCompileError as error:
            _log.warning("steps of %d tokens use cuBLAS: %s", bucket.tokens, error)
            return plain

    def _step(self, bucket: _Bucket, layers: BatchLayers | None = None) -> None:
        x = F.embedding(bucket["ids"], self.network.embed)
        if layers is not None:
            attend = lambda qkv, layer: self._attend(qkv, layer, bucket, pdl=True)  # noqa: E731
            bucket.logits = layers(x, attend, bucket["scored"])
        else:
            attend = lambda qkv, layer: self._attend(qkv[None], layer, bucket)  # noqa: E731
            bucket.logits = run_layers(self.network, x, attend, bucket["scored"])

    def _attend(self, qkv: Tensor, layer: int, bucket: _Bucket, *, pdl: bool = False) -> Tensor:
        """Of fused queries, keys and values in parts (parts x N x X), which are added here."""
        spec, (parts, num, _), dtype = self.network.spec, qkv.shape, self.network.dtype
        options = {"launch_pdl": True} if pdl else {}
        heads, kv_heads, size = spec.heads, spec.kv_heads, spec.head_dim
        cached = self.cache.kernel_tensors(layer)
        q = torch.empty(num, heads * size, dtype=dtype, device=qkv.device)
        kernels.rotate_store[(num,)](
            qkv, self.network.cos, self.network.sin, bucket["positions"], bucket["slots"], q, *cached,
            cached[0].shape[1],
            H=heads, K=kv_heads, D=size, HEADS=1 << (heads + 2 * kv_heads - 1).bit_length(), PARTS=parts, PDL=pdl,
            num_warps=4, **options,
        )  # fmt: skip
        splits = 1
        while splits < MAX_SPLITS and max(num // bucket.tile, 1) * kv_heads * splits * 2 <= SPLIT_PROGRAMS:
            splits *= 2
        out = torch.empty(num, heads * size, dtype=dtype, device=qkv.device)
        part_o = torch.empty(num, heads, splits, size, device=qkv.device) if splits > 1 else out
        part_ml = torch.empty(num, heads, splits, 2, device=qkv.device) if splits > 1 else out
        kernels.attend_tiles[(bucket.tiles, kv_heads, splits)](
            q, *cached, bucket["tables"], bucket["positions"], bucket["tile_sequence"], bucket["tile_first"],
            bucket["tile_count"], out, part_o, part_ml, cached[0].shape[1], self._table_width, size**-0.5,
            H=heads, K=kv_heads, D=size, GROUP_ROWS=self._group, ROWS=max(bucket.tile * self._group, 16), BLOCK=64,
            SPLITS=splits, PAGE=BLOCK_TOKENS, PDL=pdl, num_warps=4, **options,
        )  # fmt: skip
        if splits > 1:
            kernels.combine[(num * heads,)](
                part_o, part_ml, out, D=size, SPLITS=splits, PDL=pdl, num_warps=1, **options
            )
        return out


def _bucket_of(num_tokens: int) -> int:
    return next(size for size in BUCKETS if size >= num_tokens)
