"""The layers of a model for a decode batch of a few tokens, as kernels that overlap (programmatic dependent launch).

Seven kernels a layer: norm, qkv, attention, o, norm, gate and up, down. Where a product splits its
columns, the next kernel adds the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lakh.server.model.gpu import kernels
from lakh.server.model.gpu.batch.product import MAX_TOKENS, STEP, BatchProduct, Output, ProductTile, tile_for
from lakh.server.model.inference import InferenceModel

__all__ = ["BatchLayers", "PartsAttention"]

ARCHITECTURES = ("llama", "mistral", "phi3")
HOPPER = (9, 0)
NORM_WARPS = 16
OUTPUTS = {
    "qkv": Output.PARTS,
    "o": Output.PARTS,
    "gate_up": Output.SWIGLU,
    "down": Output.PARTS,
    "head": Output.BF16,
}

PartsAttention = Callable[[Tensor, int], Tensor]
"""(fused queries, keys and values in parts: parts x N x X, layer) -> N x heads*head size."""


class BatchLayers:
    @staticmethod
    def obstacle(network: InferenceModel, tokens: int) -> str | None:
        """Why there are no such layers for this model, number of tokens and GPU; None if there are."""
        spec = network.spec
        if network.architecture.name not in ARCHITECTURES or len(network.head_norms):
            return f"they implement {' and '.join(ARCHITECTURES)}"
        if spec.has_biases:
            return "they have no biases"
        if network.precision != "bf16" or network.shard.size > 1:
            return "they compute a whole model in bf16"
        if tokens > MAX_TOKENS:
            return f"they have at most {MAX_TOKENS} tokens"
        if torch.cuda.get_device_capability(network.device) != HOPPER:
            return "they need compute capability 9.0"
        if any(size % STEP for size in (spec.width, spec.heads * spec.head_dim, spec.ffn)):
            return f"width, heads and ffn must be multiples of {STEP}"
        return None

    def __init__(self, network: InferenceModel, tokens: int, tiles: Mapping[str, ProductTile] | None = None) -> None:
        """Raises CudaCompileError if the kernels cannot be compiled. `tiles`: other than the default, by matrix."""
        self.network = network
        num_sms = torch.cuda.get_device_properties(network.device).multi_processor_count

        def make(name: str) -> BatchProduct:
            rows, columns = (network.head if name == "head" else network.matrix(name, 0)).shape
            tile = (tiles or {}).get(name) or tile_for(rows, columns, OUTPUTS[name], num_sms)
            return BatchProduct(rows, columns, tokens, OUTPUTS[name], tile, network.device)

        with ThreadPoolExecutor(len(OUTPUTS)) as pool:  # the compiler releases Python's lock
            self._products = dict(zip(OUTPUTS, pool.map(make, OUTPUTS), strict=True))

    def __call__(self, x_NW: Tensor, attend: PartsAttention, positions: Tensor | None = None) -> Tensor:
        """Logits of all tokens, or of those at `positions` (as many); overwrites x_NW.

        The kernel before this must be a plain launch, and so must be the one that writes `positions`.
        """
        network, delta = self.network, None
        for layer in range(network.spec.layers):
            y = self._norm(x_NW, delta, network.norms[2 * layer])
            qkv = self._products["qkv"](y, network.matrix("qkv", layer))
            delta = self._products["o"](attend(qkv, layer), network.matrix("o", layer))
            y = self._norm(x_NW, delta, network.norms[2 * layer + 1])
            inner = self._products["gate_up"](y, network.matrix("gate_up", layer))
            delta = self._products["down"](inner, network.matrix("down", layer))
        return self._products["head"](self._norm(x_NW, delta, network.norms[-1], positions), network.head)

    @property
    def qkv_parts(self) -> int:
        return self._products["qkv"].tile.splits

    def _norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, positions: Tensor | None = None) -> Tensor:
        """x += the parts of delta, in place; returns its norm. With `positions`: of these, and x stays."""
        tokens, width = x.shape
        y = torch.empty_like(x)
        kernels.add_norm[(tokens,)](
            x, x if delta is None else delta, weight, y, width, self.network.spec.norm_eps, positions,
            ADD=delta is not None, BLOCK=1 << (width - 1).bit_length(), PARTS=1 if delta is None else len(delta),
            PDL=True, num_warps=NORM_WARPS, launch_pdl=True,
        )  # fmt: skip
        return y
