"""Decode steps on the GPU as CUDA graphs: one new token for each sequence, several steps without synchronization.

There is a graph for each batch size in BATCH_SIZES; a batch runs in the smallest that holds it, and padding points at a
scratch block. The graph samples greedily and feeds the tokens to its next replay, so several greedy steps need one
transfer in, and their tokens are read while later steps run. Logits stay on the GPU for sequences that sample.

A single sequence runs either matrix-vector kernels (single_sequence.py) or the megakernel, whichever is faster here;
larger batches use cuBLAS or the overlapping kernels of batch/, likewise. All graphs share one memory pool.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.gpu import attention_kernels, kernels
from lakh.server.model.gpu.batch.attention import BatchAttention
from lakh.server.model.gpu.batch.layers import BatchLayers
from lakh.server.model.gpu.decode_batch import HISTORY, DecodeBatch, MultiStepDecode
from lakh.server.model.gpu.graphs import TIMED_STEPS, GraphCapture, StepFunction
from lakh.server.model.gpu.layers import run_layers
from lakh.server.model.gpu.megakernel import Megakernel
from lakh.server.model.gpu.single_sequence import SingleSequenceDecoder
from lakh.server.model.inference import InferenceModel, SequenceChunk
from lakh.server.model.kv_cache import PagedCache
from lakh.server.model.launched_step import LaunchedStep
from lakh.workloads.code.kernels.cuda.nvrtc import CudaCompileError

__all__ = ["Decoder", "can_decode"]

_log = logging.getLogger(__name__)

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "phi3")  # whose attention the kernels compute
# Whose block single_sequence.py computes, with weights that are not quantized and no biases; others use the kernels of
# batches.
SINGLE_SEQUENCE = ("llama", "mistral", "qwen3", "phi3")
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
SPLIT_PROGRAMS = 132  # attention is split until about this many programs run: the SMs of an H100 or H200
ATTENTION_TILE = (64, 4, 3)  # tokens, warps and stages of a program of attention in batches
INT8_ATTENTION_TILE = (128, 4, 3)  # with a KV cache of int8
AHEAD_TOKENS = 64  # whose keys and values attention asks for before it waits for the queries


def can_decode(network: InferenceModel) -> bool:
    """Whether the kernels implement this architecture, its attention and its head size."""
    is_known = network.architecture.name in ARCHITECTURES and network.is_plain
    return is_known and network.spec.head_dim in (32, 64, 128, 256)


class Decoder:
    max_sequences = BATCH_SIZES[-1]
    max_steps = HISTORY  # of one `MultiStepDecode`

    def __init__(
        self, network: InferenceModel, cache: PagedCache, *, use_graphs: bool = True, pdl: bool = True
    ) -> None:
        """The last block of `cache` belongs to no sequence: padding writes there."""
        self.network, self.cache = network, cache
        # From Hopper on, a kernel can start before its predecessor has ended (programmatic dependent launch).
        pdl = pdl and use_graphs and torch.cuda.get_device_capability(network.device) >= (9, 0)
        is_known = network.architecture.name in SINGLE_SEQUENCE and not network.spec.has_biases
        is_known &= network.precision in ("f32", "bf16")
        self._single = SingleSequenceDecoder(network, cache, pdl=pdl) if is_known else None
        self._pdl = pdl
        self._megakernel: Megakernel | None = None  # kept alive: the graph holds only the addresses of its tensors
        self._scratch = cache.num_blocks - 1
        self._table_width = -(-network.spec.context // BLOCK_TOKENS)
        self._capture = GraphCapture(network.device, use_graphs=use_graphs)
        self._batches: dict[int, DecodeBatch] = {}

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture all graphs now."""
        for size in BATCH_SIZES:
            self._batch(size)

    @torch.inference_mode()
    def run(
        self, tokens: Sequence[int], positions: Sequence[int], blocks: Sequence[Sequence[int]], steps: int
    ) -> tuple[list[list[int]], Tensor]:
        """`steps` greedy steps, for which the blocks have room: the tokens of each step, and the logits of the last."""
        batch = self.load_batch(tokens, positions, blocks)
        for _ in range(steps):
            batch.replay()
        return batch.history[:steps, : len(tokens)].tolist(), batch.logits[: len(tokens)]

    def launch(self, chunks: Sequence[SequenceChunk]) -> LaunchedStep:
        """One step of sequences with one new token each."""
        tokens, positions = [chunk.tokens[0] for chunk in chunks], [chunk.start for chunk in chunks]
        batch = self.load_batch(tokens, positions, [chunk.blocks for chunk in chunks])
        step = MultiStepDecode(batch, len(chunks))
        step.launch(1)
        return LaunchedStep(batch.logits[: len(chunks)], lambda: step.read()[0])

    def multi_step(
        self, tokens: Sequence[int], positions: Sequence[int], blocks: Sequence[Sequence[int]]
    ) -> MultiStepDecode:
        """Greedy steps to be launched. Past the end of its blocks a sequence writes to the scratch block."""
        return MultiStepDecode(self.load_batch(tokens, positions, blocks), len(tokens))

    @torch.inference_mode()
    def load_batch(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        blocks: Sequence[Sequence[int]],
        sizes: Sequence[int] = BATCH_SIZES,
    ) -> DecodeBatch:
        """Load these sequences into the smallest batch that holds them; `replay` it while their blocks have room."""
        count = len(tokens)
        batch = self._batch(next(size for size in sizes if size >= count))
        size = len(batch)
        numbers = batch.inputs.numbers()
        numbers[: 3 * size] = 0
        numbers[:count], numbers[size : size + count] = positions, tokens
        tables = numbers[3 * size :].reshape(size, -1)
        tables[:] = self._scratch
        for index, table in enumerate(blocks):
            tables[index, : len(table)] = table
        batch.inputs.send()
        return batch

    def _batch(self, size: int) -> DecodeBatch:
        if size not in self._batches:
            batch = DecodeBatch(size, self._table_width, self.network.device)
            batch.tables.fill_(self._scratch)
            step: StepFunction = lambda: self._step(batch)  # noqa: E731
            if size == 1 and self._capture.use_graphs:
                step = self._fastest(batch)
            elif self._pdl:
                step = self._fastest_layers(batch)
            batch.replay = self._capture(step, prepare=batch.steps.zero_)
            self._batches[size] = batch
        return self._batches[size]

    def _fastest(self, batch: DecodeBatch) -> StepFunction:
        """For one sequence: separate kernels, or the megakernel where it is supported and faster."""

        def separate() -> None:
            self._step(batch)

        if self._single is not None:
            separate_s = self._single.choose_tiles(lambda: self._time_s(batch, separate))
        else:
            separate_s = self._time_s(batch, separate)
        plan = Megakernel.plan(self.network, self.cache.keys_LKCD.dtype)
        if isinstance(plan, str):
            _log.info("decode of one sequence uses separate kernels: %s", plan)
            return separate
        try:
            self._megakernel = Megakernel(self.network, self.cache, plan)
            fused = partial(self._megakernel, batch)
            return fused if self._time_s(batch, fused) < separate_s else separate
        except CudaCompileError as error:
            _log.warning("decode of one sequence uses separate kernels: %s", error)
            return separate

    def _fastest_layers(self, batch: DecodeBatch) -> StepFunction:
        """For several sequences: layers with cuBLAS, or those of batch/ where they are supported and faster."""

        def plain() -> None:
            self._step(batch)

        obstacle = BatchLayers.obstacle(self.network, len(batch))
        if obstacle is not None:
            _log.debug("decode of %d sequences uses cuBLAS: batch layers: %s", len(batch), obstacle)
            return plain
        try:
            layers, attention = BatchLayers(self.network, len(batch)), None
            if BatchAttention.is_supported(self.network, self.cache, len(batch)):
                attention = BatchAttention(self.network, self.cache, layers.qkv_parts)
            overlapping = partial(self._step, batch, layers, attention)
            return overlapping if self._time_s(batch, overlapping) < self._time_s(batch, plain) else plain
        except CudaCompileError as error:
            _log.warning("decode of %d sequences uses cuBLAS: %s", len(batch), error)
            return plain

    def _step(
        self, batch: DecodeBatch, layers: BatchLayers | None = None, attention: BatchAttention | None = None
    ) -> None:
        # A plain launch: it starts after the last step has ended, which kernels with dependent launch rely on.
        x = F.embedding(batch.tokens, self.network.embed)
        pdl = False
        if len(batch) == 1 and self._single is not None:
            x = self._single(x[0], batch.positions, batch.tables)[None]
            pdl = self._single.pdl
        elif layers is not None:
            attend = partial(self._attend, pdl=True) if attention is None else attention
            x = layers(x, lambda qkv, layer: attend(qkv, layer, batch))
            pdl = True
        else:
            x = run_layers(self.network, x, lambda qkv, layer: self._attend(qkv[None], layer, batch))
        options = {"launch_pdl": True} if pdl else {}
        kernels.sample_greedy[(len(batch),)](
            x, batch.tokens, batch.positions, batch.steps, batch.history, x.shape[1],
            BLOCK=16384, PDL=pdl, num_warps=16, **options,
        )  # fmt: skip
        batch.logits = x

    def _time_s(self, batch: DecodeBatch, step: StepFunction) -> float:
        """Seconds of TIMED_STEPS captured steps in the middle of a text."""

        def begin() -> None:  # also before warm-up runs: beyond the context lies the memory of other sequences
            batch.steps.zero_()
            batch.positions.fill_(min(512, self.network.spec.context - TIMED_STEPS))

        took_s = self._capture.time_s(step, begin)
        batch.positions.zero_()
        return took_s

    def _attend(self, qkv: Tensor, layer: int, batch: DecodeBatch, *, pdl: bool = False) -> Tensor:
        """Of fused queries, keys and values in parts (parts x N x X), which are added here."""
        spec, (parts, size, _) = self.network.spec, qkv.shape
        options = {"launch_pdl": True} if pdl else {}
        cached = self.cache.kernel_tensors(layer)
        splits = 1
        while splits < 16 and size * spec.kv_heads * splits * 2 <= SPLIT_PROGRAMS:
            splits *= 2
        out = torch.empty(size, spec.heads * spec.head_dim, dtype=self.network.dtype, device=qkv.device)
        shape = (size, spec.heads, splits)
        part_o = torch.empty(*shape, spec.head_dim, device=qkv.device) if splits > 1 else out
        part_ml = torch.empty(*shape, 2, device=qkv.device) if splits > 1 else out
        tokens, warps, stages = INT8_ATTENTION_TILE if cached[0].dtype == torch.int8 else ATTENTION_TILE
        attention_kernels.attend[(size, spec.kv_heads, splits)](
            qkv, self.network.cos, self.network.sin, *cached, batch.tables, batch.positions, out, part_o,
            part_ml, cached[0].shape[1], self._table_width, spec.head_dim**-0.5,
            H=spec.heads, K=spec.kv_heads, D=spec.head_dim, BLOCK=tokens, SPLITS=splits, PAGE=BLOCK_TOKENS,
            PARTS=parts, PDL=pdl, AHEAD=AHEAD_TOKENS, num_warps=warps, num_stages=stages, **options,
        )  # fmt: skip
        if splits > 1:
            attention_kernels.combine[(size * spec.heads,)](
                part_o, part_ml, out, D=spec.head_dim, SPLITS=splits, PDL=pdl, num_warps=1, **options
            )
        return out
