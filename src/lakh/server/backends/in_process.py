"""A backend with an engine in this process: requests become sequences, one thread steps them (engine_thread.py).

New text is tokenized in worker threads, so neither other requests nor the engine wait for it; text whose lines are
cached (prompts/incremental_tokenizer.py) is encoded in the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from lakh.metrics import MetricsRegistry
from lakh.server.backend import BackendHealth, CompletionDelta, ModelCard, ModelDetails, PhaseTimes, Usage
from lakh.server.backends.encoder_threads import EncoderThreads
from lakh.server.backends.engine_thread import EngineJob, EngineThread, JobUpdate
from lakh.server.backends.logprob_forms import EchoedPrompt, TokenTexts, openai_logprobs, vllm_prompt_logprobs
from lakh.server.backends.request_sequences import make_answer_parser, make_sequences
from lakh.server.backends.response_queue import ResponseQueue, response_timeout_s
from lakh.server.engine import Engine
from lakh.server.fairness import Share
from lakh.server.metrics import PREFIX, EngineMetrics, MetricFamily, counter, gauge
from lakh.server.prompts.incremental_tokenizer import TooMuchNewText
from lakh.server.request import CompletionRequest, RequestError
from lakh.server.sequence import Chunk, Sequence
from lakh.server.tools.tool_call import ToolCallDelta
from lakh.workloads.code.formats.gguf_parts import paths_of

__all__ = ["MAX_WAITING", "InProcessBackend"]

MAX_WAITING = 64
CLOSE_S = 5.0  # for the engine's thread
MAX_NEW_CHARS = 512  # tokenized faster (0.2 ms) than handed to a thread and back
FINGERPRINT_ROWS = 256  # rows of the embedding that identify the weights

OnItem = Callable[[CompletionDelta | Usage | Exception | None], None]
"""Receives deltas as they become final, then a Usage and None; or an error."""


class InProcessBackend:
    def __init__(
        self, engine: Engine, *, max_waiting: int = MAX_WAITING, on_death: Callable[[], None] = lambda: None
    ) -> None:
        """Calls `on_death` if the engine can make no further step; `died` then says why."""
        self.engine = engine
        self.description = f"{engine.name} ({engine.spec.parameters:,} parameters, {engine.device})"
        self._registry = MetricsRegistry(PREFIX)
        engine.observe(EngineMetrics(self._registry))
        self._registry.collect_from(self._engine_families)
        self.thread = EngineThread(engine, max_waiting, on_death)
        self.encoders = EncoderThreads()
        self._encoding: list[Share] = []  # of completions whose text waits for an encoder thread; they count as waiting
        self._fingerprint = lru_cache(1)(lambda version: f"{_fingerprint(engine)}-{version}")

    @property
    def num_running(self) -> int:
        return self.thread.num_running

    @property
    def num_waiting(self) -> int:
        return self.thread.num_waiting + len(self._encoding)

    def models(self) -> list[ModelCard]:
        engine = self.engine
        if self.health().problem is not None:
            return []
        weights = self._fingerprint(engine.weights_version)
        has_fim = engine.tokenizer.fim is not None
        template = engine.prompts.chat_template
        has_tools = template is not None and template.takes_tools and template.tool_form is not None
        abilities: dict[str, Any] = {"has_fim": has_fim, "has_tools": has_tools, "details": self._details}
        adapters = [
            ModelCard(name, engine.spec.context, f"{weights}-{adapter.digest}", engine.name, **abilities)
            for name, adapter in list(engine.adapters.items())
        ]
        return [ModelCard(engine.name, engine.spec.context, weights, **abilities), *adapters]

    @cached_property
    def _details(self) -> ModelDetails:
        spec, source = self.engine.spec, self.engine.source or ""
        form = "gguf" if source.endswith(".gguf") else "safetensors"
        return ModelDetails(spec.family_name, spec.parameters, self.engine.network.precision, form, _file_bytes(source))

    @property
    def died(self) -> str | None:
        health = self.health()
        return None if health.is_alive else health.problem

    def health(self) -> BackendHealth:
        return self.thread.health()

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionDelta | Usage, None]:
        responses = ResponseQueue(response_timeout_s(request))
        cancel = await self.submit(request, responses.put)
        try:
            async for item in responses.read():
                yield item
        finally:
            cancel()

    async def submit(self, request: CompletionRequest, on_item: OnItem) -> Callable[[], None]:
        """Start a request. Returns a function that cancels it (no-op once it has finished)."""
        now_s = self.engine.clock()
        try:
            # While a user types, most lines of a request are cached.
            seqs = make_sequences(self.engine, request, now_s, MAX_NEW_CHARS)
        except TooMuchNewText:
            seqs = await self._encode_in_thread(request, now_s)
        job = EngineJob(seqs, _JobListener(self, request, seqs, on_item), request.supersede)
        self.thread.submit(job)
        return lambda: self.thread.cancel(job)

    async def _encode_in_thread(self, request: CompletionRequest, now_s: float) -> list[Sequence]:
        self.thread.check_room(request.share, request.supersede, self._encoding)
        self._encoding += [request.share] * request.num_choices
        try:
            encode = partial(make_sequences, self.engine, request, now_s)
            return await asyncio.wrap_future(self.encoders.submit(request.share, encode))
        finally:
            for _ in range(request.num_choices):
                self._encoding.remove(request.share)

    def metric_families(self) -> list[MetricFamily]:
        return self._registry.families()

    def _engine_families(self) -> list[MetricFamily]:
        counters, pool = self.engine.counters, self.engine.pool
        return [
            gauge("kv_cache_usage_perc", "Share of KV-cache blocks in use.", pool.num_used / pool.num_blocks),
            gauge("oldest_waiting_seconds", "How long the oldest waiting sequence has waited.", self._oldest_s()),
            gauge("kv_cache_blocks_held", "KV-cache blocks held by running sequences.", pool.num_used),
            counter("prefix_cache_queries_total", "Prompt tokens looked up.", counters.prompt_tokens),
            counter("prefix_cache_hits_total", "Prompt tokens found.", counters.cached_tokens),
            counter("num_preemptions_total", "Preempted sequences.", counters.preempted_seqs),
            counter(
                "steps_without_cuda_graph_total",
                "Steps on the generic path of a GPU, which is slow.",
                self.engine.runner.steps_without_graph,
                "reason",
            ),
            counter("requests_superseded_total", "Superseded requests.", self.thread.num_superseded),
            counter("spec_decode_num_drafts_total", "Sequence steps with draft tokens.", counters.drafts),
            counter("spec_decode_num_draft_tokens_total", "Draft tokens.", counters.draft_tokens),
            counter("spec_decode_num_accepted_tokens_total", "Accepted draft tokens.", counters.accepted_tokens),
            gauge("engine_process_id", "Id of the engine's process.", os.getpid()),
            gauge("engine_resident_memory_bytes", "Memory of the engine's process.", _resident_bytes()),
            counter("engine_cpu_seconds_total", "CPU time of the engine's process.", time.process_time()),
            gauge("weights_version", "Number of weight swaps.", self.engine.weights_version),
        ]

    def _oldest_s(self) -> float:
        waiting = list(self.engine.scheduler.waiting)
        return max((self.engine.clock() - seq.arrived_s for seq in waiting), default=0.0)

    async def load_adapter(self, name: str, folder: str) -> None:
        await asyncio.to_thread(self.engine.load_adapter, name, folder)

    async def unload_adapter(self, name: str) -> None:
        self.engine.unload_adapter(name)

    async def start(self) -> None:
        """The thread runs from the beginning."""

    async def drain(self, timeout_s: float) -> None:
        await self.thread.drain(timeout_s)

    async def close(self) -> None:
        self.encoders.close()
        await asyncio.to_thread(self.thread.close, CLOSE_S)


class _JobListener:
    """Translates a job's updates into a backend's items."""

    def __init__(
        self, backend: InProcessBackend, request: CompletionRequest, seqs: list[Sequence], on_item: OnItem
    ) -> None:
        self._backend, self._engine, self._request = backend, backend.engine, request
        self._seqs, self._on_item = seqs[:: request.n], on_item
        self._all_seqs = seqs
        self._texts = TokenTexts(backend.engine.tokenizer)
        self._text_offsets: dict[int, int] = {}
        self._num_tokens = 0
        parsers = (make_answer_parser(backend.engine, request) for _ in seqs)
        self._parsers = [parser for parser in parsers if parser is not None]

    def __call__(self, update: JobUpdate) -> None:
        if update is None:
            prompt_tokens = sum(len(seq.prompt) for seq in self._seqs)
            usage = Usage(
                prompt_tokens,
                self._num_tokens,
                sum(seq.num_cached for seq in self._seqs),
                draft_tokens=sum(seq.num_drafted for seq in self._all_seqs),
                accepted_tokens=sum(seq.num_accepted for seq in self._all_seqs),
                phases=_phases(self._seqs, self._engine.clock()),
                weights=self._weights(),
            )
            self._on_item(usage)
            self._on_item(None)
        elif isinstance(update, Exception):
            self._on_item(update)
        else:
            index, chunk = update
            self._num_tokens += len(chunk.tokens)
            self._on_item(self._delta(index, chunk))

    def _delta(self, index: int, chunk: Chunk) -> CompletionDelta | RequestError:
        request, texts = self._request, self._texts
        text, reason, tokens, accepted = chunk.text, chunk.finish_reason, chunk.tokens, chunk.num_accepted
        calls: tuple[ToolCallDelta, ...] = ()
        reasoning = ""
        if self._parsers:
            parser = self._parsers[index]
            text, calls, reasoning = parser.push(text, is_final=reason is not None)
        logprobs: dict[str, Any] | None = None
        of_prompt: list[dict[str, Any] | None] | None = None
        prompt_ids: tuple[int, ...] | None = None
        if index not in self._text_offsets:  # the first of its choice
            self._text_offsets[index] = 0
            prompt_ids = self._all_seqs[index].prompt if request.return_token_ids else None
            found = chunk.prompt_logprobs
            if found is None and request.sampling.prompt_logprobs is not None:
                message = "the time was over before the prompt had its log-probabilities"
                return RequestError(None, message, status=408, code="timeout")
            if request.echo:
                prompt, ids = request.prompts[index // request.n], self._all_seqs[index].prompt
                echoed = EchoedPrompt(texts, prompt, ids, parse_special=request.parse_special)
                text, self._text_offsets[index] = echoed.text + text, len(echoed.text)
                if request.sampling.logprobs is not None and found is not None:
                    logprobs = echoed.logprobs(found)
            if request.prompt_logprobs is not None and found is not None:
                of_prompt = vllm_prompt_logprobs(texts, found, request.prompt_logprobs)
        if chunk.logprobs is not None:
            new = openai_logprobs(texts, chunk.logprobs, self._text_offsets[index])
            self._text_offsets[index] += len(chunk.text)
            logprobs = new if logprobs is None else {name: values + new[name] for name, values in logprobs.items()}
        shown_reason = "tool_calls" if reason == "stop" and self._parsers and parser.has_calls else reason
        return CompletionDelta(
            index,
            text,
            shown_reason,
            tokens,
            logprobs,
            accepted,
            of_prompt,
            prompt_ids,
            calls,
            chunk.stop_reason,
            reasoning,
        )

    def _weights(self) -> str:
        version = self._engine.weights_version
        if any(seq.has_mixed_weights or seq.weights_version != version for seq in self._all_seqs):
            return ""  # also where a swap came since: which weights they were is not known any more
        name = self._request.model or self._engine.name
        return next((card.weights for card in self._backend.models() if card.id == name), "")


def _phases(seqs: Iterable[Sequence], finished_s: float) -> PhaseTimes | None:
    """Of the sequence that started first; None if none got a token."""
    known = [(seq.started_s, seq.first_token_s, seq.arrived_s) for seq in seqs if seq.started_s is not None]
    if not known:
        return None
    started_s, first_s, arrived_s = min(known, key=lambda one: one[0])
    if first_s is None:
        return None
    return PhaseTimes(started_s - arrived_s, first_s - started_s, finished_s - first_s)


def _fingerprint(engine: Engine) -> str:
    """Identifies the weights by their norms and a sample of the embedding: training changes both."""
    network = engine.network
    step = max(engine.spec.vocab // FINGERPRINT_ROWS, 1)
    digest = hashlib.sha256(repr(engine.spec).encode())
    for tensor in (network.norms, network.head_norms, network.embedding(range(0, engine.spec.vocab, step))):
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _file_bytes(source: str) -> int:
    """Of a GGUF file or of a folder's safetensors files; 0 for anything else."""
    path = Path(source)
    files = paths_of(path) if path.suffix == ".gguf" else list(path.glob("*.safetensors")) if source else []
    try:
        return sum(file.stat().st_size for file in files)
    except OSError:
        return 0


def _resident_bytes() -> int:
    """Memory of this process; 0 where the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
