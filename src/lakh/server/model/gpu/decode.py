"""Decoding on the GPU: one new token for each row, as a captured graph, several steps without looking.

A graph exists for each bucket of rows (1, 2, 4, ... MAX_ROWS); a batch runs in the smallest that holds it, its empty
places pointing at a scratch block. The graph draws greedily by itself and feeds its tokens to its next run, so a
burst of greedy steps needs one transfer in, and is read while it goes on. Scores stay in place for rows that sample.

A row alone has kernels that do nothing but read weights at full speed (one.py), or one kernel for the whole step
(whole_step.py), whichever is faster here; larger batches use the vendor's matrix products for the weights. Knows a
InferenceModel and its cache; knows nothing of rows and requests. Memory: graphs share one pool.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.gpu import kernels
from lakh.server.model.gpu.decode_batch import HISTORY, DecodeBatch, MultiStepDecode
from lakh.server.model.gpu.graphs import GraphCapture, Step
from lakh.server.model.gpu.layers import run_layers
from lakh.server.model.gpu.megakernel import Megakernel
from lakh.server.model.gpu.megakernel.nvrtc import CudaCompileError
from lakh.server.model.gpu.single_sequence import SingleSequenceDecoder
from lakh.server.model.inference import InferenceModel
from lakh.server.model.kv_cache import PagedCache

__all__ = ["Decoder", "can_decode"]

_log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
SPLIT_PROGRAMS = 132  # attention is cut into parts until about so many programs run: the SMs of an H100 or H200
BURSTS_TIMED, STEPS_TIMED = 6, 8


def can_decode(network: InferenceModel) -> bool:
    """Head sizes that the kernels are written for."""
    return network.spec.head_dim in (32, 64, 128, 256)


class Decoder:
    def __init__(
        self, network: InferenceModel, cache: PagedCache, *, use_graphs: bool = True, pdl: bool = True
    ) -> None:
        """`cache` has a last block that no row owns: empty places of a bucket write there."""
        self.network, self.cache = network, cache
        # Hopper's and later chips can start a kernel before the one in front of it has ended.
        pdl = pdl and use_graphs and torch.cuda.get_device_capability(network.device) >= (9, 0)
        self._one_row = SingleSequenceDecoder(network, cache, pdl=pdl)
        self._whole_step: Megakernel | None = None  # held here: a graph knows the addresses of its tensors, no more
        self._scratch = cache.num_blocks - 1
        self._table_width = -(-network.spec.context // BLOCK_TOKENS)
        self._capture = GraphCapture(network.device, use_graphs=use_graphs)
        self._batches: dict[int, DecodeBatch] = {}

    @property
    def max_sequences(self) -> int:
        return BUCKETS[-1]

    @property
    def max_steps(self) -> int:
        """Of one burst."""
        return HISTORY

    @torch.inference_mode()
    def warm_up(self) -> None:
        """GraphCapture every graph now."""
        for size in BUCKETS:
            self._batch(size)

    @torch.inference_mode()
    def run(
        self, tokens: Sequence[int], positions: Sequence[int], blocks: Sequence[Sequence[int]], steps: int
    ) -> tuple[list[list[int]], Tensor]:
        """`steps` greedy steps from these tokens; returns the tokens of each step, and the scores of the last one.

        The blocks hold room for positions .. positions + steps - 1.
        """
        batch = self.load_batch(tokens, positions, blocks)
        for _ in range(steps):
            batch.replay()
        rows = len(tokens)
        return batch.history[:steps, :rows].tolist(), batch.logits[:rows]

    def multi_step(
        self, tokens: Sequence[int], positions: Sequence[int], blocks: Sequence[Sequence[int]]
    ) -> MultiStepDecode:
        """Greedy steps from these tokens, to be launched. Past the end of its blocks a row writes to the scratch block,
        up to the context's end.
        """
        return MultiStepDecode(self.load_batch(tokens, positions, blocks), len(tokens))

    @torch.inference_mode()
    def load_batch(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        blocks: Sequence[Sequence[int]],
        sizes: Sequence[int] = BUCKETS,
    ) -> DecodeBatch:
        """These rows in the smallest batch that holds them, ready to `replay` as often as their blocks have room."""
        rows = len(tokens)
        batch = self._batch(next(size for size in sizes if size >= rows))
        size = len(batch)
        control = np.zeros(len(batch.control), np.int32)
        control[:rows], control[size : size + rows] = positions, tokens
        tables = control[3 * size :].reshape(size, -1)
        tables[:] = self._scratch
        for row in range(rows):
            tables[row, : len(blocks[row])] = blocks[row]
        batch.control.copy_(torch.from_numpy(control))
        return batch

    def _batch(self, size: int) -> DecodeBatch:
        if size not in self._batches:
            batch = DecodeBatch(size, self._table_width, self.network.device)
            batch.tables.fill_(self._scratch)
            is_measured = size == 1 and self._capture.use_graphs
            step = self._fastest(batch) if is_measured else lambda: self._step(batch)
            batch.replay = self._capture(step, prepare=batch.steps.zero_)
            self._batches[size] = batch
        return self._batches[size]

    def _fastest(self, batch: DecodeBatch) -> Step:
        """Of one row: kernel after kernel, or where it is possible and faster all in one."""

        def in_turn() -> None:
            self._step(batch)

        in_turn_s = self._one_row.choose_tiles(lambda: self._burst_s(batch, in_turn))
        plan = Megakernel.plan(self.network)
        if plan is None:
            return in_turn
        try:
            self._whole_step = Megakernel(self.network, self.cache, plan)
            at_once = partial(self._whole_step, batch)
            return at_once if self._burst_s(batch, at_once) < in_turn_s else in_turn
        except CudaCompileError as error:
            _log.warning("a step of one row stays several kernels: %s", error)
            return in_turn

    def _step(self, batch: DecodeBatch) -> None:
        # A plain launch: it begins when the last step has ended, which is what SingleSequenceDecoder's kernels rely on.
        x = F.embedding(batch.tokens, self.network.embed)
        pdl, options = False, {}
        if len(batch) == 1:
            x = self._one_row(x[0], batch.positions, batch.tables)[None]
            pdl, options = self._one_row.pdl, self._one_row.launch_options
        else:
            x = run_layers(self.network, x, lambda qkv, layer: self._attend(qkv, layer, batch))
        kernels.draw[(len(batch),)](
            x, batch.tokens, batch.positions, batch.steps, batch.history, x.shape[1],
            BLOCK=16384, PDL=pdl, num_warps=16, **options,
        )  # fmt: skip
        batch.logits = x

    def _burst_s(self, batch: DecodeBatch, step: Step) -> float:
        """Seconds of a captured burst as the kernels are now, amid a text of usual length: the best of some."""

        def begin() -> None:  # also before each run that warms up: past the context's end lies other rows' memory
            batch.steps.zero_()
            batch.positions.fill_(min(512, self.network.spec.context - STEPS_TIMED))

        replay = self._capture(step, prepare=begin)
        took_s = float("inf")
        for _ in range(BURSTS_TIMED):
            begin()
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            for _ in range(STEPS_TIMED):
                replay()
            torch.cuda.synchronize()
            took_s = min(took_s, time.perf_counter() - began_s)
        batch.positions.zero_()
        return took_s

    def _attend(self, qkv: Tensor, layer: int, batch: DecodeBatch) -> Tensor:
        spec, rows = self.network.spec, len(qkv)
        keys, values = self.cache.keys_LKCD[layer], self.cache.values_LKCD[layer]
        splits = 1
        while splits < 16 and rows * spec.kv_heads * splits * 2 <= SPLIT_PROGRAMS:
            splits *= 2
        out = torch.empty(rows, spec.heads * spec.head_dim, dtype=qkv.dtype, device=qkv.device)
        shape = (rows, spec.heads, splits)
        part_o = torch.empty(*shape, spec.head_dim, device=qkv.device) if splits > 1 else out
        part_ml = torch.empty(*shape, 2, device=qkv.device) if splits > 1 else out
        kernels.attend[(rows, spec.kv_heads, splits)](
            qkv, self.network.cos, self.network.sin, keys, values, batch.tables, batch.positions, out, part_o,
            part_ml, keys.shape[1], self._table_width, spec.head_dim**-0.5,
            H=spec.heads, K=spec.kv_heads, D=spec.head_dim, BLOCK=64, SPLITS=splits, PAGE=BLOCK_TOKENS,
            num_warps=4,
        )  # fmt: skip
        if splits > 1:
            kernels.combine[(rows * spec.heads,)](
                part_o, part_ml, out, D=spec.head_dim, SPLITS=splits, PDL=False, num_warps=1
            )
        return out
