"""The inference engine: prompts in, completions out, for one model in one process.

A request becomes a `Sequence` (sequence.py). `step` schedules the running sequences (scheduler.py), runs the model,
samples (sampler.py) and postprocesses. On a GPU, greedy sequences decode ahead of what the host has read while no
request waits (decode_ahead.py). `generate` and `stream` step until their own sequences finish; a server steps
continuously (backends/engine_thread.py) and submits sequences between steps; offline.py completes many prompts at once.

A sequence's tokens depend only on its own logits and random numbers: alone, in a batch, from a cached prefix, in chunks
or with draft tokens it gets the same completion, up to ties. Sums of other shapes round differently, by about 1e-5 of a
logit in float32 and 1e-2 in bfloat16, so two closer tokens may swap (once in some millions of tokens in float32);
quantized weights on a CPU give the same bits (model/cpu/decoder.py). With a draft model, a sequence that samples
without a seed gets another completion of the same distribution. Ids that the tokenizer does not have (a padded
embedding table has some) are never sampled.

New weights (`swap`) preempt all sequences, which are then recomputed, and clear the prefix cache.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as ListOf
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lakh.compute_threads import ComputeThreads
from lakh.errors import DataError, UserError
from lakh.server.decode_ahead import DecodeAhead
from lakh.server.detokenizer import Detokenizer, DetokenizerStream
from lakh.server.fairness import Share
from lakh.server.metrics import EngineCounters, EngineMetrics
from lakh.server.model import weights as model_weights
from lakh.server.model.adapters import ServedAdapter
from lakh.server.model.inference import InferenceModel, Precision, can_keep_stored
from lakh.server.model.runner import KvDtype, Runner
from lakh.server.prompts.chat_template import ChatTemplate
from lakh.server.prompts.encoder import Prompt, PromptEncoder
from lakh.server.prompts.token_healing import RepeatedText
from lakh.server.sampler import SampledSequence, sample_batch
from lakh.server.sampling.logits_processor import LogitsProcessor, check_token_ids
from lakh.server.sampling.prompt_logprobs import PromptLogprobs
from lakh.server.sampling.tokens import NoiseKeys, SamplingParams
from lakh.server.scheduler import (
    MIN_PROMPT_TOKENS,
    ScheduledSequence,
    Scheduler,
    prompt_tokens_within,
    steps_between_proposals,
)
from lakh.server.sequence import Chunk, Completion, FinishReason, Sequence
from lakh.server.speculation.proposer import Proposer, load_draft_model
from lakh.server.stopping import TextEnd
from lakh.server.structured.grammar import GrammarCompiler
from lakh.spec.model import Model
from lakh.workloads.code.adapters import require_base

if TYPE_CHECKING:
    from lakh.server.model.tensor_parallel import TensorParallelGroup
    from lakh.tokens.tokenizer import Tokenizer

__all__ = ["Chunk", "Completion", "Engine", "EngineCounters", "FinishReason", "Prompt", "SamplingParams", "Sequence"]

STEP_TOKENS = {"cpu": 256, "cuda": 2048}  # per step: bounds how long decoding waits for a long prompt
STEP_S = 0.2  # of a CPU's step beside decoding sequences, which wait for its prompts
FIRST_PROMPT_TOKENS = 64  # of such a step, before any was measured
MAX_SEQS = {"cpu": 32, "cuda": 128}
FINISH_S = 1.0  # for running sequences before a swap of weights; others wait meanwhile
FINISH_POLL_S = 0.002
LAST_IDS = 8  # of a prompt, which show whether it has text: special tokens have none

Speculation = Literal["lookup", "off"]


class Engine:
    def __init__(
        self,
        name: str,
        spec: Model,
        weights: Mapping[str, Tensor],
        tokenizer: Tokenizer,
        *,
        device: torch.device | str | None = None,
        precision: Precision | None = None,
        cache_tokens: int | None = None,
        speculation: Speculation = "off",
        draft: model_weights.LoadedModel | None = None,
        team: TensorParallelGroup | None = None,
        kv_dtype: KvDtype = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Uses the GPU in bfloat16 if there is one, else the CPU in float32, or with the integers of a quantized GGUF
        file. A `draft` (a smaller model with the same
        tokenizer) proposes draft tokens in addition to prompt lookup, or alone if `speculation` is "off".
        """
        self.name, self.spec, self.tokenizer = name, spec, tokenizer
        if tokenizer.vocab_size > spec.vocab:
            found = f"has {tokenizer.vocab_size} tokens and the model {spec.vocab}"
            raise UserError("tokenizer", found, "use the tokenizer that the model was trained with")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if precision is None and team is None and can_keep_stored(spec, weights, self.device):
            precision = "stored"
        precision = precision or ("bf16" if self.device.type == "cuda" else "f32")
        self.is_asynchronous = self.device.type != "cpu"
        """Steps are computed while this process does something else."""
        num_ids = tokenizer.vocab_size
        try:
            self.runner = Runner(
                spec,
                weights,
                num_ids,
                device=self.device,
                precision=precision,
                cache_tokens=cache_tokens,
                team=team,
                kv_dtype=kv_dtype,
            )
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):
                raise
            found = f"does not fit into this machine's memory with a context of {spec.context:,} tokens"
            todo = "lower --max-model-len, or use --kv-cache-dtype int8, --precision int4 or a smaller model"
            raise UserError(name, found, todo) from None
        self.network, self.pool, self.cache = self.runner.network, self.runner.pool, self.runner.cache
        _check_finite(name, self.network)
        self.speculation: Speculation = speculation
        self._draft_model = None if draft is None else load_draft_model(self.runner, tokenizer, draft)
        uses_lookup = speculation == "lookup"
        self._proposer: Proposer | None = None
        if uses_lookup or self._draft_model is not None:
            self._proposer = Proposer(spec.context, clock, self._draft_model, uses_lookup=uses_lookup)
        self.prompts, self._detokenizer = PromptEncoder(tokenizer, spec), Detokenizer(tokenizer)
        self._grammars = GrammarCompiler(tokenizer)
        self.source: str | None = None
        """The MODEL that was loaded, to check that adapters belong to it."""
        self.adapters: dict[str, ServedAdapter] = {}
        """By name; requests choose one."""
        self.weights_version = 0
        self.has_own_thread = False
        """A thread steps it (backends/engine_thread.py)."""
        self._starts_none = False
        self.compute_threads: ComputeThreads | None = None
        """Chooses fewer CPU threads beside other busy processes; None: their number stays."""
        self.counters = EngineCounters()
        self.clock = clock
        self.step_tokens, self.max_seqs = STEP_TOKENS[self.device.type], MAX_SEQS[self.device.type]
        self._prompt_tokens = FIRST_PROMPT_TOKENS
        # No reference back to the engine: dropping it frees its memory at once.
        on_release = (lambda seq: None) if self._proposer is None else self._proposer.release
        self.scheduler = Scheduler(self.runner, self.counters, clock, on_release)
        self._decode_ahead: DecodeAhead | None = None
        self._lock = threading.RLock()

    @staticmethod
    def load(
        path: str,
        *,
        precision: Precision | None = None,
        speculation: Speculation = "off",
        draft: str | None = None,
        cache_tokens: int | None = None,
        tensor: int = 1,
        kv_dtype: KvDtype = "auto",
        max_model_len: int | None = None,
    ) -> Engine:
        """Load a run folder (its newest checkpoint), a checkpoint folder or a Hugging Face directory.

        `draft` is a smaller model with the same tokenizer. `tensor` > 1 splits the model over that many processes of
        this machine; `close` ends them. `max_model_len` is the longest prompt with its completion, at most the
        model's context.
        """
        from lakh.tokens.tokenizer import Tokenizer

        loaded = model_weights.read(path)
        spec = loaded.spec
        if max_model_len is not None:
            if max_model_len > spec.context:
                found = f"{max_model_len} is more than the model's context of {spec.context} tokens"
                raise UserError("--max-model-len", found, f"give at most {spec.context}")
            spec = dataclasses.replace(spec, context=max_model_len)
        tokenizer = Tokenizer.load(loaded.tokenizer_json)
        team = None
        if tensor > 1:
            from lakh.server.model import tensor_parallel

            team = tensor_parallel.start(path, size=tensor, precision=precision)
        engine = Engine(
            loaded.name,
            spec,
            loaded.weights,
            tokenizer,
            precision=precision,
            speculation=speculation,
            draft=None if draft is None else model_weights.read(draft),
            cache_tokens=cache_tokens,
            team=team,
            kv_dtype=kv_dtype,
        )
        folders = (loaded.source, str(loaded.tokenizer_json.parent))  # a GGUF file and a base bring the template along
        engine.prompts.chat_template = next(filter(None, map(ChatTemplate.load, folders)), None)
        engine.source = path
        return engine

    def generate(
        self,
        prompts: ListOf[Prompt],
        sampling: SamplingParams | ListOf[SamplingParams],
        *,
        progress: Callable[[int], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> list[Completion]:
        """Complete every prompt, with one SamplingParams for all or one for each. Calls `progress` with the number of
        finished completions.

        A prompt that leaves no room for max_tokens in the context loses its beginning: the last context - max_tokens
        tokens stay, at least half the context; the completion then ends with "length" at the end of the context.
        Copies of a prompt get different random numbers; the first copy gets what it would get alone. When `cancelled`
        returns True, unfinished completions end with "abort".
        """
        seqs = self.make_sequences(prompts, sampling)
        # Longest first: they finish last, and running out of memory shows at once.
        self.submit(*sorted(seqs, key=lambda seq: len(seq.prompt) + seq.max_new_tokens, reverse=True))
        done = 0
        self.scheduler.prompts_first = True
        try:
            while any(seq.finish_reason is None for seq in seqs):
                self.step()
                finished = sum(seq.finish_reason is not None for seq in seqs)
                if progress is not None and finished > done:
                    progress(finished)
                done = finished
                if cancelled():
                    break
        finally:
            self.scheduler.prompts_first = False
            self.abort(*seqs)
        return [seq.completion() for seq in seqs]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams, *, cancelled: Callable[[], bool] = lambda: False, copy: int = 0
    ) -> Iterator[Chunk]:
        """The completion that `generate` gives copy number `copy` of this prompt, in chunks as its text becomes final.

        No chunk holds half a character or the start of a stop string. The last one has the finish reason.
        """
        seq = self.make_sequence(
            self.prompts.truncate(self.prompts.encode_prompt(prompt), sampling.max_tokens), sampling, copy=copy
        )
        self.submit(seq)
        try:
            while seq.finish_reason is None:
                if seq not in self.step():
                    continue
                if cancelled():
                    self.abort(seq)
                chunk = seq.take_chunk()
                if chunk is not None:
                    yield chunk
        finally:
            self.abort(seq)

    # --- sequences ---

    def make_sequences(
        self, prompts: ListOf[Prompt], sampling: SamplingParams | ListOf[SamplingParams]
    ) -> list[Sequence]:
        """One sequence per prompt, not yet submitted; copies of a prompt differ in their random numbers."""
        samplings = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        copies: Counter[tuple[tuple[int, ...], SamplingParams]] = Counter()
        encoded: dict[tuple[Prompt, int], tuple[int, ...]] = {}
        seqs = []
        for prompt, each in zip(prompts, samplings, strict=True):
            key = prompt if isinstance(prompt, str) else tuple(prompt), each.max_tokens
            if key not in encoded:
                encoded[key] = self.prompts.truncate(self.prompts.encode_prompt(prompt), each.max_tokens)
            ids = encoded[key]
            seqs.append(self.make_sequence(ids, each, copy=copies[ids, each]))
            copies[ids, each] += 1
        return seqs

    def make_sequence(
        self,
        ids: tuple[int, ...],
        sampling: SamplingParams,
        *,
        copy: int = 0,
        cache_space: str = "",
        deadline_s: float | None = None,
        generation_s: float | None = None,
        stop_rules: tuple[TextEnd, ...] = (),
        repeated: RepeatedText | None = None,
        tenant: str = "",
        adapter: ServedAdapter | None = None,
        continues_text: bool = True,
        is_file: bool = False,
        prompt_logprobs: PromptLogprobs | None = None,
        shown: Mapping[int, str] | None = None,
        processor: LogitsProcessor | None = None,
    ) -> Sequence:
        """A sequence that is not yet submitted. `repeated` is what the completion repeats first (token healing).
        `continues_text`: it goes on where the text of the prompt ends; False for an answer in a chat. `is_file`: the
        prompt is part of a file, whose end ends the completion; fill-in-the-middle tokens in it imply that.
        `prompt_logprobs`: those that another copy of the prompt computes too. `shown`: special tokens that have a text.
        `processor`: that of another copy, as `make_processor` gives it.
        """
        form, context = sampling.structured_outputs, self.tokenizer.continuation_context
        check_token_ids(sampling, self.tokenizer.vocab_size)
        is_file = is_file or (self.tokenizer.fim is not None and self.tokenizer.fim.suffix in ids)
        if sampling.prompt_logprobs is not None and prompt_logprobs is None:
            prompt_logprobs = PromptLogprobs(ids, sampling.prompt_logprobs)
        if context and not (continues_text and (repeated or self.tokenizer.decode(ids[-LAST_IDS:]))):
            context = ()
        return Sequence(
            ids,
            sampling,
            min(sampling.max_tokens, self.spec.context - len(ids)),
            NoiseKeys(sampling, copy),
            self.tokenizer.file_end_ids if is_file else self.tokenizer.end_ids,
            DetokenizerStream(self._detokenizer, "" if repeated is None else repeated.text, context, shown),
            cache_space,
            deadline_s,
            generation_s,
            stop_rules,
            repeated,
            tenant,
            None if form is None else self._grammars.matcher(form, cache_space),
            adapter,
            prompt_logprobs,
            processor or self.make_processor(sampling),
        )

    def make_processor(self, sampling: SamplingParams) -> LogitsProcessor | None:
        """None if nothing changes the logits. Tokenizes the bad words, which may take a second."""
        return LogitsProcessor(sampling, self.tokenizer) if sampling.restricts_ids else None

    def submit(self, *seqs: Sequence) -> None:
        """Add sequences to the waiting queue; `step` starts them."""
        with self._lock:
            self.scheduler.submit(seqs)

    def abort(self, *seqs: Sequence) -> None:
        """Finish these sequences and free their blocks now. No-op for finished ones."""
        with self._lock:
            self.scheduler.abort(seqs)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    def waiting_shares(self) -> list[Share]:
        """The shares of the waiting sequences. Does not wait for a step."""
        return [seq.share for seq in list(self.scheduler.waiting)]

    def observe(self, observer: EngineMetrics) -> None:
        """Report every step and every completion to `observer`."""
        self.scheduler.observer = observer

    # --- weights ---

    def load_adapter(self, name: str, folder: str) -> None:
        """Serve a LoRA adapter under a name; one of the same name is replaced, and running sequences keep theirs."""
        if name == self.name:
            raise UserError(f"adapter {name}", "has the name of the model", "choose another name")
        adapter, base_sha256 = self.network.read_adapter(name, folder)
        if base_sha256 and self.source is not None and self.network.precision != "stored":
            require_base(folder, self.source, model_weights.read(self.source).weights, base_sha256)
        self.adapters[name] = adapter

    def unload_adapter(self, name: str) -> None:
        """Running sequences keep it until they finish."""
        if self.adapters.pop(name, None) is None:
            known = ", ".join(self.adapters) or "none is"
            raise UserError(f"adapter {name}", "is not loaded", f"choose from: {known}")

    def stage(self) -> InferenceModel:
        """Memory for new weights beside the current ones: `put` every tensor there, `finish`, then `swap`."""
        if self.network.shard.size > 1:
            found = "cannot be replaced in a tensor-parallel engine"
            raise UserError("weights", found, "restart the engine with the new weights")
        return self.network.empty_like()

    def swap(self, weights: Mapping[str, Tensor] | InferenceModel) -> int:
        """Use these weights from one step on; a staged network swaps without a pause for reading.

        Running sequences finish before it while others wait, for at most FINISH_S: their texts are of one version. Then
        preempts the rest, which go on with the new weights, and clears the prefix cache. Returns the new version.
        Raises a DataError and changes nothing if a weight is not a number.
        """
        if isinstance(weights, InferenceModel):
            staged = weights
        else:
            staged = self.stage()
            staged.load(weights)
        _check_finite("new weights", staged)
        until_s = time.monotonic() + FINISH_S
        self._starts_none = self.has_own_thread  # else the caller is who steps, and cannot wait for itself
        try:
            while True:
                with self._lock:  # no sequence starts between the look and the swap
                    if not (self._starts_none and self.scheduler.running and time.monotonic() < until_s):
                        return self._swap(staged)
                time.sleep(FINISH_POLL_S)
        finally:
            self._starts_none = False

    def _swap(self, staged: InferenceModel) -> int:
        self._decode_ahead = None
        self.scheduler.preempt_all()
        self.pool.reset()
        self.network.swap_weights(staged)
        if self.compute_threads is not None:  # loading set the number of its own thread
            self.network.use_threads(self.compute_threads.count)
        self.weights_version += 1
        return self.weights_version

    def close(self) -> None:
        """End the tensor-parallel processes, if any."""
        self.runner.close()

    def warm_up(self) -> None:
        """Compile kernels and capture CUDA graphs now, so that the first requests do not wait for them."""
        self.runner.warm_up()
        if self._proposer is not None:
            self._proposer.warm_up()
        self.generate([(0,)] * 2, SamplingParams(max_tokens=3))

    def share_cores(self) -> None:
        """Compute with fewer threads beside other busy processes. For the thread that runs the steps, between two."""
        count = None if self.compute_threads is None else self.compute_threads.adjust()
        if count is not None:
            torch.set_num_threads(count)
            self.network.use_threads(count)

    # --- a step ---

    @torch.inference_mode()
    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[Sequence]:
        """Advance the running sequences; returns those with new tokens and those that finished.

        Calls `meanwhile` while a GPU computes (`is_asynchronous`), if there is something to compute.
        """
        with self._lock:
            expired = self.scheduler.abort_expired()
            batch = self._schedule()
            if self._decode_ahead is not None:
                return expired + self._run_decode_ahead(self._decode_ahead, meanwhile)
            if not batch:
                return expired
            began_s = self.clock()
            step = self.runner.launch([work.segment for work in batch])
            if self.is_asynchronous:
                meanwhile()
            sampled = sample_batch(batch, step)
            return expired + self._postprocess(batch, sampled, began_s)

    def _schedule(self) -> list[ScheduledSequence]:
        """The batch of this step; empty if there is no work, or if a decode-ahead is in progress or starts now."""
        if self._decode_ahead is not None and not self._decode_ahead.is_done:
            return []
        if not self._starts_none:
            self.scheduler.admit(self.max_seqs, self.weights_version)
        drafts = {} if self._proposer is None else self._proposer.propose(self.scheduler.running)
        self._decode_ahead = None
        if not drafts and self.runner.decoder is not None:
            began_s = self.clock()
            max_steps = None
            if self._proposer is not None and self.num_running:
                max_steps = steps_between_proposals(self.num_running)
            self._decode_ahead = DecodeAhead.start(self.scheduler, self.runner.decoder, self.spec.context, max_steps)
            if self._decode_ahead is not None:
                self._decode_ahead.spent_s = self.clock() - began_s
        return [] if self._decode_ahead is not None else self.scheduler.schedule(drafts, self._token_budget())

    def _token_budget(self) -> int:
        """Tokens of this step: in a server on a CPU fewer beside decoding sequences, as many as take STEP_S."""
        num_decoding = sum(seq.num_pending == 1 for seq in self.scheduler.running)
        if self.is_asynchronous or not self.has_own_thread or not num_decoding:
            return self.step_tokens
        return min(self.step_tokens, num_decoding + self._prompt_tokens)

    def _postprocess(
        self, batch: list[ScheduledSequence], sampled: list[SampledSequence], began_s: float
    ) -> list[Sequence]:
        counters, num_tokens = self.counters, 0
        for (seq, segment, draft, _), result in zip(batch, sampled, strict=True):
            num_tokens += len(segment.tokens)
            counters.generated_tokens += result.num_new_tokens
            if draft.tokens and self._proposer is not None:
                self._proposer.record_acceptance(seq, len(draft.tokens), result.num_accepted)
                seq.num_drafted += len(draft.tokens)
                seq.num_accepted += result.num_accepted
                counters.drafts += 1
                counters.draft_tokens += len(draft.tokens)
                counters.accepted_tokens += result.num_accepted
            self.scheduler.finish_step(seq)
        if max(len(work.segment.tokens) for work in batch) >= MIN_PROMPT_TOKENS // 2:
            self._prompt_tokens = prompt_tokens_within(STEP_S, self.clock() - began_s, num_tokens)
        counters.steps += 1
        counters.computed_tokens += num_tokens
        if self.scheduler.observer is not None:
            self.scheduler.observer.observe_step(num_tokens)
        if self._proposer is not None and all(work.segment.start for work in batch):
            self._proposer.record_step(num_tokens, self.clock() - began_s)
        pairs = zip(batch, sampled, strict=True)
        return [work.seq for work, result in pairs if result.num_new_tokens or work.seq.finish_reason is not None]

    def _run_decode_ahead(self, decode_ahead: DecodeAhead, meanwhile: Callable[[], None]) -> list[Sequence]:
        began_s = self.clock()
        seqs = [seq for seq in decode_ahead.seqs if seq.finish_reason is None]
        try:
            launched = 0 if self.scheduler.waiting else decode_ahead.launch()
            if self.is_asynchronous:
                meanwhile()
            self.counters.generated_tokens += decode_ahead.read()
        except BaseException:  # also an interrupt: tokens already read stay, the rest is recomputed
            self._decode_ahead = None
            raise
        finally:
            for seq in seqs:
                self.scheduler.finish_step(seq)
        num_seqs = len(decode_ahead.seqs)
        self.counters.steps += launched
        self.counters.computed_tokens += launched * num_seqs
        if self.scheduler.observer is not None:
            for _ in range(launched):
                self.scheduler.observer.observe_step(num_seqs)
        decode_ahead.spent_s += self.clock() - began_s
        if decode_ahead.is_done:
            self._decode_ahead = None
            if self._proposer is not None:  # the baseline that draft tokens must beat
                self._proposer.record_step(num_seqs, decode_ahead.spent_s / decode_ahead.num_read)
        return seqs


def _check_finite(where: str, network: InferenceModel) -> None:
    if not network.has_finite_weights():
        raise DataError(where, "has weights that are NaN or infinite", "serve an earlier checkpoint")
