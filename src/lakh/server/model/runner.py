"""One model at work: its network, the blocks that remember its keys and values, and the fastest way to run a step.

On the CPU every step goes through the network. On a GPU one token for each row goes through gpu/decode.py (several
greedy steps at once where that is asked for), any other step that fits through gpu/chunks.py, and the rest through
plain torch. The engine has one runner for its model and one for a draft (draft.py). Knows nothing of rows and requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lakh.errors import UserError
from lakh.server.model.block_pool import BLOCK_TOKENS, BlockPool
from lakh.server.model.inference import InferenceModel, ModelShard, Precision, SequenceChunk
from lakh.server.model.kv_cache import PagedCache
from lakh.spec.model import Model

if TYPE_CHECKING:
    from lakh.server.model.gpu.decode import Decoder
    from lakh.server.model.gpu.prefill import PrefillGraphs
    from lakh.server.model.tensor_parallel import TensorParallelGroup

__all__ = ["Runner"]

CACHE_TOKENS = 256 * 1024  # fifty people with prompts of 1,700 tokens need 85,000; with less most hits are lost
CACHE_BYTES = {"cpu": 2 << 30, "cuda": 24 << 30}
FREE_PERCENT = 80  # of a GPU's free memory at most: graphs and prompts need some too
KERNEL_COUNTS = 1 << 31  # numbers of one head's keys: the kernels of gpu/ count them in 32 bits


class Runner:
    def __init__(
        self,
        spec: Model,
        weights: Mapping[str, Tensor],
        num_ids: int,
        *,
        device: torch.device,
        precision: Precision,
        cache_tokens: int | None = None,
        most_tokens: int | None = None,
        team: TensorParallelGroup | None = None,
    ) -> None:
        """The cache holds as many tokens as asked, else what there is room for, up to `most_tokens`. With a `team` this
        process holds a share of the model (tensor_parallel.py).
        """
        self._team = team
        self.network = InferenceModel(
            spec, weights, num_ids, device, precision, ModelShard() if team is None else team.shard
        )
        token_bytes = spec.kv_bytes_per_token(self.network.dtype.itemsize) * self.network.kv_heads // spec.kv_heads
        num_blocks = _num_blocks(spec, device.type, token_bytes, cache_tokens, most_tokens, _free_bytes(device))
        self.pool = BlockPool(num_blocks)
        # One block more than the pool has: empty places of a GPU batch write there.
        kv_heads = self.network.kv_heads
        self.cache = PagedCache(spec, num_blocks + 1, device=device, dtype=self.network.dtype, kv_heads=kv_heads)
        self.decoder: Decoder | None = None
        self.prefill: PrefillGraphs | None = None
        if team is not None:
            with team.command("begin", num_ids, num_blocks + 1):
                return  # steps are plain torch, with sums between the layers
        if device.type == "cuda":
            from lakh.server.model.gpu import decode as decode_gpu
            from lakh.server.model.gpu import prefill as prefill_gpu

            if decode_gpu.can_decode(self.network):
                self.decoder = decode_gpu.Decoder(self.network, self.cache)
                self.prefill = prefill_gpu.PrefillGraphs(self.network, self.cache)

    def forward(self, segments: Sequence[SequenceChunk]) -> Tensor:
        """Scores of the scored tokens, segment after segment: valid until the next call."""
        if self._team is not None:
            with self._team.command("forward", segments):
                return self.network.forward(segments, self.cache)
        if self.decoder is None or self.prefill is None:
            return self.network.forward(segments, self.cache)
        if len(segments) <= self.decoder.max_sequences and all(len(s.tokens) == s.scored == 1 for s in segments):
            tokens, positions = [segment.tokens[0] for segment in segments], [segment.start for segment in segments]
            return self.decoder.run(tokens, positions, [segment.blocks for segment in segments], 1)[1]
        if self.prefill.fits(segments):
            return self.prefill.forward(segments)
        return self.network.forward(segments, self.cache)

    def greedy(
        self, tokens: Sequence[int], positions: Sequence[int], blocks: Sequence[Sequence[int]], steps: int
    ) -> list[list[int]]:
        """The likeliest tokens of so many steps, step by step; the blocks have room for them."""
        if self.decoder is not None and len(tokens) <= self.decoder.max_sequences:
            return self.decoder.run(tokens, positions, blocks, steps)[0]
        drawn = [list(tokens)]
        for step in range(steps):
            segments = [
                SequenceChunk([token], start + step, table)
                for token, start, table in zip(drawn[-1], positions, blocks, strict=True)
            ]
            drawn.append(self.forward(segments).argmax(dim=-1).tolist())
        return drawn[1:]

    def copy_block(self, source: int, target: int) -> None:
        if self._team is None:
            self.cache.copy_block(source, target)
            return
        with self._team.command("copy", source, target):
            self.cache.copy_block(source, target)

    def close(self) -> None:
        if self._team is not None:
            self._team.close()

    def warm_up(self) -> None:
        """Capture all graphs now."""
        if self.decoder is not None:
            self.decoder.warm_up()
        if self.prefill is not None:
            self.prefill.warm_up()


def _num_blocks(
    spec: Model,
    device_type: str,
    token_bytes: int,
    cache_tokens: int | None,
    most_tokens: int | None,
    free_bytes: int | None,
) -> int:
    """Blocks of the cache: as asked, else what a fixed number of bytes holds, or most of what a GPU has free; always
    enough for one full context.
    """
    most = KERNEL_COUNTS // spec.head_dim - 3 * BLOCK_TOKENS if device_type == "cuda" else CACHE_TOKENS
    if cache_tokens is None:
        room_bytes = CACHE_BYTES[device_type]
        if free_bytes is not None:
            room_bytes = min(room_bytes, free_bytes * FREE_PERCENT // 100)
        cache_tokens = min(most, room_bytes // token_bytes, most if most_tokens is None else most_tokens)
    elif device_type == "cuda" and cache_tokens > most:
        raise UserError(f"cache of {cache_tokens} tokens", f"a GPU's kernels count to {most}", "ask for fewer")
    num_tokens = max(cache_tokens, spec.context + BLOCK_TOKENS)
    needed_bytes = num_tokens * token_bytes
    if free_bytes is not None and needed_bytes > free_bytes:
        found = f"needs {needed_bytes / 2**30:.1f} GiB, and the GPU has {free_bytes / 2**30:.1f} GiB free"
        todo = "give --cache-tokens fewer" if num_tokens == cache_tokens else "free some, or take a smaller model"
        raise UserError(f"cache of {num_tokens} tokens", found, todo)
    return num_tokens // BLOCK_TOKENS + 1


def _free_bytes(device: torch.device) -> int | None:
    """Of a GPU, what torch keeps for later included."""
    if device.type != "cuda":
        return None
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
