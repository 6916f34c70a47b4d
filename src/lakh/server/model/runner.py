"""One model with its KV cache, and the fastest way to run a step.

On the CPU every step goes through InferenceModel. On a GPU one token per sequence goes through gpu/decode.py (several
greedy steps at once on request), any other step that fits through gpu/prefill.py, and the rest, as well as models that
the kernels do not support, through InferenceModel's generic path. The engine has one runner for its model and one for a
draft model.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from lakh.errors import UserError
from lakh.server.model.block_pool import BLOCK_TOKENS, BlockPool
from lakh.server.model.inference import InferenceModel, ModelShard, Precision, SequenceChunk
from lakh.server.model.kv_cache import SCALE_BYTES, PagedCache
from lakh.server.model.launched_step import LaunchedStep
from lakh.server.sampling.tokens import most_likely
from lakh.spec.model import Model

if TYPE_CHECKING:
    from lakh.server.model.gpu.decode import Decoder
    from lakh.server.model.gpu.prefill import PrefillGraphs
    from lakh.server.model.tensor_parallel import TensorParallelGroup

__all__ = ["KvDtype", "Runner", "StepLimits"]

KvDtype = Literal["auto", "int8"]
"""Of the KV cache; auto: the type of activations."""

_log = logging.getLogger(__name__)

CACHE_TOKENS = 256 * 1024  # fifty users with prompts of 1,700 tokens need 85,000; with less most prefix hits are lost
CACHE_BYTES = {"cpu": 2 << 30, "cuda": 24 << 30}
PROMPT_LOGITS = 1 << 24  # for log-probabilities of prompts, in a step: 64 MiB in float32
MIN_PROMPT_LOGITS = 32  # tokens: fewer read the weights too often
FREE_PERCENT = 80  # of a GPU's free memory at most: graphs and prompts need the rest
GRAPH_LOG_S = 60.0  # between two lines about steps that have no graph
MAX_KERNEL_INDEX = 1 << 31  # numbers of one head's keys: the kernels of gpu/ index them with 32 bits


class StepLimits(NamedTuple):
    """Of a step that runs as one graph. A larger one takes the generic path, which is many times slower."""

    tokens: int
    scored: int


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
        kv_dtype: KvDtype = "auto",
    ) -> None:
        """The cache holds `cache_tokens`, by default as many as fit, up to `most_tokens`."""
        self._team = team
        self.steps_without_graph = {"size": 0, "adapter": 0}
        """Steps on the generic path although the model has CUDA graphs, by reason."""
        self._logged_s = float("-inf")
        self.network = InferenceModel(
            spec, weights, num_ids, device, precision, ModelShard() if team is None else team.shard
        )
        is_int8 = kv_dtype == "int8"
        if is_int8 and (team is not None or spec.is_latent):
            found = "is not implemented for tensor parallelism and latent attention"
            raise UserError("KV cache of int8", found, "use --kv-cache-dtype auto")
        dtype = torch.int8 if is_int8 else self.network.dtype
        token_bytes = spec.kv_bytes_per_token(dtype.itemsize) * self.network.kv_heads // spec.cache_heads
        if is_int8:
            token_bytes += 2 * spec.layers * self.network.kv_heads * SCALE_BYTES
        num_blocks = _num_blocks(spec, device.type, token_bytes, cache_tokens, most_tokens, _free_bytes(device))
        self.pool = BlockPool(num_blocks)
        # One block more than the pool: padding of a GPU batch writes there.
        kv_heads = self.network.kv_heads
        self.cache = PagedCache(spec, num_blocks + 1, device=device, dtype=dtype, kv_heads=kv_heads)
        self.decoder: Decoder | None = None
        self.prefill: PrefillGraphs | None = None
        self.max_prompt_logits = max(PROMPT_LOGITS // num_ids, MIN_PROMPT_LOGITS)
        """Tokens of prompts with log-probabilities in a step, each of which has the logits of all ids."""
        self.step_limits: StepLimits | None = None
        if team is not None:
            with team.command("begin", num_ids, num_blocks + 1):
                return  # steps are plain torch, with all-reduces between the layers
        if device.type == "cuda":
            from lakh.server.model.gpu import decode as decode_gpu
            from lakh.server.model.gpu import prefill as prefill_gpu
            from lakh.server.model.gpu.step_inputs import MAX_SCORED

            if decode_gpu.can_decode(self.network):
                self.decoder = decode_gpu.Decoder(self.network, self.cache)
                self.prefill = prefill_gpu.PrefillGraphs(self.network, self.cache)
                self.step_limits = StepLimits(prefill_gpu.BUCKETS[-1], MAX_SCORED)
            else:
                parts = ", a window, bounded scores or positions of its own" if not self.network.is_plain else ""
                spec_text = f"{self.network.architecture.name} with heads of {spec.head_dim}{parts}"
                _log.info("steps use the generic torch path: the GPU kernels do not implement %s", spec_text)

    def launch(self, chunks: Sequence[SequenceChunk]) -> LaunchedStep:
        """Start a step. As a CUDA graph it runs while the caller works, until its tokens are read."""
        launch = self._graphs_for(chunks)
        if launch is not None:
            return launch(chunks)
        logits = self.forward(chunks)
        return LaunchedStep(logits, partial(most_likely, logits))

    def forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        """Logits of the scored tokens, chunk after chunk: valid until the next call."""
        launch = self._graphs_for(chunks)
        if launch is not None:
            return launch(chunks).logits
        if self.decoder is not None and self.prefill is not None:
            if any(chunk.adapter is not None for chunk in chunks):  # not in the graphs
                self.steps_without_graph["adapter"] += 1
            else:
                self.steps_without_graph["size"] += 1
                self._log_size(chunks)
        with self._on_all_ranks("forward", chunks):
            return self.network.forward(chunks, self.cache)

    def _graphs_for(self, chunks: Sequence[SequenceChunk]) -> Callable[[Sequence[SequenceChunk]], LaunchedStep] | None:
        """What launches such a step as a CUDA graph, if there is one."""
        if self.decoder is None or self.prefill is None or any(chunk.adapter is not None for chunk in chunks):
            return None
        if len(chunks) <= self.decoder.max_sequences and all(len(s.tokens) == s.scored == 1 for s in chunks):
            return self.decoder.launch
        return self.prefill.launch if self.prefill.fits(chunks) else None

    def _log_size(self, chunks: Sequence[SequenceChunk]) -> None:
        """Once a minute: a step that has no graph because of its size."""
        now_s = time.monotonic()
        if now_s - self._logged_s < GRAPH_LOG_S:
            return
        self._logged_s = now_s
        sizes = sum(len(chunk.tokens) for chunk in chunks), len(chunks), sum(chunk.scored for chunk in chunks)
        text = "a step of %d tokens in %d sequences with %d scored tokens exceeds the largest CUDA graph and is slow; "
        text += "%d such steps since the start"
        _log.warning(text, *sizes, self.steps_without_graph["size"])

    def greedy(
        self, tokens: Sequence[int], positions: Sequence[int], blocks: Sequence[Sequence[int]], steps: int
    ) -> list[list[int]]:
        """The most likely tokens of `steps` steps, step by step; the blocks have room for them."""
        if self.decoder is not None and len(tokens) <= self.decoder.max_sequences:
            return self.decoder.run(tokens, positions, blocks, steps)[0]
        sampled = [list(tokens)]
        for step in range(steps):
            chunks = [
                SequenceChunk([token], start + step, table)
                for token, start, table in zip(sampled[-1], positions, blocks, strict=True)
            ]
            sampled.append(self.forward(chunks).argmax(dim=-1).tolist())
        return sampled[1:]

    def copy_block(self, source: int, target: int) -> None:
        with self._on_all_ranks("copy", source, target):
            self.cache.copy_block(source, target)

    def _on_all_ranks(self, *command: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._team is None else self._team.command(*command)

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
    """Blocks of the cache: as requested, else as many as fit; always enough for one full context."""
    most = MAX_KERNEL_INDEX // spec.head_dim - 3 * BLOCK_TOKENS if device_type == "cuda" else CACHE_TOKENS
    if cache_tokens is None:
        room_bytes = CACHE_BYTES[device_type]
        if free_bytes is not None:
            room_bytes = min(room_bytes, free_bytes * FREE_PERCENT // 100)
        cache_tokens = min(most, room_bytes // token_bytes, most if most_tokens is None else most_tokens)
    elif device_type == "cuda" and cache_tokens > most:
        raise UserError(f"cache of {cache_tokens} tokens", f"the GPU kernels support {most}", "choose fewer")
    num_tokens = max(cache_tokens, spec.context + BLOCK_TOKENS)
    needed_bytes = num_tokens * token_bytes
    if free_bytes is not None and needed_bytes > free_bytes:
        found = f"needs {needed_bytes / 2**30:.1f} GiB, and the GPU has {free_bytes / 2**30:.1f} GiB free"
        todo = "lower --cache-tokens" if num_tokens == cache_tokens else "free some, or use a smaller model"
        raise UserError(f"cache of {num_tokens} tokens", found, todo)
    return num_tokens // BLOCK_TOKENS + 1


def _free_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU, including what torch has reserved and not allocated."""
    if device.type != "cuda":
        return None
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
