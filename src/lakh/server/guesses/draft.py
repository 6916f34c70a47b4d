"""A small model that guesses for the large one: the same tokenizer, its own network, its own blocks.

For each row that draws, `guess` brings the draft up to date with the row's tokens (the prompt the first time, as much
of it as is not remembered; one or two tokens later), then lets it go on by itself for as many tokens as are asked for,
all rows together. A greedy row is guessed greedily. A row that samples with a seed is guessed with the random numbers
that the model itself will use, so its answer stays what it would be without a draft. A row that samples without a seed
is guessed at random, and the guess comes with its probabilities for rejection.py.

The model decides what is kept; nothing here can change an answer's distribution. Where the draft has no room for a
row's keys and values, that row goes without guesses. Knows rows' tokens and sampling; knows nothing of the large model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from lakh.server.model.block_pool import Lease
from lakh.server.model.inference import Precision, SequenceChunk
from lakh.server.model.runner import Runner
from lakh.server.row import Row
from lakh.server.sampling import choose, probabilities

__all__ = ["Drafter", "Guess"]


class Guess(NamedTuple):
    tokens: list[int]
    probabilities: list[Tensor]
    """The draft's, one vector for each token, where they decide what is kept; else empty."""


@dataclass(eq=False)
class _Seat:
    """What the draft has computed of one row."""

    lease: Lease
    ids: list[int] = field(default_factory=list)
    """Tokens whose keys and values lie in the lease's blocks."""


class Drafter:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._seats: dict[Row, _Seat] = {}
        self._random = random.Random()

    def guess(self, wanted: Sequence[tuple[Row, int]]) -> dict[Row, Guess]:
        """At most so many tokens for each row."""
        seated = [(row, most, seat) for row, most in wanted if most > 0 and (seat := self._seat(row, most)) is not None]
        if not seated:
            return {}
        made = {row: Guess([], []) for row, _, _ in seated}
        segments = [
            SequenceChunk(row.ids[len(seat.ids) :], len(seat.ids), seat.lease.blocks) for row, _, seat in seated
        ]
        scores = self._runner.forward(segments)
        for row, _, seat in seated:
            seat.ids = list(row.ids)
        self._take(scores, [row for row, _, _ in seated], made)
        done = 1
        while seated := [(row, most, seat) for row, most, seat in seated if most > done]:
            if all(row.sampling.temperature == 0 for row, _, _ in seated):
                steps = min(most for _, most, _ in seated) - done
                self._go_on_greedily(seated, made, steps)
                done += steps
                continue
            segments = [
                SequenceChunk([made[row].tokens[-1]], len(seat.ids), seat.lease.blocks) for row, _, seat in seated
            ]
            scores = self._runner.forward(segments)
            for row, _, seat in seated:
                seat.ids.append(made[row].tokens[-1])
            self._take(scores, [row for row, _, _ in seated], made)
            done += 1
        return made

    def warm_up(self) -> None:
        self._runner.warm_up()

    def num_unread(self, row: Row) -> int:
        """Tokens of the row that it reads before it guesses: one or two where it guessed last time."""
        seat = self._seats.get(row)
        return len(row.ids) if seat is None else len(row.ids) - min(_common(seat.ids, row.ids), len(row.ids) - 1)

    def release(self, row: Row) -> None:
        """The row has ended or gave way: its blocks go back, what they say of its tokens stays remembered."""
        seat = self._seats.pop(row, None)
        if seat is not None:
            self._runner.pool.close(seat.lease, seat.ids[: _common(seat.ids, row.ids)])

    @property
    def precision(self) -> Precision:
        return self._runner.network.precision

    @property
    def num_used(self) -> int:
        return self._runner.pool.num_used

    def _seat(self, row: Row, most: int) -> _Seat | None:
        """The row's blocks with room for its tokens and guesses; None where there is none."""
        pool = self._runner.pool
        seat = self._seats.get(row)
        if seat is None:
            if len(row.ids) // pool.block_tokens + 2 > pool.num_available:
                return None
            lease = pool.open(row.space, row.ids)
            if lease.copy is not None:
                self._runner.copy_block(*lease.copy)
            seat = self._seats[row] = _Seat(lease, row.ids[: lease.num_cached])
        # Guesses that the model did not keep are overwritten; the last token is computed again for its scores.
        seat.ids = seat.ids[: min(_common(seat.ids, row.ids), len(row.ids) - 1)]
        if not pool.extend(seat.lease, len(row.ids) + most):
            return None
        return seat

    def _go_on_greedily(self, seated: Sequence[tuple[Row, int, _Seat]], made: dict[Row, Guess], steps: int) -> None:
        tokens = [made[row].tokens[-1] for row, _, _ in seated]
        positions = [len(seat.ids) for _, _, seat in seated]
        drawn = self._runner.greedy(tokens, positions, [seat.lease.blocks for _, _, seat in seated], steps)
        for (row, _, seat), token, *new in zip(seated, tokens, *drawn, strict=True):
            seat.ids += [token, *new[:-1]]
            made[row].tokens.extend(new)

    def _take(self, scores: Tensor, rows: Sequence[Row], made: dict[Row, Guess]) -> None:
        """One more guess for each of these rows."""
        samplings = [row.sampling for row in rows]
        keys = []
        for row in rows:
            if row.sampling.temperature == 0:
                keys.append(0)
            elif row.sampling.seed is None:
                keys.append(self._random.getrandbits(63))
            else:
                keys.append(row.draws[len(row.tokens) + len(made[row].tokens)])
        free = [at for at, row in enumerate(rows) if row.is_free]
        if free:
            q = probabilities(scores[free], [samplings[at] for at in free])
            for at, vector in zip(free, q, strict=True):
                made[rows[at]].probabilities.append(vector)
        for row, token in zip(rows, choose(scores, samplings, keys), strict=True):
            made[row].tokens.append(token)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens at the beginning that both have; the end is looked at first, where they mostly differ."""
    size = min(len(left), len(right))
    if list(left[:size]) == list(right[:size]):
        return size
    return next(at for at in range(size) if left[at] != right[at])
