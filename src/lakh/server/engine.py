"""The engine: prompts in, completions out, for one model in one process.

A request becomes a Row (row.py). `step` is the whole of it: let waiting rows in, share the step's tokens among rows
(schedule.py), find room for them (blocks.py), compute (runner.py), draw (sampling.py), and give back the blocks of
rows that ended. `generate` and `stream` step until their own rows are done; a server steps all the time (worker.py)
and adds rows between steps.

Whatever the batch, a row's own scores and random numbers decide its tokens: alone, among others, from a cached
prefix, in chunks, or with guesses (speculate.py), a request gets the same answer (in float32; in bfloat16 sums of
other shapes may round differently; with a draft, one that samples without a seed gets another answer of the same
distribution). Ids that the tokenizer does not know (a padded embedding table has some) are never chosen.

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
from lakh.server.guesses.draft import Drafter, Guess
from lakh.server.guesses.rejection import keep_or_replace
from lakh.server.guesses.speculate import MAX_GUESSES, RETRY_EVERY, SMOOTHING, Costs, Lookup, Record, decide
from lakh.server.heal import Healed, Healer
from lakh.server.model import weights as model_weights
from lakh.server.model.blocks import BLOCK_TOKENS
from lakh.server.model.network import Network, Precision, Segment
from lakh.server.model.runner import Runner
from lakh.server.row import Chunk, Completion, FinishReason, Row
from lakh.server.sampling import Draws, Sampling, choose, log_probabilities, probabilities
from lakh.server.schedule import share_budget
from lakh.server.text import StopRule, TextStream
from lakh.spec.model import Model

if TYPE_CHECKING:
    from lakh.server.model.tensor_parallel import Team
    from lakh.tokens.tokenizer import Tokenizer

__all__ = ["Chunk", "Completion", "Counts", "Engine", "FinishReason", "Prompt", "Sampling"]

STEP_TOKENS = {"cpu": 256, "cuda": 2048}  # of one step: bounds how long rows that draw wait for a long prompt
MAX_ROWS = {"cpu": 32, "cuda": 128}
BURST = 8  # greedy steps on the GPU before their tokens are read (model/gpu/decode.py)
BURST_SHARED = 2  # the same beside other rows: who comes meanwhile waits for the end of it

Prompt = str | Sequence[int]
"""Text, or ids for what text cannot say: special tokens stand in no text (see `Engine.infill`)."""
Speculation = Literal["lookup", "draft", "off"]
NO_GUESS = Guess([], [])


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
        draft: model_weights.Loaded | None = None,
        team: Team | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """By default on the GPU in bfloat16 where there is one, else on the CPU in float32. With a `draft`, a smaller
        model of the same tokenizer, speculation is "draft".
        """
        self.name, self.spec, self.tokenizer = name, spec, tokenizer
        if tokenizer.vocab_size > spec.vocab:
            found = f"has {tokenizer.vocab_size} tokens and the model {spec.vocab}"
            raise UserError("tokenizer", found, "use the tokenizer that the model was trained with")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        precision = precision or ("bf16" if self.device.type == "cuda" else "f32")
        num_ids = tokenizer.vocab_size
        self._runner = Runner(
            spec, weights, num_ids, device=self.device, precision=precision, cache_tokens=cache_tokens, team=team
        )
        self.network, self.pool, self.cache = self._runner.network, self._runner.pool, self._runner.cache
        self.speculation: Speculation = "draft" if draft is not None else speculation
        self._drafter = None if draft is None else _drafter(draft, self._runner, tokenizer)
        self._guess_s = 0.0
        self._record = Record()  # of all rows: what a new one begins with
        self._healer: Healer | None = None  # made when first asked for: it spells the whole vocabulary
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
        draft: str | None = None,
        cache_tokens: int | None = None,
        tensor: int = 1,
    ) -> Engine:
        """The model behind a run's folder (its newest checkpoint), a checkpoint's folder or a Hugging Face
        directory; `draft` names a smaller one of the same tokenizer that guesses for it. With `tensor` above 1 so
        many processes of this machine share the model: `close` ends them.
        """
        from lakh.tokens.tokenizer import Tokenizer

        loaded = model_weights.read(path)
        tokenizer = Tokenizer.load(loaded.tokenizer_json)
        team = None
        if tensor > 1:
            from lakh.server.model import tensor_parallel

            team = tensor_parallel.start(path, size=tensor, precision=precision)
        return Engine(
            loaded.name,
            loaded.spec,
            loaded.weights,
            tokenizer,
            precision=precision,
            speculation=speculation,
            draft=None if draft is None else model_weights.read(draft),
            cache_tokens=cache_tokens,
            team=team,
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

    def heal(self, ids: tuple[int, ...]) -> Healed:
        """A prompt whose last token the first drawn one may complete (heal.py); pass its parts to `row`."""
        if self._healer is None:
            self._healer = Healer(self.tokenizer)
        return self._healer.heal(ids)

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

    def stage(self) -> Network:
        """Room for other weights beside those at work: `put` every tensor there, `finish`, then `swap`."""
        if self.network.shard.size > 1:
            raise UserError("weights", "of an engine in several processes stay", "start it again with the new ones")
        return self.network.shadow()

    def swap(self, weights: Mapping[str, Tensor] | Network) -> int:
        """From the next step on, these weights; of a staged network, without a pause for reading them.

        Rows at work are computed again with them, and no prefix is remembered. Returns the new version.
        """
        if isinstance(weights, Network):
            staged = weights
        else:
            staged = self.stage()
            staged.load(weights)
        with self._lock:
            while self._running:
                self._preempt(self._running[-1])
            self.pool.forget()
            self.network.exchange(staged)
            self.weights_version += 1
            return self.weights_version

    def close(self) -> None:
        """End the processes that share the model, where there are some."""
        self._runner.close()

    # --- a step ---

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Advance the rows at work; returns those that drew a token or ended."""
        with self._lock:
            changed = self._expire()
            self._admit()
            guesses = self._guess()
            steps = 0 if guesses else self._burst_steps()
            if steps:
                return changed + self._burst(steps)
            segments, rows, kept_guesses = self._plan(guesses)
            if not segments:
                return changed
            began_s = self.clock()
            logits = self._runner.forward(segments)
            changed += self._draw(rows, segments, kept_guesses, logits)
            num_tokens = sum(len(segment.tokens) for segment in segments)
            self.counts.steps += 1
            self.counts.computed_tokens += num_tokens
            if all(segment.start for segment in segments):  # steps that only draw: what guesses are weighed by
                self._costs.record(num_tokens, self.clock() - began_s)
            return changed

    def _burst_steps(self) -> int:
        """Greedy steps that the GPU may take unwatched: none where a row waits, samples or still reads its prompt."""
        rows = self._running
        if self._runner.decoder is None or not rows or self._waiting or self.speculation == "draft":
            return 0
        if any(
            row.num_pending != 1 or row.sampling.temperature or row.sampling.logprobs is not None or row.first_ids
            for row in rows
        ):
            return 0
        most = BURST if len(rows) == 1 else BURST_SHARED
        return min(most, *(row.limit - len(row.tokens) for row in rows))

    def _burst(self, steps: int) -> list[Row]:
        rows = list(self._running)
        for row in rows:
            if row.lease is not None:
                self._make_room(row, row.num_computed + steps)
        rows = [row for row in rows if row.lease is not None]
        blocks = [row.lease.blocks for row in rows if row.lease is not None]
        drawn = self._runner.greedy([row.ids[-1] for row in rows], [row.num_computed for row in rows], blocks, steps)
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
        self._runner.warm_up()
        if self._drafter is not None:
            self._drafter.warm_up()
        self.generate([(self.tokenizer.eot,)] * 2, Sampling(max_tokens=3))

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
                self._runner.copy_block(*row.lease.copy)
            row.num_computed = row.lease.num_cached
            if not row.tokens:
                row.num_cached = row.lease.num_cached
                self.counts.prompt_tokens += len(row.prompt)
                self.counts.cached_tokens += row.num_cached
            if row.num_pending > 1:
                computing.add(row.prompt)
            self._running.append(row)
        self._waiting.extendleft(reversed(held_back))

    def _plan(self, guesses: Mapping[Row, Guess]) -> tuple[list[Segment], list[Row], list[Guess]]:
        """What every row brings to this step, with room for it; the youngest rows give way where there is none."""
        counts = share_budget([row.num_pending for row in self._running], self.step_tokens).counts
        work = [(row, count) for row, count in zip(self._running, counts, strict=True) if count]
        segments, rows, all_guesses = [], [], []
        for row, count in work:
            if row.lease is None:  # gave way to an older row
                continue
            guess = guesses.get(row, NO_GUESS)
            end = row.num_computed + count
            if not self.pool.extend(row.lease, end + len(guess.tokens)):
                guess = NO_GUESS
                self._make_room(row, end)
                if row.lease is None:
                    continue
            is_last = end == len(row.ids)
            new = [*row.ids[row.num_computed : end], *guess.tokens]
            segments.append(Segment(new, row.num_computed, row.lease.blocks, len(guess.tokens) + 1 if is_last else 0))
            rows.append(row)
            all_guesses.append(guess)
        return segments, rows, all_guesses

    def _make_room(self, row: Row, num_tokens: int) -> None:
        while row.lease is not None and not self.pool.extend(row.lease, num_tokens):
            self._preempt(self._running[-1])

    def _guess(self) -> dict[Row, Guess]:
        """Guesses for the rows that draw, as many as pay."""
        if self.speculation == "off":
            return {}
        drawing = [row for row in self._running if row.num_pending == 1 and row.tokens]
        numbers = {row: number for row in drawing if (number := self._num_guesses(row, len(drawing)))}
        if self._drafter is None:
            looked_up = {row: self._lookups[row][0].guess(row.ids, number) for row, number in numbers.items()}
            guesses = {row: Guess(tokens, []) for row, tokens in looked_up.items() if tokens}
        elif numbers:
            began_s, reads_prompts = self.clock(), not all(self._drafter.knows(row) for row in numbers)
            guesses = self._drafter.guess(list(numbers.items()))
            if guesses and not reads_prompts:
                took_s = (self.clock() - began_s) / max(len(guess.tokens) for guess in guesses.values())
                self._guess_s += (SMOOTHING if self._guess_s else 1.0) * (took_s - self._guess_s)
        else:
            guesses = {}
        for row in guesses:
            self._lookups[row][1].steps_since_guess = 0
        return guesses

    def _num_guesses(self, row: Row, num_drawing: int) -> int:
        if row not in self._lookups:
            self._lookups[row] = (Lookup(), Record(acceptance=self._record.acceptance))
        _, record = self._lookups[row]
        most = min(MAX_GUESSES, row.limit - len(row.tokens) - 1, self.spec.context - len(row.ids) - 1)
        if most < 1:
            return 0
        number = decide(
            acceptance=record.acceptance, num_rows=num_drawing, costs=self._costs, guess_s=self._guess_s, most=most
        ).num_guesses
        record.steps_since_guess += 1
        return 1 if number == 0 and record.steps_since_guess >= RETRY_EVERY else number

    def _draw(
        self, rows: Sequence[Row], segments: Sequence[Segment], all_guesses: Sequence[Guess], logits: Tensor
    ) -> list[Row]:
        """Draw a token at every scored place, and keep guesses while they are what was drawn."""
        places = [(row, i) for row, segment in zip(rows, segments, strict=True) for i in range(segment.scored)]
        samplings = [row.sampling for row, _ in places]
        draws = [0.0 if row.sampling.temperature == 0 else row.draws[len(row.tokens) + i] for row, i in places]
        for at, (row, i) in enumerate(places):
            if row.first_ids is not None and not row.tokens and i == 0:
                logits[at] = _only(logits[at], row.first_ids)
        drawn = choose(logits, samplings, draws) if places else []
        changed = []
        end = 0
        for row, segment, guess in zip(rows, segments, all_guesses, strict=True):
            assert row.lease is not None
            here = range(end, end + segment.scored)
            end += segment.scored
            tokens = [drawn[at] for at in here]
            if guess.probabilities:
                p = probabilities(logits[here.start : here.stop], samplings[here.start : here.stop])
                tokens = keep_or_replace(guess.tokens, guess.probabilities, list(p), lambda: float(torch.rand(())))
            row.num_computed = segment.start + len(segment.tokens) - len(guess.tokens)
            kept = self._push(row, tokens, guess.tokens, logits[here.start : here.stop])
            row.num_computed += kept
            if guess.tokens:
                for record in (self._lookups[row][1], self._record):
                    record.add(len(guess.tokens), kept)
                self.counts.drafted_tokens += len(guess.tokens)
                self.counts.kept_tokens += kept
            if tokens:
                changed.append(row)
            self._settle(row)
        return changed

    def _push(self, row: Row, tokens: Sequence[int], guesses: Sequence[int], logits: Tensor) -> int:
        """The drawn tokens, up to the first that was not guessed; returns how many guesses were right."""
        for index, token in enumerate(tokens):
            if row.sampling.logprobs is not None:
                row.logprobs.append(log_probabilities(logits[index], token, row.sampling.logprobs))
            row.push(token)
            self.counts.drawn_tokens += 1
            if index >= len(guesses) or guesses[index] != token:
                return index
            if row.finish_reason is not None:
                return index + 1
        return 0

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
        if self._drafter is not None:
            self._drafter.release(row)
        if row.finish_reason is not None:
            self._lookups.pop(row, None)


