"""The engine: prompts in, completions out, for one model in one process.

A request becomes a `_Row`: its prompt's ids, its random numbers, its text so far. `_steps` runs a batch of
rows: one prefill over the padded prompts, then one token for every unfinished row at a time; finished rows
leave the batch. Whatever the batch, a row's own scores decide its tokens, so a request gets the same answer
alone and among others (in float32; in bfloat16 sums of other shapes may round differently).

Only the last position of a row is ever scored against the vocabulary. Ids that the tokenizer does not know
(a padded embedding table has some) are never chosen.

Knows a model, a tokenizer and a cache; knows nothing of HTTP, queues or clocks. Keeps nothing from one call
to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lakh.errors import ConfigError, UserError
from lakh.server import weights as model_weights
from lakh.server.cache import RaggedCache
from lakh.server.sampling import Sampling, choose, random_stream
from lakh.server.text import StopText, TextStream
from lakh.spec.model import Model
from lakh.workloads.code.model import CodeModel

if TYPE_CHECKING:
    from lakh.tokens.tokenizer import Tokenizer

__all__ = ["Chunk", "Completion", "Engine", "FinishReason", "Prompt", "Sampling"]

BATCH_ROWS = 32
BATCH_TOKENS = 64 * 1024  # rows x tokens of a batch's cache: bounds its memory

FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
SUFFIX_SHARE = 4  # the text after the cursor gets at least a quarter of the room, if it needs it

FinishReason = Literal["stop", "length", "abort"]
Prompt = str | Sequence[int]
"""Text, or ids for what text cannot say: special tokens stand in no text (see `Engine.infill`)."""


@dataclass(frozen=True)
class Completion:
    text: str
    """Without the stop text, special tokens, and what followed them."""
    tokens: tuple[int, ...]
    """Every token that was drawn, a closing end-of-text included."""
    finish_reason: FinishReason
    prompt_tokens: int
    """Tokens that the model saw: fewer than the prompt had where its beginning was cut off."""


@dataclass(frozen=True)
class Chunk:
    """A piece of a completion: the texts of all chunks are its text, their tokens its tokens."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    """On the last chunk only."""


class Engine:
    def __init__(
        self,
        name: str,
        spec: Model,
        weights: Mapping[str, Tensor],
        tokenizer: Tokenizer,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """By default on the GPU in bfloat16 where there is one, else on the CPU in float32 (faster there, one
        row at a time).
        """
        self.name, self.spec, self.tokenizer = name, spec, tokenizer
        if tokenizer.vocab_size > spec.vocab:
            found = f"has {tokenizer.vocab_size} tokens and the model {spec.vocab}"
            raise UserError("tokenizer", found, "use the tokenizer that the model was trained with")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        with torch.device("meta"):
            self._model = CodeModel(spec)
        ready = {key: tensor.to(self.device, self.dtype) for key, tensor in weights.items()}
        self._model.load_state_dict(ready, strict=True, assign=True)
        self._model.eval().requires_grad_(False)

    @staticmethod
    def load(path: str) -> Engine:
        """The model behind a run's folder (its newest checkpoint), a checkpoint's folder or a Hugging Face
        directory.
        """
        from lakh.tokens.tokenizer import Tokenizer

        loaded = model_weights.read(path)
        tokenizer = Tokenizer.load(loaded.tokenizer_json)
        return Engine(loaded.name, loaded.spec, loaded.weights, tokenizer)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        progress: Callable[[int], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> list[Completion]:
        """Complete every prompt, in batches of similar length; `progress` hears how many are finished so far.

        A prompt that leaves no room for max_tokens in the context loses its beginning: the last context -
        max_tokens tokens stay, and never less than half the context; the completion then ends with "length"
        at the context's end. The same prompt several times draws other random numbers each time; the first
        copy gets what it would alone. Once `cancelled` says so, what is not finished ends with "abort".
        """
        copies: Counter[tuple[int, ...]] = Counter()
        rows = []
        for prompt in prompts:
            ids = self._ids(prompt, sampling)
            rows.append(self._row(ids, sampling, copies[ids]))
            copies[ids] += 1
        done = 0
        for batch in _batches(rows):
            for _ in self._steps(batch):
                finished = sum(row.finish_reason is not None for row in rows)
                if progress is not None and finished > done:
                    progress(finished)
                done = finished
                if cancelled():
                    break
            if cancelled():
                break
        for row in rows:
            row.finish("abort")  # says nothing to those that are finished
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
        row = self._row(self._ids(prompt, sampling), sampling, copy)
        sent = 0
        for _ in self._steps([row]):
            if cancelled():
                row.finish("abort")
            text = row.take_text()
            if text or row.finish_reason is not None:
                yield Chunk(text, tuple(row.tokens[sent:]), row.finish_reason)
                sent = len(row.tokens)
            if row.finish_reason is not None:
                return

    def infill(self, prefix: str, suffix: str, max_tokens: int) -> tuple[int, ...]:
        """The prompt that asks for what stands between prefix and suffix, with room for max_tokens.

        prefix token, prefix, suffix token, suffix, middle token. What has no room goes from the ends far
        from the cursor. A UserError where the tokenizer has no such tokens.
        """
        try:
            start, middle, end = (self.tokenizer.special(token) for token in (FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE))
        except UserError:
            found = "the tokenizer has no tokens for filling in the middle"
            raise UserError("suffix", found, "leave the suffix out") from None
        before, after = self.encode(prefix), self.encode(suffix, "suffix")
        room = _room(self.spec.context, max_tokens) - 3
        if room < 1:
            raise UserError("suffix", f"a context of {self.spec.context} is too short", "leave the suffix out")
        num_after = min(len(after), max(room // SUFFIX_SHARE, room - len(before)))
        num_before = min(len(before), room - num_after)
        return (start, *before[len(before) - num_before :], middle, *after[:num_after], end)

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

    # --- one request ---

    def _ids(self, prompt: Prompt, sampling: Sampling) -> tuple[int, ...]:
        ids = self.encode(prompt) or (self.tokenizer.eot,)  # nothing said: as at the beginning of a document
        return ids[-_room(self.spec.context, sampling.max_tokens) :]

    def _row(self, ids: tuple[int, ...], sampling: Sampling, copy: int) -> _Row:
        limit = min(sampling.max_tokens, self.spec.context - len(ids))
        stream = random_stream(sampling, copy)
        return _Row(ids, sampling, limit, stream, self.tokenizer.eot, TextStream(self.tokenizer.decode))

    # --- the loop ---

    def _steps(self, rows: Sequence[_Row]) -> Iterator[None]:
        """Run a batch to its end; yields after every token."""
        capacity = max(len(row.prompt) + row.limit for row in rows)
        cache = RaggedCache(self.spec, len(rows), capacity, device=self.device, dtype=self.dtype)
        new = [list(row.prompt) for row in rows]
        running = list(rows)
        while running:
            logits_BV = self._forward(new, cache)
            samplings, streams = [row.sampling for row in running], [row.stream for row in running]
            for row, token in zip(running, choose(logits_BV, samplings, streams), strict=True):
                row.push(token)
            yield
            going = [index for index, row in enumerate(running) if row.finish_reason is None]
            if len(going) < len(running):
                running = [running[index] for index in going]
                cache.keep(going)
            new = [[row.tokens[-1]] for row in running]

    @torch.inference_mode()
    def _forward(self, new: Sequence[Sequence[int]], cache: RaggedCache) -> Tensor:
        """Feed each row its new tokens; returns the scores that follow its last one, B V."""
        counts = [len(tokens) for tokens in new]
        num_new = max(counts)
        padded = [[*tokens, *[0] * (num_new - len(tokens))] for tokens in new]
        tokens_BT = torch.tensor(padded, device=self.device)
        x_BTW = self._model.hidden(tokens_BT, cache.positions(num_new), cache)
        cache.advance(counts)
        last_B = torch.tensor(counts, device=self.device) - 1
        logits_BV = self._model.logits(x_BTW[torch.arange(len(new), device=self.device), last_B])
        return logits_BV[:, : self.tokenizer.vocab_size]


class _Row:
    """One request on its way."""

    def __init__(
        self,
        prompt: tuple[int, ...],
        sampling: Sampling,
        limit: int,
        stream: torch.Generator,
        eot: int,
        text: TextStream,
    ) -> None:
        self.prompt, self.sampling, self.limit, self.stream = prompt, sampling, limit, stream
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._eot, self._text, self._stop = eot, text, StopText(sampling.stop)
        self._shown: list[str] = []

    def push(self, token: int) -> None:
        self.tokens.append(token)
        if token == self._eot:
            self.finish("stop")
            return
        self._shown.append(self._stop.push(self._text.push(token)))
        if self._stop.found:
            self.finish("stop")
        elif len(self.tokens) >= self.limit:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        if self.finish_reason is None:
            rest = self._stop.push(self._text.finish())
            self._shown.append(rest + self._stop.finish())
            self.finish_reason = "stop" if self._stop.found else reason

    def take_text(self) -> str:
        """The text since the last call."""
        text = "".join(self._shown)
        self._shown.clear()
        return text

    def completion(self) -> Completion:
        assert self.finish_reason is not None  # asked for only at the end
        return Completion(self.take_text(), tuple(self.tokens), self.finish_reason, len(self.prompt))


def _room(context: int, max_tokens: int) -> int:
    """Tokens of a prompt that are kept."""
    if context < 2:
        raise ConfigError("model.context", f"{context} has no room for a prompt and a token", "train with more")
    return max(context - max_tokens, context // 2)


def _batches(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Rows of similar length together, longest first: if memory does not suffice, it shows at once."""
    batch: list[_Row] = []
    widest = 0
    for row in sorted(rows, key=lambda row: len(row.prompt) + row.limit, reverse=True):
        if batch and (len(batch) == BATCH_ROWS or (len(batch) + 1) * widest > BATCH_TOKENS):
            yield batch
            batch = []
        if not batch:
            widest = len(row.prompt) + row.limit
        batch.append(row)
    if batch:
        yield batch
