"""Completions of many prompts at once: hundreds of rows, drawn where the scores lie, looked at every few steps.

An engine that serves has to look at every token: somebody waits for it. Here nobody does. Rows draw BURST tokens on the
device before their text is looked at, rows that have ended make room for the next, and samples of one prompt share its
keys and values. A row's tokens are what `Engine.generate` gives it, by the same scores and the same random numbers
(in float32; in bfloat16 sums of other shapes may round differently).

    Bulk      takes the network, cache and blocks of an Engine that does nothing else meanwhile
    Steps     how a burst is computed: step by step through the network, or by captured graphs (bulk_gpu.py)

Memory for all tokens that a row may write is taken when it begins, so no row ever has to give way. Fails with a
UserError where a prompt cannot be encoded; knows nothing of benchmarks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lakh.evals.bulk_rows import Draw, Row, draw_keys, keys_of, pick
from lakh.server.engine import Completion, Engine, FinishReason, Prompt, SamplingParams
from lakh.server.model.blocks import BLOCK_TOKENS
from lakh.server.model.network import Network, Segment

if TYPE_CHECKING:
    from lakh.server.prompts.fim import Order
    from lakh.server.model.kv import PagedCache

__all__ = ["Bulk", "Steps"]

MAX_ROWS = {"cpu": 32, "cuda": 512}
BURST = {"cpu": 1, "cuda": 16}  # tokens that a row may write past its end, against looks at its text
PREFILL_TOKENS = {"cpu": 512, "cuda": 16_384}  # of all prompts that are computed together
# Not cuDNN's, which torch likes best on new GPUs: it makes a plan for every length of a prompt, 50 ms each on an H200.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

Ended = Callable[[str], bool]
"""Whether the text so far holds all that is wanted."""


class Steps(Protocol):
    def run(self, rows: Sequence[Row], steps: int, draw: Draw) -> list[list[int]]:
        """So many new tokens of every row, in the order of the rows. Their blocks have room."""
        ...


class Bulk:
    def __init__(self, engine: Engine, *, max_rows: int | None = None, burst: int | None = None) -> None:
        self.engine = engine
        kind = engine.device.type
        self.max_rows, self.burst = max_rows or MAX_ROWS[kind], burst or BURST[kind]
        self._prefill_tokens = PREFILL_TOKENS[kind]
        self._steps = _steps(engine)

    @staticmethod
    def load(path: str) -> Bulk:
        return Bulk(Engine.load(path))

    def infill(self, prefix: str, suffix: str, max_tokens: int, order: Order = "psm") -> tuple[int, ...]:
        return self.engine.infill(prefix, suffix, max_tokens, order)

    def generate(
        self,
        prompts: Sequence[Prompt],
        samplings: Sequence[SamplingParams],
        *,
        ended: Ended | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Complete every prompt as its sampling says; they differ in their seeds only. top_k is not for here."""
        if not prompts:
            return []
        common = samplings[0]
        draw = Draw(common.temperature, common.top_p)
        waiting, running = deque(self._rows(prompts, samplings)), list[Row]()
        done: list[Completion | None] = [None] * len(prompts)
        finished = 0
        try:
            while waiting or running:
                self._admit(waiting, running)
                room = min(self.engine.spec.context - row.position for row in running)
                steps = max(1, min(self.burst, room, max(row.limit - len(row.tokens) for row in running)))
                for row, tokens in zip(running, self._steps.run(running, steps, draw), strict=True):
                    completion = self._look(row, tokens, common.stop, ended)
                    if completion is not None:
                        done[row.place] = completion
                        finished += 1
                        self._close(row)
                running = [row for row in running if row.lease is not None]
                if progress:
                    progress(finished)
        finally:
            for row in running:
                self._close(row)
        return [completion for completion in done if completion is not None]

    # --- rows ---

    def _rows(self, prompts: Sequence[Prompt], samplings: Sequence[SamplingParams]) -> list[Row]:
        """Copies of one prompt together, so that they can share; the longest first, they end last."""
        engine, copies, rows = self.engine, Counter[tuple[tuple[int, ...], SamplingParams]](), list[Row]()
        encoded: dict[Prompt, tuple[int, ...]] = {}
        for place, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            if prompt not in encoded:
                encoded[prompt] = engine.cut(engine.encode(prompt), sampling)
            ids = encoded[prompt]
            limit = min(sampling.max_tokens, engine.spec.context - len(ids))
            keys = draw_keys(sampling, copies[ids, sampling], limit)
            copies[ids, sampling] += 1
            rows.append(Row(ids, limit, keys, place))
        return sorted(rows, key=lambda row: (-len(row.prompt) - row.limit, row.prompt, row.place))

    def _admit(self, waiting: deque[Row], running: list[Row]) -> None:
        """Let rows in while there is room, and compute their prompts but for the last token."""
        engine, pool = self.engine, self.engine.pool
        first = {row.prompt: row for row in running}
        prompts: list[tuple[Row, int]] = []
        num_tokens = 0
        while waiting and len(running) < self.max_rows:
            row = waiting[0]
            ids = row.prompt
            twin = first.get(ids)
            if twin is not None and any(twin is other for other, _ in prompts):
                self._prefill(prompts)  # so that this one finds what its twin has computed
                prompts, num_tokens = [], 0
            row.lease = pool.open(("bulk", engine.weights_version), ids)
            whole = min(len(ids) + row.limit + self.burst, engine.spec.context)
            if not pool.extend(row.lease, whole):
                pool.close(row.lease, ids[: row.lease.num_cached])
                row.lease = None
                if running:
                    break
                raise AssertionError("the cache holds less than one context")
            waiting.popleft()
            if row.lease.copy is not None:
                engine.cache.copy_block(*row.lease.copy)
            start, needed = row.lease.num_cached, len(ids) - 1
            if twin is not None and start < needed:  # all of it is in the twin's blocks
                for index in range(start // BLOCK_TOKENS, -(-needed // BLOCK_TOKENS)):
                    engine.cache.copy_block(twin.blocks[index], row.blocks[index])
                start = needed
            if start < needed:
                prompts.append((row, start))
                num_tokens += needed - start
                if num_tokens >= self._prefill_tokens:
                    self._prefill(prompts)
                    prompts, num_tokens = [], 0
            first.setdefault(ids, row)
            running.append(row)
        self._prefill(prompts)

    def _prefill(self, prompts: Sequence[tuple[Row, int]]) -> None:
        if not prompts:
            return
        engine = self.engine
        segments = [Segment(row.prompt[start:-1], start, row.blocks, scored=0) for row, start in prompts]
        with sdpa_kernel(ATTENTION):
            engine.network.forward(segments, engine.cache)
        for row, _ in prompts:
            assert row.lease is not None
            engine.pool.share(row.lease, row.prompt[:-1])

    def _close(self, row: Row) -> None:
        if row.lease is not None:
            self.engine.pool.close(row.lease, row.prompt[:-1])
            row.lease = None

    # --- text ---

    def _look(self, row: Row, tokens: list[int], stops: tuple[str, ...], ended: Ended | None) -> Completion | None:
        """Take these tokens; the completion where they end the row."""
        tokenizer = self.engine.tokenizer
        tokens = tokens[: row.limit - len(row.tokens)]
        is_eot = tokenizer.eot in tokens
        if is_eot:
            tokens = tokens[: tokens.index(tokenizer.eot) + 1]
        row.tokens += tokens
        row.text += tokenizer.decode(tokens)
        is_full = len(row.tokens) >= row.limit
        has_all = any(stop in row.text for stop in stops) or (ended is not None and ended(row.text))
        if not (is_eot or is_full or has_all):
            return None
        text = tokenizer.decode(row.tokens)  # as a whole: pieces may cut characters in half
        ends = [at for stop in stops if (at := text.find(stop)) >= 0]
        has_all = bool(ends) or (ended is not None and ended(text))
        if not (is_eot or is_full or has_all):
            row.text = text
            return None
        reason: FinishReason = "stop" if is_eot or has_all else "length"
        return Completion(text[: min(ends)] if ends else text, tuple(row.tokens), reason, len(row.prompt))


class _Plain:
    """Step by step through the network, on any device."""

    def __init__(self, network: Network, cache: PagedCache) -> None:
        self._network, self._cache = network, cache

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], steps: int, draw: Draw) -> list[list[int]]:
        drawn: list[list[int]] = [[] for _ in rows]
        keys = keys_of(rows, steps).to(self._network.device)
        for step in range(steps):
            segments = [
                Segment([new[-1] if new else row.last], row.position + step, row.blocks)
                for row, new in zip(rows, drawn, strict=True)
            ]
            logits = self._network.forward(segments, self._cache)
            for new, token in zip(drawn, pick(logits, draw, keys[:, step]).tolist(), strict=True):
                new.append(token)
        return drawn


def _steps(engine: Engine) -> Steps:
    if engine.device.type == "cuda":
        from lakh.evals import bulk_gpu

        if bulk_gpu.can_decode(engine.network):
            return bulk_gpu.Graphs(engine.network, engine.cache)
    return _Plain(engine.network, engine.cache)