def _drafter(draft: model_weights.Loaded, target: Runner, tokenizer: Tokenizer) -> Drafter:
    """The draft beside its model: on the same device, in the same precision, for as many tokens."""
    from lakh.tokens.tokenizer import Tokenizer as Other

    theirs = Other.load(draft.tokenizer_json)
    if theirs.vocab_size != tokenizer.vocab_size or any(
        theirs.decode([token], show_special=True) != tokenizer.decode([token], show_special=True)
        for token in range(0, tokenizer.vocab_size, max(tokenizer.vocab_size // 512, 1))
    ):
        todo = "give a draft that was trained with the model's tokenizer"
        raise UserError(f"draft {draft.name}", "has another tokenizer than the model", todo)
    if draft.spec.context < target.network.spec.context:
        found = f"has a context of {draft.spec.context} tokens and the model {target.network.spec.context}"
        raise UserError(f"draft {draft.name}", found, "give a draft with at least the model's context")
    network = target.network
    precision = network.precision if network.precision != "int8" else "f32"
    room = target.pool.num_blocks * BLOCK_TOKENS
    runner = Runner(
        draft.spec,
        draft.weights,
        tokenizer.vocab_size,
        device=network.device,
        precision=precision,
        cache_tokens=room,
    )
    return Drafter(runner)


def _only(logits_V: Tensor, ids: frozenset[int]) -> Tensor:
    allowed = torch.tensor(sorted(ids), device=logits_V.device)
    return torch.full_like(logits_V, -torch.inf).index_copy(0, allowed, logits_V[allowed])


def _room(context: int, max_tokens: int) -> int:
    """Tokens of a prompt that are kept."""
    if context < 2:
        raise ConfigError("model.context", f"{context} has no room for a prompt and a token", "train with more")
    return max(context - max_tokens, context // 2)
