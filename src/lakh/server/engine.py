"""The engine: prompts in, completions out, for one model in one process.

A request becomes a Row (row.py). `step` is the whole of it: let waiting rows in, share the step's tokens among rows
(schedule.py), find room for them (blocks.py), compute (network.py), draw (sampling.py), and give back the blocks of
rows that ended. `generate` and `stream` step until their own rows are done; a server steps all the time (worker.py)
and adds rows between steps.

Whatever the batch, a row's own scores and random numbers decide its tokens: alone, among others, from a cached
prefix, in chunks, or with guesses (speculate.py), a request gets the same answer (in float32; in bfloat16 sums of
other shapes may round differently). Ids that the tokenizer does not know (a padded embedding table has some) are
never chosen.

When blocks run out the youngest row gives its blocks back and is computed again later. New weights (`swap`) do the
same to all rows and forget every remembered prefix. Knows a model, a tokenizer and a clock; knows nothing of HTTP.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lakh.errors import ConfigError, UserError
from lakh.server import fim
from lakh.server import weights as model_weights
from lakh.server.blocks import BLOCK_TOKENS, BlockPool
from lakh.server.kv import PagedCache
from lakh.server.network import Network, Precision, Segment
from lakh.server.row import Chunk, Completion, FinishReason, Row
from lakh.server.sampling import Draws, Sampling, choose, log_probabilities
from lakh.server.schedule import share_budget
from lakh.server.speculate import MAX_GUESSES, RETRY_EVERY, Costs, Lookup, Record, decide
from lakh.server.text import StopRule, TextStream
from lakh.spec.model import Model

if TYPE_CHECKING:
    from lakh.server.decode_gpu import Decoder
    from lakh.tokens.tokenizer import Tokenizer

__all__ = ["Chunk", "Completion", "Counts", "Engine", "FinishReason", "Prompt", "Sampling"]

STEP_TOKENS = {"cpu": 256, "cuda": 4096}  # of one step: bounds how long rows that draw wait for a long prompt
MAX_ROWS = {"cpu": 32, "cuda": 128}
CACHE_TOKENS = 64 * 1024
CACHE_BYTES = {"cpu": 2 << 30, "cuda": 24 << 30}
TRICKLE = 4  # prompt tokens that ride along with rows that draw, on the GPU
BURST = 8  # greedy steps on the GPU before their tokens are read (decode_gpu.BURST)

Prompt = str | Sequence[int]
"""Text, or ids for what text cannot say: special tokens stand in no text (see `Engine.infill`)."""
Speculation = Literal["lookup", "off"]


@dataclass
class Counts:
    """What an engine did since it was made."""

    steps: int = 0
    prompt_tokens: int = 0
    """Of rows that were let in."""
    cached_tokens: int = 0
    """Of these, found in the cache."""
    computed_tokens: int = 0
    """That went through the network: prompts, drawn tokens and guesses."""
    drawn_tokens: int = 0
    drafted_tokens: int = 0
    kept_tokens: int = 0
    preempted_rows: int = 0
    aborted_rows: int = 0


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """By default on the GPU in bfloat16 where there is one, else on the CPU in float32."""
        self.name, self.spec, self.tokenizer = name, spec, tokenizer
        if tokenizer.vocab_size > spec.vocab:
            found = f"has {tokenizer.vocab_size} tokens and the model {spec.vocab}"
            raise UserError("tokenizer", found, "use the tokenizer that the model was trained with")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        precision = precision or ("bf16" if self.device.type == "cuda" else "f32")
        self.network = Network(spec, weights, tokenizer.vocab_size, self.device, precision)
        num_blocks = _num_blocks(spec, self.device, self.network.dtype, cache_tokens)
        self.pool = BlockPool(num_blocks)
        # One block more than the pool has: empty places of a GPU batch write there.
        self.cache = PagedCache(spec, num_blocks + 1, device=self.device, dtype=self.network.dtype)
        self._decoder = _decoder(self.network, self.cache)
        self._trickle = 1 if self._decoder is None else TRICKLE
        self.speculation = speculation
        self.weights_version = 0
        self.counts = Counts()
        self.clock = clock
        self.step_tokens, self.max_rows = STEP_TOKENS[self.device.type], MAX_ROWS[self.device.type]
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        self._lookups: dict[Row, tuple[Lookup, Record]] = {}
        self._costs = Costs()
        self._lock = threading.RLock()

    @staticmethod
    def load(
        path: str,
        *,
        precision: Precision | None = None,
        speculation: Speculation = "off",
        cache_tokens: int | None = None,
    ) -> Engine:
        """The model behind a run's folder (its newest checkpoint), a checkpoint's folder or a Hugging Face
        directory.
        """
        from lakh.tokens.tokenizer import Tokenizer

        loaded = model_weights.read(path)
        tokenizer = Tokenizer.load(loaded.tokenizer_json)
        return Engine(
            loaded.name,
            loaded.spec,
            loaded.weights,
            tokenizer,
            precision=precision,
            speculation=speculation,
            cache_tokens=cache_tokens,
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling],
        *,
        progress: Callable[[int], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> list[Completion]:
        """Complete every prompt; `progress` hears how many are finished so far. One sampling for all, or one for each.

        A prompt that leaves no room for max_tokens in the context loses its beginning: the last context -
        max_tokens tokens stay, and never less than half the context; the completion then ends with "length"
        at the context's end. The same prompt several times draws other random numbers each time; the first
        copy gets what it would alone. Once `cancelled` says so, what is not finished ends with "abort".
        """
        samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        copies: Counter[tuple[tuple[int, ...], Sampling]] = Counter()
        rows = []
        for prompt, each in zip(prompts, samplings, strict=True):
            ids = self.cut(self.encode(prompt), each)
            rows.append(self.row(ids, each, copy=copies[ids, each]))
            copies[ids, each] += 1
        # Longest first: they end last, and if memory does not suffice it shows at once.
        self.submit(*sorted(rows, key=lambda row: len(row.prompt) + row.limit, reverse=True))
        done = 0
        try:
            while any(row.finish_reason is None for row in rows):
                self.step()
                finished = sum(row.finish_reason is not None for row in rows)
                if progress is not None and finished > done:
                    progress(finished)
                done = finished
                if cancelled():
                    break
        finally:
            self.abort(*rows)  # says nothing to those that are finished
        return [row.completion() for row in rows]

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        copy: int = 0,
    ) -> Iterator[Chunk]:
        """The same completion in pieces as they become certain: `generate`'s copy number `copy` of this
        prompt.

        No piece holds half a character or the beginning of a stop text. The last one has the finish reason.
        """
        row = self.row(self.cut(self.encode(prompt), sampling), sampling, copy=copy)
        self.submit(row)
        try:
            while row.finish_reason is None:
                if row not in self.step():
                    continue
                if cancelled():
                    self.abort(row)
                chunk = row.take_chunk()
                if chunk is not None:
                    yield chunk
        finally:
            self.abort(row)

    def infill(self, prefix: str, suffix: str, max_tokens: int, order: fim.Order = "psm") -> tuple[int, ...]:
        """The prompt that asks for what stands between prefix and suffix, with room for max_tokens (fim.py)."""
        before, after = self.encode(prefix), self.encode(suffix, "suffix")
        room = _room(self.spec.context, max_tokens)
        return fim.prompt(self.tokenizer, before, after, room, context=self.spec.context, order=order)

    def encode(self, prompt: Prompt, where: str = "prompt") -> tuple[int, ...]:
        """The ids of a prompt, all of them; a UserError where it is no text or has ids that do not exist."""
        if not isinstance(prompt, str):
            if any(not 0 <= token < self.spec.vocab for token in prompt):
                raise UserError(where, "has ids outside the vocabulary", f"use 0 to {self.spec.vocab - 1}")
            return tuple(prompt)
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError(where, f"has half a character at {error.start}", "send whole Unicode characters") from None
        return tuple(self.tokenizer.encode(prompt))

    def cut(self, ids: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
        """The end of a prompt that leaves room for max_tokens; an empty prompt begins a document."""
        return (ids or (self.tokenizer.eot,))[-_room(self.spec.context, sampling.max_tokens) :]

    # --- rows ---

    def row(
        self,
        ids: tuple[int, ...],
        sampling: Sampling,
        *,
        copy: int = 0,
        tenant: str = "",
        deadline_s: float | None = None,
        rule: StopRule | None = None,
        first_ids: frozenset[int] | None = None,
        skip: str = "",
    ) -> Row:
        """A request, not yet submitted. `tenant` names whose cache it shares; `skip` is text that it repeats first."""
        limit = min(sampling.max_tokens, self.spec.context - len(ids))
        text = TextStream(self.tokenizer.decode, skip)
        draws = Draws(sampling, copy)
        return Row(ids, sampling, limit, draws, self.tokenizer.eot, text, tenant, deadline_s, rule, first_ids)

    def submit(self, *rows: Row) -> None:
        """In the order of arrival; they come to work in `step`."""
        with self._lock:
            self._waiting.extend(rows)

    def abort(self, *rows: Row) -> None:
        """End these rows now, and free their blocks now. Says nothing to rows that have ended."""
        with self._lock:
            for row in rows:
                if row.finish_reason is None:
                    row.finish("abort")
                    self.counts.aborted_rows += 1
                if row in self._running:
                    self._running.remove(row)
                elif row in self._waiting:
                    self._waiting.remove(row)
                self._release(row)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def swap(self, weights: Mapping[str, Tensor]) -> int:
        """From the next step on, these weights. Rows at work are computed again with them; returns the new version."""
        with self._lock:
            while self._running:
                self._preempt(self._running[-1])
            self.pool.forget()
            self.network.load(weights)
            self.weights_version += 1
            return self.weights_version

    # --- a step ---

    def step(self) -> list[Row]:
        """Advance the rows at work; returns those that drew a token or ended."""
        with self._lock:
            changed = self._expire()
            self._admit()
            steps = self._burst_steps()
            if steps:
                return changed + self._burst(steps)
            segments, rows, guesses = self._plan()
            if not segments:
                return changed
            began_s = self.clock()
            logits = self._forward(segments)
            changed += self._draw(rows, segments, guesses, logits)
            num_tokens = sum(len(segment.tokens) for segment in segments)
            self.counts.steps += 1
            self.counts.computed_tokens += num_tokens
            if all(segment.start for segment in segments):  # steps that only draw: what guesses are weighed by
                self._costs.record(num_tokens, self.clock() - began_s)
            return changed

    def _forward(self, segments: Sequence[Segment]) -> Tensor:
        """Scores of the scored tokens; on a GPU the rows that draw go through a captured graph, prompts beside it."""
        if self._decoder is None:
            return self.network.forward(segments, self.cache)
        single = [len(segment.tokens) == 1 for segment in segments]
        parts: dict[bool, Tensor] = {}
        for is_single in set(single):
            some = [segment for segment, one in zip(segments, single, strict=True) if one == is_single]
            if is_single:
                tokens, positions = [segment.tokens[0] for segment in some], [segment.start for segment in some]
                scores = self._decoder.run(tokens, positions, [segment.blocks for segment in some], 1)[1]
                parts[True] = scores[[bool(segment.scored) for segment in some]]
            else:
                parts[False] = self.network.forward(some, self.cache)
        if len(parts) == 1:
            return next(iter(parts.values()))
        taken = {True: 0, False: 0}
        pieces = []
        for segment, one in zip(segments, single, strict=True):
            pieces.append(parts[one][taken[one] : taken[one] + segment.scored].float())
            taken[one] += segment.scored
        return torch.cat(pieces)

    def _burst_steps(self) -> int:
        """Greedy steps that the GPU may take unwatched: none where a row waits, samples or still reads its prompt."""
        rows = self._running
        if self._decoder is None or not rows or self._waiting or self.speculation != "off":
            return 0
        if any(
            row.num_pending != 1 or row.sampling.temperature or row.sampling.logprobs is not None or row.first_ids
            for row in rows
        ):
            return 0
        most = BURST if len(rows) == 1 else BURST // 2  # newcomers wait for the end of a burst
        return min(most, *(row.limit - len(row.tokens) for row in rows))

    def _burst(self, steps: int) -> list[Row]:
        rows = list(self._running)
        for row in rows:
            if row.lease is not None:
                self._make_room(row, row.num_computed + steps)
        rows = [row for row in rows if row.lease is not None]
        assert self._decoder is not None
        blocks = [row.lease.blocks for row in rows if row.lease is not None]
        drawn, _ = self._decoder.run([row.ids[-1] for row in rows], [row.num_computed for row in rows], blocks, steps)
        for row, *tokens in zip(rows, *drawn, strict=True):
            before = len(row.tokens)
            for token in tokens:
                row.push(token)  # says nothing once the row has ended
            self.counts.drawn_tokens += len(row.tokens) - before
            row.num_computed += len(row.tokens) - before
            self._settle(row)
        self.counts.steps += steps
        self.counts.computed_tokens += steps * len(rows)
        return rows

    def warm_up(self) -> None:
        """Compile kernels and capture graphs now, so that the first requests do not wait for it."""
        if self._decoder is not None:  # prompts too: whole, and after a cached beginning
            for length in (self.spec.context // 4, self.spec.context // 2):
                self.generate([(self.tokenizer.eot,) * length], Sampling(max_tokens=1))
        rows = 1
        while True:
            self.generate([(self.tokenizer.eot,)] * rows, Sampling(max_tokens=3))
            if self._decoder is None or rows >= min(self.max_rows, self._decoder.max_rows):
                return
            rows *= 2

    def _expire(self) -> list[Row]:
        now_s = self.clock()
        late = [
            row for row in (*self._waiting, *self._running) if row.deadline_s is not None and row.deadline_s < now_s
        ]
        self.abort(*late)
        return late

    def _admit(self) -> None:
        """Let rows in while there is room for their prompts. One prompt many times is computed once, then shared."""
        computing = {row.prompt for row in self._running if row.num_pending > 1}
        held_back: list[Row] = []
        while self._waiting and len(self._running) < self.max_rows:
            row = self._waiting[0]
            if len(row.ids) // BLOCK_TOKENS + 2 > self.pool.num_available and self._running:
                break
            self._waiting.popleft()
            if row.prompt in computing and len(row.prompt) > BLOCK_TOKENS:
                held_back.append(row)
                continue
            row.lease = self.pool.open((row.space, self.weights_version), row.ids)
            if row.lease.copy is not None:
                self.cache.copy_block(*row.lease.copy)
            row.num_computed = row.lease.num_cached
            if not row.tokens:
                row.num_cached = row.lease.num_cached
                self.counts.prompt_tokens += len(row.prompt)
                self.counts.cached_tokens += row.num_cached
            if row.num_pending > 1:
                computing.add(row.prompt)
            self._running.append(row)
        self._waiting.extendleft(reversed(held_back))

    def _plan(self) -> tuple[list[Segment], list[Row], list[list[int]]]:
        """What every row brings to this step, with room for it; the youngest rows give way where there is none."""
        counts = share_budget([row.num_pending for row in self._running], self.step_tokens, self._trickle).counts
        work = [(row, count) for row, count in zip(self._running, counts, strict=True) if count]
        num_drawing = sum(row.num_pending == 1 for row, _ in work)
        segments, rows, all_guesses = [], [], []
        for row, count in work:
            if row.lease is None:  # gave way to an older row
                continue
            most = min(MAX_GUESSES, row.limit - len(row.tokens) - 1, self.spec.context - len(row.ids) - 1)
            guesses = self._guess(row, num_drawing, most) if row.num_pending == 1 and row.tokens and most > 0 else []
            end = row.num_computed + count
            if not self.pool.extend(row.lease, end + len(guesses)):
                guesses = []
                self._make_room(row, end)
                if row.lease is None:
                    continue
            is_last = end == len(row.ids)
            new = [*row.ids[row.num_computed : end], *guesses]
            segments.append(Segment(new, row.num_computed, row.lease.blocks, len(guesses) + 1 if is_last else 0))
            rows.append(row)
            all_guesses.append(guesses)
        return segments, rows, all_guesses

    def _make_room(self, row: Row, num_tokens: int) -> None:
        while row.lease is not None and not self.pool.extend(row.lease, num_tokens):
            self._preempt(self._running[-1])

    def _guess(self, row: Row, num_drawing: int, most: int) -> list[int]:
        if self.speculation == "off":
            return []
        lookup, record = self._lookups.setdefault(row, (Lookup(), Record()))
        number = decide(acceptance=record.acceptance, num_rows=num_drawing, costs=self._costs, most=most).num_guesses
        record.steps_since_guess += 1
        if number == 0 and record.steps_since_guess >= RETRY_EVERY:
            number = 1
        guesses = lookup.guess(row.ids, number) if number else []
        if guesses:
            record.steps_since_guess = 0
        return guesses

    def _draw(
        self, rows: Sequence[Row], segments: Sequence[Segment], all_guesses: Sequence[list[int]], logits: Tensor
    ) -> list[Row]:
        """Draw a token at every scored place, and keep guesses while they are what was drawn."""
        places = [(row, i) for row, segment in zip(rows, segments, strict=True) for i in range(segment.scored)]
        samplings = [row.sampling for row, _ in places]
        draws = [0.0 if row.sampling.temperature == 0 else row.draws[len(row.tokens) + i] for row, i in places]
        for at, (row, i) in enumerate(places):
            if row.first_ids is not None and not row.tokens and i == 0:
                logits[at] = _only(logits[at], row.first_ids)
        drawn = iter(enumerate(choose(logits, samplings, draws) if places else []))
        changed = []
        for row, segment, guesses in zip(rows, segments, all_guesses, strict=True):
            assert row.lease is not None
            mine = [next(drawn) for _ in range(segment.scored)]
            row.num_computed = segment.start + len(segment.tokens) - len(guesses)
            kept = 0
            for index, (at, token) in enumerate(mine):
                if row.sampling.logprobs is not None:
                    row.logprobs.append(log_probabilities(logits[at], token, row.sampling.logprobs))
                row.push(token)
                self.counts.drawn_tokens += 1
                if index >= len(guesses) or guesses[index] != token:
                    break
                kept += 1
                if row.finish_reason is not None:
                    break
            row.num_computed += kept
            if guesses:
                self._lookups[row][1].add(len(guesses), kept)
                self.counts.drafted_tokens += len(guesses)
                self.counts.kept_tokens += kept
            if mine:
                changed.append(row)
            self._settle(row)
        return changed

    def _settle(self, row: Row) -> None:
        """After a step: a row that ended leaves, another shares what it has computed."""
        assert row.lease is not None
        if row.finish_reason is not None:
            self._running.remove(row)
            self._release(row)
        elif row.num_computed // BLOCK_TOKENS > len(row.lease.nodes):
            self.pool.share(row.lease, row.ids[: row.num_computed])

    def _preempt(self, row: Row) -> None:
        """Back to the head of the queue; what it drew so far counts as prompt."""
        self._running.remove(row)
        self._release(row)
        self._waiting.appendleft(row)
        self.counts.preempted_rows += 1

    def _release(self, row: Row) -> None:
        if row.lease is not None:
            self.pool.close(row.lease, row.ids[: row.num_computed])
            row.lease, row.num_computed = None, 0
        if row.finish_reason is not None:
            self._lookups.pop(row, None)


def _decoder(network: Network, cache: PagedCache) -> Decoder | None:
    if network.device.type != "cuda":
        return None
    from lakh.server import decode_gpu

    return decode_gpu.Decoder(network, cache) if decode_gpu.can_decode(network) else None


def _only(logits_V: Tensor, ids: frozenset[int]) -> Tensor:
    allowed = torch.tensor(sorted(ids), device=logits_V.device)
    return torch.full_like(logits_V, -torch.inf).index_copy(0, allowed, logits_V[allowed])


def _room(context: int, max_tokens: int) -> int:
    """Tokens of a prompt that are kept."""
    if context < 2:
        raise ConfigError("model.context", f"{context} has no room for a prompt and a token", "train with more")
    return max(context - max_tokens, context // 2)


def _num_blocks(spec: Model, device: torch.device, dtype: torch.dtype, cache_tokens: int | None) -> int:
    """Blocks of the cache: as asked, else what a fixed number of bytes holds; always enough for one full context."""
    if cache_tokens is None:
        token_bytes = spec.kv_bytes_per_token(dtype.itemsize)
        cache_tokens = min(CACHE_TOKENS if device.type == "cpu" else 1 << 30, CACHE_BYTES[device.type] // token_bytes)
    return max(cache_tokens, spec.context + BLOCK_TOKENS) // BLOCK_TOKENS + 1
