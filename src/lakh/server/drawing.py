"""From scores to tokens: what rows draw at the places that a step has scored, and which guesses that confirms.

A row that guessed has several places scored: its guesses are kept while they are what is drawn, and the first other
token ends them (a draft's guesses for a row without a seed: rejection.py). Knows rows, scores and guesses; what becomes
of a row's blocks is seating.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lakh.server.counts import Counts
from lakh.server.guesses.draft import Guess
from lakh.server.guesses.guesser import Guesser
from lakh.server.guesses.rejection import keep_or_replace
from lakh.server.model.inference import SequenceChunk
from lakh.server.row import Row
from lakh.server.sampling import choose, log_probabilities, probabilities

__all__ = ["Drawing"]


class Drawing:
    def __init__(self, guesser: Guesser | None, counts: Counts) -> None:
        """`guesser` hears what became of guesses."""
        self._guesser, self._counts = guesser, counts

    def draw(
        self, rows: Sequence[Row], segments: Sequence[SequenceChunk], all_guesses: Sequence[Guess], logits: Tensor
    ) -> list[Row]:
        """A token at every scored place, and guesses while they are what was drawn; returns the rows that drew."""
        places = [(row, i) for row, segment in zip(rows, segments, strict=True) for i in range(segment.scored)]
        samplings = [row.sampling for row, _ in places]
        keys = [0 if row.sampling.temperature == 0 else row.draws[len(row.tokens) + i] for row, i in places]
        for at, (row, i) in enumerate(places):
            if row.first_ids is not None and not row.tokens and i == 0:
                logits[at] = _only(logits[at], row.first_ids)
        drawn = choose(logits, samplings, keys) if places else []
        changed = []
        end = 0
        for row, segment, guess in zip(rows, segments, all_guesses, strict=True):
            here = range(end, end + segment.scored)
            end += segment.scored
            tokens = [drawn[at] for at in here]
            if guess.probabilities:
                p = probabilities(logits[here.start : here.stop], samplings[here.start : here.stop])
                tokens = keep_or_replace(guess.tokens, guess.probabilities, list(p), lambda: float(torch.rand(())))
            row.num_computed = segment.start + len(segment.tokens) - len(guess.tokens)
            kept = self._push(row, tokens, guess.tokens, logits, here.start)
            row.num_computed += kept
            if guess.tokens and self._guesser is not None:
                self._guesser.record_guess(row, len(guess.tokens), kept)
                self._counts.drafts += 1
                self._counts.drafted_tokens += len(guess.tokens)
                self._counts.kept_tokens += kept
            if tokens:
                changed.append(row)
        return changed

    def _push(self, row: Row, tokens: Sequence[int], guesses: Sequence[int], logits: Tensor, first: int) -> int:
        """The drawn tokens, up to the first that was not guessed; returns how many guesses were right. Their scores
        are logits[first], logits[first + 1], ...
        """
        for index, token in enumerate(tokens):
            if row.sampling.logprobs is not None:
                row.logprobs.append(log_probabilities(logits[first + index], token, row.sampling.logprobs))
            row.push(token)
            self._counts.drawn_tokens += 1
            if index >= len(guesses) or guesses[index] != token:
                return index
            if row.finish_reason is not None:
                return index + 1
        return 0


def _only(logits_V: Tensor, ids: Sequence[int]) -> Tensor:
    allowed = torch.tensor(ids, device=logits_V.device)
    return torch.full_like(logits_V, -torch.inf).index_copy(0, allowed, logits_V[allowed])
