"""An engine in this process as a backend: requests become rows, one thread steps them (worker.py).

New text is tokenized in threads, so that neither other requests nor the engine wait for it; lines that were read before
(lines.py) are looked up at once. A full queue, a newer
request with the same key and the end of the server are BadRequests with the status that means them.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from lakh.server.backends.response_queue import ResponseQueue, response_timeout_s
from lakh.server.backends.engine_thread import JobUpdate, EngineJob, QueueFull, EngineStopped, Superseded, EngineThread
from lakh.server.backend import MetricFamily, ModelCard, CompletionDelta, Usage
from lakh.server.engine import Engine
from lakh.server.prompts.token_healing import HealedPrompt
from lakh.server.prompts.incremental_tokenizer import EncodeOptions, TooMuchNewText
from lakh.server.metrics import resident_bytes
from lakh.server.request import RequestError, CompletionRequest
from lakh.server.sequence import Sequence
from lakh.server.sampler import Logprobs
from lakh.server.stopping import StopRule, indent_width

__all__ = ["MAX_WAITING", "LocalBackend", "rows_of"]

MAX_WAITING = 64
CLOSE_S = 5.0  # for the thread
MAX_NEW_HERE = 512  # characters that are sooner tokenized (0.2 ms) than handed to a thread and back
MAX_CHARS_HERE = 1 << 16  # of a request whose lines are looked up in the event loop
SAMPLED_ROWS = 256  # of the embedding, by which weights are told apart


class InProcessBackend:
    def __init__(self, engine: Engine, *, max_waiting: int = MAX_WAITING) -> None:
        self.engine = engine
        self.worker = EngineThread(engine, max_waiting)
        self.encoders = ThreadPoolExecutor(2, "lakh-encode")
        self._num_unread = 0  # completions of requests whose text waits for a thread: they wait as those in the queue
        self._fingerprint = lru_cache(1)(lambda version: f"{_fingerprint(engine)}-{version}")

    @property
    def num_running(self) -> int:
        return self.worker.num_running

    @property
    def num_waiting(self) -> int:
        return self.worker.num_waiting + self._num_unread

    def models(self) -> list[ModelCard]:
        engine = self.engine
        return [ModelCard(engine.name, engine.spec.context, self._fingerprint(engine.weights_version))]

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionDelta | Usage, None]:
        mailbox = ResponseQueue(response_timeout_s(request))
        leave = await self.begin(request, mailbox.put)
        try:
            async for item in mailbox.read():
                yield item
        finally:
            leave()

    async def begin(
        self, request: CompletionRequest, put: Callable[[CompletionDelta | Usage | Exception | None], None]
    ) -> Callable[[], None]:
        """Set to work. `put` hears pieces as they become certain, then a Usage and None, or what went wrong. What it
        returns ends the work, whoever reads it; at the end it says nothing.
        """
        now_s = self.engine.clock()
        try:
            # Someone who types sends lines that were read before.
            rows = rows_of(self.engine, request, now_s, MAX_NEW_HERE)
        except TooMuchNewText:
            rows = await self._read(request, now_s)
        job = EngineJob(rows, _Telling(self.engine, request, rows, put), request.supersede)
        try:
            self.worker.submit(job)
        except (QueueFull, EngineStopped) as error:
            raise _refusal(error, self.worker) from None
        return lambda: self.worker.cancel(job)

    async def _read(self, request: CompletionRequest, now_s: float) -> list[Sequence]:
        """In a thread; as many may wait for that as may wait in the queue."""
        if self.num_waiting >= self.worker.max_waiting and not self.worker.has(request.supersede):
            raise _refusal(QueueFull(), self.worker)
        self._num_unread += request.num_choices
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self.encoders, rows_of, self.engine, request, now_s)
        finally:
            self._num_unread -= request.num_choices

    def metric_families(self) -> list[MetricFamily]:
        counts, pool = self.engine.counts, self.engine.pool
        return [
            MetricFamily("kv_cache_usage_perc", "gauge", "Share of blocks in use.", [("", pool.num_held / pool.num_blocks)]),
            MetricFamily("kv_cache_blocks_held", "gauge", "Blocks that rows at work hold.", [("", pool.num_held)]),
            MetricFamily("prefix_cache_queries_total", "counter", "Prompt tokens looked up.", [("", counts.prompt_tokens)]),
            MetricFamily("prefix_cache_hits_total", "counter", "Prompt tokens found.", [("", counts.cached_tokens)]),
            MetricFamily("num_preemptions_total", "counter", "Rows that gave way.", [("", counts.preempted_seqs)]),
            MetricFamily("requests_superseded_total", "counter", "Overtaken.", [("", self.worker.num_superseded)]),
            MetricFamily("spec_decode_num_drafts_total", "counter", "Rows' steps with guesses.", [("", counts.drafts)]),
            MetricFamily("spec_decode_num_draft_tokens_total", "counter", "Guesses.", [("", counts.draft_tokens)]),
            MetricFamily("spec_decode_num_accepted_tokens_total", "counter", "Guesses kept.", [("", counts.accepted_tokens)]),
            self.engine.step_sizes.family("iteration_tokens_total", "Tokens of a step."),
            *self.engine.phases.metric_families(),
            MetricFamily("engine_process_id", "gauge", "Of the engine's process.", [("", os.getpid())]),
            MetricFamily("engine_resident_memory_bytes", "gauge", "Of the engine's process.", [("", resident_bytes())]),
            MetricFamily("engine_cpu_seconds_total", "counter", "Of the engine's process.", [("", time.process_time())]),
            MetricFamily("weights_version", "gauge", "How often weights were swapped.", [("", self.engine.weights_version)]),
        ]

    async def start(self) -> None:
        """The thread runs from the beginning."""

    async def drain(self, deadline_s: float) -> None:
        await self.worker.drain(deadline_s)

    async def close(self) -> None:
        self.encoders.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.worker.close, CLOSE_S)


class _Telling:
    """What the worker says of one job, in the words of a backend."""

    def __init__(
        self,
        engine: Engine,
        request: CompletionRequest,
        rows: Sequence[Sequence],
        put: Callable[[CompletionDelta | Usage | Exception | None], None],
    ) -> None:
        self._engine, self._rows, self._put = engine, rows[:: request.n], put
        self._offsets: Counter[int] = Counter()
        self._num_tokens = 0

    def __call__(self, heard: JobUpdate) -> None:
        if heard is None:
            prompt_tokens = sum(len(row.prompt) for row in self._rows)
            self._put(Usage(prompt_tokens, self._num_tokens, sum(row.num_cached for row in self._rows)))
            self._put(None)
        elif isinstance(heard, Exception):
            self._put(_refusal(heard))
        else:
            index, chunk = heard
            self._num_tokens += len(chunk.tokens)
            logprobs = None
            if chunk.logprobs is not None:
                logprobs = _logprobs(self._engine, chunk.logprobs, self._offsets[index])
                self._offsets[index] += len(chunk.text)
            self._put(CompletionDelta(index, chunk.text, chunk.finish_reason, chunk.tokens, logprobs))


def _refusal(error: Exception, worker: EngineThread | None = None) -> Exception:
    """What a client is told; a bug of ours as it is."""
    if isinstance(error, QueueFull) and worker is not None:
        message = f"{worker.max_waiting} requests are waiting already; try again later"
        return RequestError(None, message, status=429, code="queue_full")
    if isinstance(error, Superseded):
        return RequestError(None, "a newer request took this one's place", status=409, code="superseded")
    if isinstance(error, EngineStopped):
        return RequestError(None, "the server is shutting down", status=503)
    return error


def rows_of(engine: Engine, request: CompletionRequest, now_s: float, most_new: int | None = None) -> list[Sequence]:
    """Tokenize, check the length; one row for every choice. TooMuchNewText where more than `most_new` characters are new.
    `now_s`: when the request came, on the engine's clock; its time runs from then.
    """
    if most_new is not None and request.num_chars > MAX_CHARS_HERE:
        raise TooMuchNewText
    sampling, reading = request.sampling, EncodeOptions(request.cache_space, most_new)
    if sampling.max_tokens >= engine.spec.context:
        found = f"max_tokens: {sampling.max_tokens} leaves no room in a context of {engine.spec.context} tokens"
        raise RequestError("max_tokens", found)
    deadline_s = None if request.timeout_s is None else now_s + request.timeout_s
    rows = []
    copies: Counter[tuple[int, ...]] = Counter()
    for prompt in request.prompts:
        if request.suffix is not None and isinstance(prompt, str):
            ids = engine.infill(prompt, request.suffix, sampling.max_tokens, request.order, reading=reading)
        else:
            _check_length(engine, engine.min_tokens(prompt), sampling.max_tokens, "at least ")
            ids = engine.encode(prompt, reading=reading)
            _check_length(engine, len(ids), sampling.max_tokens)
            ids = engine.cut(ids, sampling)
        # The cursor stands at the prompt's end only where nothing follows it.
        ends_at_cursor = isinstance(prompt, str) and (request.suffix is None or request.order == "spm")
        healed = engine.heal(ids) if request.heal and ends_at_cursor else HealedPrompt(ids, None, "")
        for _ in range(request.n):
            row = engine.row(
                healed.ids,
                sampling,
                copy=copies[ids],
                tenant=request.cache_space,
                deadline_s=deadline_s,
                rule=_stop_rule(request.stop_rule, prompt),
                first_ids=healed.first_ids,
                skip=healed.skip,
            )
            rows.append(row)
            copies[ids] += 1
    return rows


def _check_length(engine: Engine, num_ids: int, max_tokens: int, about: str = "") -> None:
    if num_ids + max_tokens > engine.spec.context:
        found = f"prompt: {about}{num_ids} tokens and max_tokens {max_tokens} are more than the context"
        raise RequestError("prompt", f"{found} of {engine.spec.context}", code="context_length_exceeded")


def _stop_rule(kind: str | None, prompt: object) -> StopRule | None:
    if kind is None:
        return None
    line = prompt.rpartition("\n")[2] if isinstance(prompt, str) else ""
    return StopRule(kind, indent_width(line[: len(line) - len(line.lstrip(" \t"))]))


def _logprobs(engine: Engine, items: Sequence[Logprobs], offset: int) -> dict[str, Any]:
    """OpenAI's form: parallel lists. Half a character is spelt as U+FFFD."""

    def spell(token: int) -> str:
        return engine.tokenizer.decode([token], show_special=True)

    tokens = [spell(item.token) for item in items]
    offsets = [offset + sum(len(token) for token in tokens[:index]) for index in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [item.logprob for item in items],
        "top_logprobs": [{spell(token): logprob for token, logprob in item.top} for item in items],
        "text_offset": offsets,
    }


def _fingerprint(engine: Engine) -> str:
    """Of the weights, by their norms and a sample of the embedding: any training changes both."""
    network = engine.network
    step = max(network.embed.shape[0] // SAMPLED_ROWS, 1)
    digest = hashlib.sha256(repr(engine.spec).encode())
    for tensor in (network.norms, network.head_norms, network.embed[::step]):
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
