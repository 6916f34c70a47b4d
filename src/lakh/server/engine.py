"""The engine: prompts in, completions out, for one model in one process.

A request becomes a Row (row.py). `step` is the whole of it: let waiting rows in and find room for what they bring
(seating.py), compute (runner.py), draw (drawing.py), and let rows go that ended. On a GPU greedy rows take several
steps ahead of what is read, while nobody waits (flight.py). `generate` and `stream` step until their own rows are done;
a server steps all the time (worker.py) and adds rows between steps.

Whatever the batch, a row's own scores and random numbers decide its tokens: alone, among others, from a cached
prefix, in chunks, or with guesses (speculate.py), a request gets the same answer, up to ties: sums of other shapes
round differently, by some 1e-5 of a score in float32 and 1e-2 in bfloat16, so two tokens that stand closer than that
may change places (once in some millions of tokens in float32; sampling.py keeps it as rare as it can be). With a
draft, a row that samples without a seed gets another answer of the same distribution. Ids that the tokenizer does not
know (a padded embedding table has some) are never chosen.

When blocks run out the youngest row gives its blocks back and is computed again later. New weights (`swap`) do the
same to all rows and forget every remembered prefix. Knows a model, a tokenizer and a clock; knows nothing of HTTP.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lakh.errors import UserError
from lakh.server import fim
from lakh.server.counts import Counts
from lakh.server.drawing import Drawing
from lakh.server.flight import Flight
from lakh.server.guesses.draft import Guess
from lakh.server.guesses.guesser import Guesser, drafter_for
from lakh.server.heal import Healed
from lakh.server.lines import ANY, Reading
from lakh.server.metrics import TOKENS, Histogram
from lakh.server.model import weights as model_weights
from lakh.server.model.inference import InferenceModel, Precision
from lakh.server.model.runner import Runner
from lakh.server.phases import Phases
from lakh.server.prompt import Prompt, Prompts
from lakh.server.row import Chunk, Completion, FinishReason, Row
from lakh.server.sampling import Draws, Sampling
from lakh.server.schedule import steps_unguessed
from lakh.server.seating import Seating
from lakh.server.spelling import Spelling
from lakh.server.text import StopRule, TextStream
from lakh.spec.model import Model

if TYPE_CHECKING:
    from lakh.server.model.tensor_parallel import TensorParallelGroup
    from lakh.tokens.tokenizer import Tokenizer

__all__ = ["Chunk", "Completion", "Counts", "Engine", "FinishReason", "Prompt", "Sampling"]

STEP_TOKENS = {"cpu": 256, "cuda": 2048}  # of one step: bounds how long rows that draw wait for a long prompt
MAX_ROWS = {"cpu": 32, "cuda": 128}

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """By default on the GPU in bfloat16 where there is one, else on the CPU in float32. A `draft`, a smaller model
        of the same tokenizer, guesses too, or alone where speculation is "off".
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
        self.speculation: Speculation = speculation
        self._drafter = None if draft is None else drafter_for(self._runner, tokenizer, draft)
        looks_up = speculation == "lookup"
        guesses = looks_up or self._drafter is not None
        self._guesser = Guesser(spec.context, clock, self._drafter, looks_up=looks_up) if guesses else None
        self._prompts, self._spelling = Prompts(tokenizer, spec), Spelling(tokenizer)
        self.weights_version = 0
        self.counts, self.step_sizes = Counts(), Histogram(TOKENS)
        self.clock = clock
        self.step_tokens, self.max_rows = STEP_TOKENS[self.device.type], MAX_ROWS[self.device.type]
        # Nothing here knows the engine: when it is let go, its memory goes at once.
        released = (lambda row: None) if self._guesser is None else self._guesser.release
        self._seating = Seating(self._runner, self.counts, clock, released)
        self._drawing = Drawing(self._guesser, self.counts)
        self._flight: Flight | None = None
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

    def infill(
        self, prefix: str, suffix: str, max_tokens: int, order: fim.Order = "psm", *, reading: Reading = ANY
    ) -> tuple[int, ...]:
        """The prompt that asks for what stands between prefix and suffix, with room for max_tokens (fim.py)."""
        return self._prompts.infill(prefix, suffix, max_tokens, order, reading)

    def heal(self, ids: tuple[int, ...]) -> Healed:
        """A prompt whose last token the first drawn one may complete (heal.py); pass its parts to `row`."""
        return self._prompts.heal(ids)

    def encode(self, prompt: Prompt, where: str = "prompt", *, reading: Reading = ANY) -> tuple[int, ...]:
        """The ids of a prompt, all of them; a UserError where it is no text or has ids that do not exist.
        `reading` says whose remembered lines it may use (lines.py).
        """
        return self._prompts.encode(prompt, where, reading)

    def least_tokens(self, prompt: Prompt) -> int:
        """So many ids the prompt has for sure, known without reading it."""
        return self._prompts.least_tokens(prompt)

    def cut(self, ids: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
        """The end of a prompt that leaves room for max_tokens; an empty prompt begins a document."""
        return self._prompts.cut(ids, sampling.max_tokens)

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
        first_ids: tuple[int, ...] | None = None,
        skip: str = "",
    ) -> Row:
        """A request, not yet submitted. `tenant` names whose cache it shares; `skip` is text that it repeats first."""
        limit = min(sampling.max_tokens, self.spec.context - len(ids))
        text = TextStream(self._spelling, skip)
        draws = Draws(sampling, copy)
        return Row(ids, sampling, limit, draws, self.tokenizer.eot, text, tenant, deadline_s, rule, first_ids)

    def submit(self, *rows: Row) -> None:
        """In the order of arrival; they come to work in `step`."""
        with self._lock:
            self._seating.submit(rows)

    def abort(self, *rows: Row) -> None:
        """End these rows now, and free their blocks now. Says nothing to rows that have ended."""
        with self._lock:
            self._seating.abort(rows)

    @property
    def num_running(self) -> int:
        return len(self._seating.running)

    @property
    def num_waiting(self) -> int:
        return len(self._seating.waiting)

    @property
    def phases(self) -> Phases:
        """How long completions waited, read and drew."""
        return self._seating.phases

    def stage(self) -> InferenceModel:
        """Room for other weights beside those at work: `put` every tensor there, `finish`, then `swap`."""
        if self.network.shard.size > 1:
            raise UserError("weights", "of an engine in several processes stay", "start it again with the new ones")
        return self.network.empty_like()

    def swap(self, weights: Mapping[str, Tensor] | InferenceModel) -> int:
        """From the next step on, these weights; of a staged network, without a pause for reading them.

        Rows at work are computed again with them, and no prefix is remembered. Returns the new version.
        """
        if isinstance(weights, InferenceModel):
            staged = weights
        else:
            staged = self.stage()
            staged.load(weights)
        with self._lock:
            self._flight = None
            self._seating.clear()
            self.pool.reset()
            self.network.swap_weights(staged)
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
            changed = self._seating.expire()
            guesses: dict[Row, Guess] = {}
            if self._flight is None or self._flight.is_over:  # because its rows were aborted
                self._seating.admit(self.max_rows, self.weights_version)
                guesses = {} if self._guesser is None else self._guesser.guess(self._seating.running)
                self._flight = None if guesses else self._take_off()
            if self._flight is not None:
                return changed + self._fly(self._flight)
            segments, rows, kept_guesses = self._seating.plan(guesses, self.step_tokens)
            if not segments:
                return changed
            began_s = self.clock()
            logits = self._runner.forward(segments)
            changed += self._drawing.draw(rows, segments, kept_guesses, logits)
            for row in rows:
                self._seating.settle(row)
            num_tokens = sum(len(segment.tokens) for segment in segments)
            self.counts.steps += 1
            self.counts.computed_tokens += num_tokens
            self.step_sizes.add(num_tokens)
            if self._guesser is not None and all(segment.start for segment in segments):
                self._guesser.record_step(num_tokens, self.clock() - began_s)
            return changed

    def _take_off(self) -> Flight | None:
        """Greedy steps that a GPU takes unwatched: none where a row waits, samples or still reads its prompt."""
        rows, decoder = self._seating.running, self._runner.decoder
        if decoder is None or self._seating.waiting or not 0 < len(rows) <= decoder.max_sequences:
            return None
        if not all(row.is_plainly_greedy and row.num_pending == 1 and len(row.tokens) < row.limit for row in rows):
            return None
        # A row that has ended writes on: nobody may come to the end of the context.
        steps = min(decoder.max_steps, self.spec.context + 1 - max(len(row.ids) for row in rows))
        if self._guesser is not None:
            steps = min(steps, steps_unguessed(len(rows)))
        while steps and not self._seating.make_room_ahead(steps):
            steps //= 2
        if not steps:
            return None
        began_s = self.clock()
        tokens, positions = [row.ids[-1] for row in rows], [row.num_computed for row in rows]
        blocks = [row.lease.blocks for row in rows if row.lease is not None]
        flight = Flight(rows, decoder.multi_step(tokens, positions, blocks), steps)
        flight.spent_s = self.clock() - began_s
        return flight

    def _fly(self, flight: Flight) -> list[Row]:
        began_s = self.clock()
        rows = [row for row in flight.rows if row.finish_reason is None]
        try:
            launched = 0 if self._seating.waiting else flight.go_on()
            self.counts.drawn_tokens += flight.look()
        except BaseException:  # an interrupt too: what was read stays, the rest is computed again
            self._flight = None
            raise
        finally:
            for row in rows:
                self._seating.settle(row)
        self.counts.steps += launched
        self.counts.computed_tokens += launched * len(flight.rows)
        for _ in range(launched):
            self.step_sizes.add(len(flight.rows))
        flight.spent_s += self.clock() - began_s
        if flight.is_over:
            self._flight = None
            if self._guesser is not None:  # what guesses must be faster than
                self._guesser.record_step(len(flight.rows), flight.spent_s / flight.num_read)
        return rows

    def warm_up(self) -> None:
        """Compile kernels and capture graphs now, so that the first requests do not wait for it."""
        self._runner.warm_up()
        if self._guesser is not None:
            self._guesser.warm_up()
        self.generate([(self.tokenizer.eot,)] * 2, Sampling(max_tokens=3))
