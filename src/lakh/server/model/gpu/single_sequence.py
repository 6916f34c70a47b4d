"""A decode step of a single sequence on the GPU, limited by the speed at which the weights are read.

Every product is a matrix-vector kernel fused with its neighbours (matvec_kernels.py). `choose_tiles` measures which
tile (rows and columns of a matrix per program) is the fastest for each product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.gpu import attention_kernels, matvec_kernels
from lakh.server.model.inference import InferenceModel
from lakh.server.model.kv_cache import PagedCache

__all__ = ["SingleSequenceDecoder"]

MAX_SPLITS = 64
SPLIT_PROGRAMS = 1024  # attention is split until about this many single warps run: 8 for each SM of an H200
CLEARLY_FASTER = 0.995  # of the step time so far: a new tile must be that fast

Tile = tuple[int, int, int]


class SingleSequenceDecoder:
    def __init__(self, network: InferenceModel, cache: PagedCache, *, pdl: bool) -> None:
        self.network, self.cache, self.pdl = network, cache, pdl
        self.launch_options = {"launch_pdl": True} if pdl else {}
        self.tiles: dict[tuple[str, int, int], Tile] = {}
        """By kind, rows and columns of a product; filled on first use."""

    def __call__(self, x_W: Tensor, position: Tensor, table: Tensor) -> Tensor:
        """Logits of the token after the embedded one, x_W."""
        network, x = self.network, x_W
        for layer in range(network.spec.layers):
            qkv = self._matvec(x, network.matrix("qkv", layer), norm=network.norms[2 * layer])
            qkv = network.norm_queries_and_keys(qkv[None], layer)[0]
            x = self._matvec(self._attend(qkv, layer, position, table), network.matrix("o", layer), residual=x)
            inner = self._gate_up(x, network.matrix("gate_up", layer), network.norms[2 * layer + 1])
            x = self._matvec(inner, network.matrix("down", layer), residual=x)
        return self._matvec(x, network.head, norm=network.norms[-1], dtype=torch.float32)

    def choose_tiles(self, step_s: Callable[[], float]) -> float:
        """Choose the tile of each product, the largest first, by the time of an entire step: kernels overlap, and a
        kernel that is fast alone may delay the next. Returns the seconds of a step with the chosen tiles.
        """
        best_s = step_s()
        for product in sorted(self.tiles, key=lambda product: -product[1] * product[2]):
            for tile in matvec_kernels.TILES[1:]:
                before, self.tiles[product] = self.tiles[product], tile
                took_s = step_s()
                if took_s < CLEARLY_FASTER * best_s:
                    best_s = took_s
                else:
                    self.tiles[product] = before
        return best_s

    def _tile(self, kind: str, num: int, width: int) -> Tile:
        return self.tiles.setdefault((kind, num, width), matvec_kernels.TILES[0])

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
        block_n, block_k, warps = self._tile(f"matvec{has_norm:d}{has_residual:d}", num, width)
        matvec_kernels.matvec[(-(-num // block_n),)](
            x, norm if has_norm else x, w, residual if has_residual else x, y, num, width, self.network.spec.norm_eps,
            NORM=has_norm, RESIDUAL=has_residual, PDL=self.pdl, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps,
            **self.launch_options,
        )  # fmt: skip
        return y

    def _gate_up(self, x: Tensor, w: Tensor, norm: Tensor) -> Tensor:
        num, width = w.shape[0] // 2, w.shape[1]
        y = torch.empty(num, dtype=x.dtype, device=x.device)
        block_n, block_k, warps = self._tile("gate_up", num, width)
        matvec_kernels.gate_up[(-(-num // block_n),)](
            x, norm, w, y, num, width, self.network.spec.norm_eps,
            PDL=self.pdl, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, **self.launch_options,
        )  # fmt: skip
        return y

    def _attend(self, qkv: Tensor, layer: int, position: Tensor, table: Tensor) -> Tensor:
        network, spec = self.network, self.network.spec
        cached = self.cache.kernel_tensors(layer)
        splits = MAX_SPLITS
        while splits > 1 and spec.heads * splits > SPLIT_PROGRAMS:
            splits //= 2
        out = torch.empty(spec.heads * spec.head_dim, dtype=qkv.dtype, device=qkv.device)
        part_o = torch.empty(spec.heads, splits, spec.head_dim, device=qkv.device)
        part_ml = torch.empty(spec.heads, splits, 2, device=qkv.device)
        matvec_kernels.attend_one[(spec.heads, splits)](
            qkv, network.cos, network.sin, *cached, table, position, part_o, part_ml, cached[0].shape[1],
            spec.head_dim**-0.5,
            H=spec.heads, K=spec.kv_heads, D=spec.head_dim, BLOCK=16, SPLITS=splits, PAGE=BLOCK_TOKENS, PDL=self.pdl,
            num_warps=1, **self.launch_options,
        )  # fmt: skip
        attention_kernels.combine[(spec.heads,)](
            part_o, part_ml, out, D=spec.head_dim, SPLITS=splits, PDL=self.pdl, num_warps=1, **self.launch_options
        )
        return out
