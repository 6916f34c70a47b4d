"""Which guesses rows bring to a step, and what became of them: the engine asks before it and tells after it.

Keeps, for each row, what its lookup has read and how its guesses fared; for all rows together, what steps and guesses
cost. How many guesses pay is speculate.py's to decide. Knows rows; knows nothing of the large model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lakh.errors import UserError
from lakh.server.guesses.draft import Drafter, Guess
from lakh.server.guesses.speculate import (
    FASTER,
    MAX_GUESSES,
    RETRY_EVERY,
    SLOWER,
    Costs,
    Decision,
    Lookup,
    Record,
    decide,
)
from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.cpu.kernels import GROUP
from lakh.server.model.inference import InferenceModel, Precision
from lakh.server.model.runner import Runner
from lakh.server.model.weights import LoadedModel
from lakh.server.row import Row
from lakh.spec.model import Model
from lakh.tokens.tokenizer import Tokenizer

__all__ = ["Guesser", "drafter_for"]

NOTHING = Decision(0, "no such guesses here")
UP_TO_DATE = 2  # tokens that a draft which guessed last time has yet to read
SAMPLED_IDS = 512  # of two tokenizers, to see whether they are one


@dataclass
class _Past:
    """How a row's guesses fared, by where they came from."""

    looked_up: Record = field(default_factory=Record)
    drafted: Record = field(default_factory=Record)
    lookup: Lookup = field(default_factory=Lookup)
    is_drafted: bool = False
    """The last ones."""


class Guesser:
    def __init__(
        self, context: int, clock: Callable[[], float], drafter: Drafter | None = None, *, looks_up: bool = True
    ) -> None:
        """`looks_up` in the text so far, which costs nothing; a drafter guesses where that is expected to give more."""
        self.drafter = drafter
        self._context, self._clock, self._looks_up = context, clock, looks_up
        self._rows: dict[Row, _Past] = {}
        self._all = _Past()  # what a new row begins with
        self._costs = Costs()
        self._guess_s, self._is_first = 0.0, True

    def guess(self, running: Sequence[Row]) -> dict[Row, Guess]:
        """Guesses for the rows that draw, as many as pay."""
        drawing = [row for row in running if row.num_pending == 1 and row.tokens]
        looked_up: dict[Row, Guess] = {}
        numbers: dict[Row, int] = {}
        for row in drawing:
            past = self._past(row)
            most = min(MAX_GUESSES, row.limit - len(row.tokens) - 1, self._context - len(row.ids) - 1)
            if most < 1:
                continue
            drafted, found = NOTHING, NOTHING
            if self.drafter:
                drafted = self._decide(past.drafted, self._all.drafted, most, len(drawing), self._guess_s)
            if self._looks_up:
                found = self._decide(past.looked_up, self._all.looked_up, most, len(drawing), 0.0)
            if found.num_guesses and (not drafted.num_guesses or found.gain > drafted.gain):
                tokens = past.lookup.guess(row.ids, found.num_guesses)
                if tokens:
                    looked_up[row] = Guess(tokens, [])
                    self._all.looked_up.steps_since_guess = 0
                    continue
            if drafted.num_guesses:
                numbers[row] = drafted.num_guesses
        made = self._draft(self.drafter, numbers) if self.drafter and numbers else {}
        for row in made:
            self._all.drafted.steps_since_guess = 0
            self._rows[row].is_drafted = True
        for row in looked_up:
            self._rows[row].is_drafted = False
        return looked_up | made

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """A step of rows that only draw: what guesses are weighed by."""
        self._costs.record(num_tokens, seconds)

    def record_guess(self, row: Row, drafted: int, kept: int) -> None:
        """What became of the row's last guesses."""
        is_drafted = self._rows[row].is_drafted
        for past in (self._rows[row], self._all):
            (past.drafted if is_drafted else past.looked_up).add(drafted, kept)

    def release(self, row: Row) -> None:
        """The row ended or gave way."""
        if self.drafter is not None:
            self.drafter.release(row)
        if row.finish_reason is not None:
            self._rows.pop(row, None)

    def warm_up(self) -> None:
        if self.drafter is not None:
            self.drafter.warm_up()

    def _past(self, row: Row) -> _Past:
        if row not in self._rows:
            self._rows[row] = _Past(
                Record(acceptance=self._all.looked_up.acceptance), Record(acceptance=self._all.drafted.acceptance)
            )
        return self._rows[row]

    def _decide(self, record: Record, of_all: Record, most: int, num_drawing: int, guess_s: float) -> Decision:
        """By the row's own past; but most rows are short, so whether it is time to try again is known for all."""
        found = decide(
            acceptance=record.acceptance, num_rows=num_drawing, costs=self._costs, guess_s=guess_s, most=most
        )
        of_all.steps_since_guess += 1
        if found.num_guesses == 0 and of_all.steps_since_guess >= RETRY_EVERY:
            return Decision(1, "given up a while ago, tried once more")
        return found

    def _draft(self, drafter: Drafter, numbers: dict[Row, int]) -> dict[Row, Guess]:
        catches_up = any(drafter.num_unread(row) > UP_TO_DATE for row in numbers)  # costs what later guesses do not
        began_s = self._clock()
        guesses = drafter.guess(list(numbers.items()))
        if guesses and not catches_up and not self._is_first:  # the first one may wait for a compiler
            took_s = (self._clock() - began_s) / max(len(guess.tokens) for guess in guesses.values())
            # As of steps (Costs): a guess is never faster than it can be, but often slower.
            weight = (FASTER if took_s < self._guess_s else SLOWER) if self._guess_s else 1.0
            self._guess_s += weight * (took_s - self._guess_s)
        self._is_first = self._is_first and catches_up
        return guesses


def drafter_for(target: Runner, tokenizer: Tokenizer, draft: LoadedModel) -> Drafter:
    """The draft beside its model: on the same device, for as many tokens where there is room."""
    theirs = Tokenizer.load(draft.tokenizer_json)
    if theirs.vocab_size != tokenizer.vocab_size or any(
        theirs.decode([token], show_special=True) != tokenizer.decode([token], show_special=True)
        for token in range(0, tokenizer.vocab_size, max(tokenizer.vocab_size // SAMPLED_IDS, 1))
    ):
        todo = "give a draft that was trained with the model's tokenizer"
        raise UserError(f"draft {draft.name}", "has another tokenizer than the model", todo)
    network = target.network
    if draft.spec.context < network.spec.context:
        found = f"has a context of {draft.spec.context} tokens and the model {network.spec.context}"
        raise UserError(f"draft {draft.name}", found, "give a draft with at least the model's context")
    runner = Runner(
        draft.spec,
        draft.weights,
        tokenizer.vocab_size,
        device=network.device,
        precision=_precision(network, draft.spec),
        most_tokens=target.pool.num_blocks * BLOCK_TOKENS,
    )
    return Drafter(runner)


def _precision(target: InferenceModel, spec: Model) -> Precision:
    """On a CPU a guess costs the reading of the draft's weights: 8 bits of each where its widths allow. What a draft
    rounds is never seen in an answer."""
    if target.device.type == "cpu" and not spec.width % GROUP and not spec.ffn % GROUP:
        return "int8"
    return "f32" if target.precision == "int8" else target.precision
