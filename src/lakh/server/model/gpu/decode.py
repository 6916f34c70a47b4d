"""Decoding on the GPU: one new token for each row, as a captured graph, several steps without looking.

A graph exists for each bucket of rows (1, 2, 4, ... MAX_ROWS); a batch runs in the smallest that holds it, its empty
places pointing at a scratch block. The graph draws greedily by itself and feeds its tokens to its next run, so a
burst of greedy steps needs one transfer in and one out. Scores stay in place for rows that sample.

Batch 1 runs kernels that do nothing but read weights at full speed (kernels.py); larger batches use the vendor's
matrix products for the weights. Knows a Network and its cache; knows nothing of rows and requests. Memory: graphs
share one pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lakh.server.model.blocks import BLOCK_TOKENS
from lakh.server.model.gpu import kernels
from lakh.server.model.gpu.graphs import Capture, Step
from lakh.server.model.gpu.layers import run_layers
from lakh.server.model.kv import PagedCache
from lakh.server.model.network import Network

__all__ = ["BURST", "Batch", "Decoder", "can_decode"]

BURST = 8  # steps that may run before their tokens are read
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
SPLIT_PROGRAMS = 132  # attention is cut into parts until about so many programs run: the SMs of an H100 or H200
LOOK_EARLY_ROWS = 16  # from so many rows on the first half of a burst is read while the second runs
ROUNDS = 3  # in which tiles are timed in turn
CLEARLY = 0.98  # of the default's time: another tile has to be that fast


def can_decode(network: Network) -> bool:
    """Head sizes that the kernels are written for."""
    return network.spec.head_dim in (32, 64, 128, 256)


class Batch:
    """Static inputs, outputs and the graph of one number of rows.

    `replay` scores the tokens, draws greedily, and moves every row one place on.
    """

    def __init__(self, rows: int, table_width: int, device: torch.device) -> None:
        # One transfer in: position, token, table of each row.
        self.control = torch.zeros(rows, 2 + table_width, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int32, device=device)
        self.tables = torch.zeros(rows, table_width, dtype=torch.int32, device=device)
        self.history = torch.zeros(BURST, rows, dtype=torch.int64, device=device)
        self.early = torch.zeros(BURST, rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self.logits = torch.empty(0)
        self.replay: Step = lambda: None

    def __len__(self) -> int:
        """Rows, the empty ones included."""
        return len(self.tokens)

    def redraw(self, tokens: Tensor) -> None:
        """These tokens instead of those that the last step drew. What it drew is then not to be read."""
        self.tokens.copy_(tokens)
        self.step.zero_()  # its own history would run past its end


class Decoder:
    def __init__(self, network: Network, cache: PagedCache, *, use_graphs: bool = True, pdl: bool = True) -> None:
        """`cache` has a last block that no row owns: empty places of a bucket write there."""
        self.network, self.cache = network, cache
        # Hopper's and later chips can start a kernel before the one in front of it has ended.
        self.pdl = pdl and use_graphs and torch.cuda.get_device_capability(network.device) >= (9, 0)
        self._scratch = cache.num_blocks - 1
        self._table_width = -(-network.spec.context // BLOCK_TOKENS)
        self._capture = Capture(network.device, use_graphs=use_graphs)
        self._batches: dict[int, Batch] = {}
        self.configs: dict[tuple[str, int, int], tuple[int, int, int]] = {}
        """The tile of every product of batch 1."""

    @property
    def max_rows(self) -> int:
        return BUCKETS[-1]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture every graph now."""
        for size in BUCKETS:
            self._batch(size)

    @torch.inference_mode()
    def run(
        self, tokens: Sequence[int], positions: Sequence[int], blocks: Sequence[Sequence[int]], steps: int
    ) -> tuple[list[list[int]], Tensor]:
        """`steps` greedy steps from these tokens; returns the tokens of each step, and the scores of the last one.

        The blocks hold room for positions .. positions + steps - 1.
        """
        batch = self.begin(tokens, positions, blocks)
        for _ in range(steps):
            batch.replay()
        rows = len(tokens)
        return batch.history[:steps, :rows].tolist(), batch.logits[:rows]

    def burst(
        self, tokens: Sequence[int], positions: Sequence[int], blocks: Sequence[Sequence[int]], steps: int
    ) -> Iterator[list[list[int]]]:
        """The tokens of the same steps. Of many rows the first half comes while the second is still computed, so that
        what is done with it costs no time.
        """
        batch, rows = self.begin(tokens, positions, blocks), len(tokens)
        half = steps // 2 if rows >= LOOK_EARLY_ROWS and self._capture.use_graphs else 0
        read = torch.cuda.Event() if half else None
        for step in range(1, steps + 1):
            batch.replay()
            if read is not None and step == half:
                batch.early.copy_(batch.history, non_blocking=True)
                read.record()
        if read is not None:
            read.synchronize()
            yield batch.early[:half, :rows].tolist()
        yield batch.history[half:steps, :rows].tolist()

    @torch.inference_mode()
    def begin(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        blocks: Sequence[Sequence[int]],
        sizes: Sequence[int] = BUCKETS,
    ) -> Batch:
        """These rows in the smallest batch that holds them, ready to `replay` as often as their blocks have room."""
        rows = len(tokens)
        batch = self._batch(next(size for size in sizes if size >= rows))
        control = np.full((len(batch), 2 + self._table_width), self._scratch, np.int32)
        control[:, :2] = 0
        control[:rows, 0], control[:rows, 1] = positions, tokens
        for row in range(rows):
            control[row, 2 : 2 + len(blocks[row])] = blocks[row]
        batch.control.copy_(torch.from_numpy(control))
        batch.positions.copy_(batch.control[:, 0])
        batch.tokens.copy_(batch.control[:, 1])
        batch.tables.copy_(batch.control[:, 2:])
        batch.step.zero_()
        return batch

    def _batch(self, size: int) -> Batch:
        if size not in self._batches:
            batch = Batch(size, self._table_width, self.network.device)
            batch.tables.fill_(self._scratch)
            batch.replay = self._capture(lambda: self._step(batch), prepare=batch.step.zero_)
            self._batches[size] = batch
        return self._batches[size]

    def _step(self, batch: Batch) -> None:
        x, size = self.network.embed[batch.tokens], len(batch)
        if size == 1:
            x = self._one(x, batch)
        else:
            x = run_layers(self.network, x, lambda qkv, layer: self._attend(qkv, layer, batch))
        kernels.advance[(1,)](
            x.argmax(dim=-1), batch.tokens, batch.positions, batch.history, batch.step, size, BLOCK=max(size, 2)
        )
        batch.logits = x

    # --- batch 1: matrix-vector products ---

    def _one(self, x: Tensor, batch: Batch) -> Tensor:
        network, spec = self.network, self.network.spec
        x = x.flatten()
        for layer in range(spec.layers):
            qkv = self._matvec(x, network.matrix("qkv", layer), norm=network.norms[2 * layer])
            attention = self._attend(network.norm_heads(qkv[None], layer), layer, batch)[0]
            x = self._matvec(attention, network.matrix("o", layer), residual=x)
            inner = self._gate_up(x, network.matrix("gate_up", layer), network.norms[2 * layer + 1])
            x = self._matvec(inner, network.matrix("down", layer), residual=x)
        return self._matvec(x, network.head, norm=network.norms[-1], dtype=torch.float32)[None]

    def _matvec(
        self,
        x: Tensor,
        w: Tensor,
        *,
        norm: Tensor | None = None,
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        num, width = w.shape
        y = torch.empty(num, dtype=dtype or x.dtype, device=x.device)
        has_norm, has_residual = norm is not None, residual is not None

        def launch(block_n: int, block_k: int, warps: int) -> None:
            kernels.matvec[(-(-num // block_n),)](
                x, norm if has_norm else x, w, residual if has_residual else x, y, num, width,
                self.network.spec.norm_eps,
                NORM=has_norm, RESIDUAL=has_residual, PDL=self.pdl, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps,
                **self._launch_options(),
            )  # fmt: skip

        launch(*self._config(f"matvec{has_norm:d}{has_residual:d}", num, width, launch))
        return y

    def _gate_up(self, x: Tensor, w: Tensor, norm: Tensor) -> Tensor:
        num, width = w.shape[0] // 2, w.shape[1]
        y = torch.empty(num, dtype=x.dtype, device=x.device)

        def launch(block_n: int, block_k: int, warps: int) -> None:
            kernels.gate_up[(-(-num // block_n),)](
                x, norm, w, y, num, width, self.network.spec.norm_eps,
                PDL=self.pdl, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, **self._launch_options(),
            )  # fmt: skip

        launch(*self._config("gate_up", num, width, launch))
        return y

    def _config(self, kind: str, num: int, width: int, launch: Callable[[int, int, int], None]) -> tuple[int, int, int]:
        """The tile for this product: the default, or one that was clearly faster, timed once."""
        key = (kind, num, width)
        if key not in self.configs:
            fits = [config for config in kernels.MATVEC_CONFIGS if config[1] <= max(2 * width, 256)]
            self.configs[key] = _fastest(fits, launch) if self._capture.use_graphs else fits[0]
        return self.configs[key]

    # --- any number of rows ---

    def _attend(self, qkv: Tensor, layer: int, batch: Batch) -> Tensor:
        spec, rows = self.network.spec, len(qkv)
        keys, values = self.cache.keys_LKCD[layer], self.cache.values_LKCD[layer]
        splits = 1
        while splits < 16 and rows * spec.kv_heads * splits * 2 <= SPLIT_PROGRAMS:
            splits *= 2
        out = torch.empty(rows, spec.heads * spec.head_dim, dtype=qkv.dtype, device=qkv.device)
        shape = (rows, spec.heads, splits)
        part_o = torch.empty(*shape, spec.head_dim, device=qkv.device) if splits > 1 else out
        part_ml = torch.empty(*shape, 2, device=qkv.device) if splits > 1 else out
        pdl = self.pdl and rows == 1
        options = self._launch_options() if pdl else {}
        kernels.attend[(rows, spec.kv_heads, splits)](
            qkv, self.network.cos, self.network.sin, keys, values, batch.tables, batch.positions, out, part_o,
            part_ml, keys.shape[1], self._table_width, spec.head_dim**-0.5,
            H=spec.heads, K=spec.kv_heads, D=spec.head_dim, BLOCK=64, SPLITS=splits, PAGE=BLOCK_TOKENS, PDL=pdl,
            num_warps=4, **options,
        )  # fmt: skip
        if splits > 1:
            kernels.combine[(rows * spec.heads,)](
                part_o, part_ml, out, D=spec.head_dim, SPLITS=splits, PDL=pdl, num_warps=1, **options
            )
        return out

    def _launch_options(self) -> dict[str, bool]:
        return {"launch_pdl": True} if self.pdl else {}


def _fastest(configs: Sequence[tuple[int, int, int]], launch: Callable[[int, int, int], None]) -> tuple[int, int, int]:
    """The first of the tiles unless another is clearly faster, cold: the weights of a step never fit the caches. Each
    has its best time of several rounds in turn; means of one round chose other tiles from start to start.
    """
    from triton.testing import do_bench

    best_ms = dict.fromkeys(configs, float("inf"))
    for _ in range(ROUNDS):
        for config in configs:
            took_ms = do_bench(lambda config=config: launch(*config), warmup=2, rep=6, return_mode="min")
            best_ms[config] = min(best_ms[config], took_ms)
    winner = min(configs, key=lambda config: best_ms[config])
    return winner if best_ms[winner] < CLEARLY * best_ms[configs[0]] else configs[0]
