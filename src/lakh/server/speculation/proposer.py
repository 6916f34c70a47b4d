"""Proposes draft tokens before a step and records afterwards how many were accepted.

Keeps each sequence's prompt lookup and acceptance rates, and for all sequences together the cost of steps and drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lakh.errors import UserError
from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.inference import InferenceModel, Precision, not_quantizable
from lakh.server.model.runner import Runner
from lakh.server.model.weights import LoadedModel
from lakh.server.sequence import Sequence
from lakh.server.speculation.draft_model import DraftModel
from lakh.server.speculation.policy import MAX_DRAFT_TOKENS, AcceptanceRate, DraftLength, StepCosts, choose_draft_length
from lakh.server.speculation.prompt_lookup import PromptLookup
from lakh.server.speculation.rejection import DraftTokens
from lakh.spec.model import Model
from lakh.tokens.tokenizer import Tokenizer

__all__ = ["Proposer", "load_draft_model"]

UNAVAILABLE = DraftLength(0, "this kind of draft is not available")
RETRY_EVERY = 64  # steps without draft tokens of any sequence, after which one tries again
UP_TO_DATE = 2  # tokens that a draft model has yet to compute for a sequence it drafted for in the last step
COMPARED_IDS = 512  # of two tokenizers, to check that they are the same


@dataclass
class _DraftHistory:
    """Acceptance of a sequence's draft tokens, by where they came from."""

    lookup: AcceptanceRate = field(default_factory=AcceptanceRate)
    model: AcceptanceRate = field(default_factory=AcceptanceRate)
    prompt_lookup: PromptLookup = field(default_factory=PromptLookup)
    is_from_model: bool = False
    """The latest draft came from the draft model."""


class Proposer:
    def __init__(
        self, context: int, clock: Callable[[], float], draft_model: DraftModel | None, *, uses_lookup: bool
    ) -> None:
        """Uses prompt lookup, which is free, unless the draft model promises a larger speedup."""
        self.draft_model = draft_model
        self._context, self._clock, self._uses_lookup = context, clock, uses_lookup
        self._histories: dict[Sequence, _DraftHistory] = {}
        self._global = _DraftHistory()  # initial rates of a new sequence
        self._costs, self._draft_costs = StepCosts(), StepCosts()  # of steps, and of one draft token
        self._is_first = True

    def propose(self, running: Iterable[Sequence]) -> dict[Sequence, DraftTokens]:
        """Draft tokens for the decoding sequences, as many as pay off."""
        decoding = [seq for seq in running if seq.num_pending == 1 and seq.tokens]
        looked_up: dict[Sequence, DraftTokens] = {}
        lengths: dict[Sequence, int] = {}
        draft_s = self._draft_costs.of(1) or 0.0
        for seq in decoding:
            history = self._history(seq)
            most = min(MAX_DRAFT_TOKENS, seq.max_new_tokens - len(seq.tokens) - 1, self._context - len(seq.ids) - 1)
            if most < 1:
                continue
            by_model, by_lookup = UNAVAILABLE, UNAVAILABLE
            if self.draft_model:
                by_model = self._length(history.model, self._global.model, most, len(decoding), draft_s)
            if self._uses_lookup:
                by_lookup = self._length(history.lookup, self._global.lookup, most, len(decoding), 0.0)
            if by_lookup.num_tokens and (not by_model.num_tokens or by_lookup.speedup > by_model.speedup):
                tokens = history.prompt_lookup.propose(seq.ids, by_lookup.num_tokens)
                if tokens:
                    looked_up[seq] = DraftTokens(tokens, [])
                    self._global.lookup.steps_since_draft = 0
                    continue
            if by_model.num_tokens:
                lengths[seq] = by_model.num_tokens
        drafted = self._draft(self.draft_model, lengths) if self.draft_model and lengths else {}
        for seq in drafted:
            self._global.model.steps_since_draft = 0
            self._histories[seq].is_from_model = True
        for seq in looked_up:
            self._histories[seq].is_from_model = False
        return looked_up | drafted

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Record the cost of a step in which every sequence only decodes."""
        self._costs.record(num_tokens, seconds)

    def record_acceptance(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        is_from_model = self._histories[seq].is_from_model
        for history in (self._histories[seq], self._global):
            (history.model if is_from_model else history.lookup).add(num_drafted, num_accepted)

    def release(self, seq: Sequence) -> None:
        """The sequence has finished or was preempted."""
        if self.draft_model is not None:
            self.draft_model.release(seq)
        if seq.finish_reason is not None:
            self._histories.pop(seq, None)

    def warm_up(self) -> None:
        if self.draft_model is not None:
            self.draft_model.warm_up()

    def _history(self, seq: Sequence) -> _DraftHistory:
        if seq not in self._histories:
            self._histories[seq] = _DraftHistory(
                AcceptanceRate(self._global.lookup.acceptance), AcceptanceRate(self._global.model.acceptance)
            )
        return self._histories[seq]

    def _length(
        self, rate: AcceptanceRate, global_rate: AcceptanceRate, most: int, num_decoding: int, draft_s: float
    ) -> DraftLength:
        """By the sequence's own rate; retries are timed globally, because most sequences are short."""
        length = choose_draft_length(
            acceptance=rate.acceptance, num_seqs=num_decoding, costs=self._costs, draft_s=draft_s, max_tokens=most
        )
        global_rate.steps_since_draft += 1
        if length.num_tokens == 0 and global_rate.steps_since_draft >= RETRY_EVERY:
            return DraftLength(1, f"no draft for {RETRY_EVERY} steps, trying again")
        return length

    def _draft(self, draft_model: DraftModel, lengths: dict[Sequence, int]) -> dict[Sequence, DraftTokens]:
        # Catching up with new tokens has a cost that later drafts do not have.
        catches_up = any(draft_model.num_pending(seq) > UP_TO_DATE for seq in lengths)
        began_s = self._clock()
        drafts = draft_model.propose(list(lengths.items()))
        if drafts and not catches_up and not self._is_first:  # the first draft may wait for a compiler
            token_s = (self._clock() - began_s) / max(len(draft.tokens) for draft in drafts.values())
            self._draft_costs.record(1, token_s)
        self._is_first = self._is_first and catches_up
        return drafts


def load_draft_model(target: Runner, tokenizer: Tokenizer, draft: LoadedModel) -> DraftModel:
    """The draft model on the target's device, with a cache for as many tokens as fit, up to the target's."""
    theirs = Tokenizer.load(draft.tokenizer_json)
    if theirs.vocab_size != tokenizer.vocab_size or any(
        theirs.decode([token], show_special=True) != tokenizer.decode([token], show_special=True)
        for token in range(0, tokenizer.vocab_size, max(tokenizer.vocab_size // COMPARED_IDS, 1))
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
    return DraftModel(runner)


def _precision(target: InferenceModel, spec: Model) -> Precision:
    """On a CPU, drafting costs the reading of the draft's weights: int8 where the widths allow it. Rounding in the
    draft never shows in a completion.
    """
    if target.device.type == "cpu" and not_quantizable(spec) is None:
        return "int8"
    return "bf16" if target.precision == "bf16" else "f32"
