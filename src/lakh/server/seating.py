"""Who waits, who is at work, and the blocks that each row at work holds.

Rows come in by `submit`, are let in by `admit` in the order of arrival while there is room for their prompts, bring to
a step what `plan` says, and leave by `settle` (they ended) or `abort`. When blocks run out the youngest row gives its
blocks back, goes to the head of the queue and is computed again later (`make_room`); what it drew so far then counts as
prompt.

Knows rows, blocks and a clock; knows nothing of scores. Not locked: the engine's lock is around every call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from lakh.server.counts import Counts
from lakh.server.guesses.draft import Guess
from lakh.server.model.block_pool import BLOCK_TOKENS
from lakh.server.model.inference import SequenceChunk
from lakh.server.model.runner import Runner
from lakh.server.phases import Phases
from lakh.server.row import Row
from lakh.server.schedule import share_budget

__all__ = ["Seating", "Work"]

NO_GUESS = Guess([], [])
Work = tuple[list[SequenceChunk], list[Row], list[Guess]]
"""Of one step: what each row brings, the rows, and the guesses among it."""


class Seating:
    def __init__(
        self, runner: Runner, counts: Counts, clock: Callable[[], float], released: Callable[[Row], None]
    ) -> None:
        """`released` hears of every row that gives its blocks back."""
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.phases = Phases()
        self._runner, self._pool, self._counts = runner, runner.pool, counts
        self._clock, self._released = clock, released

    def submit(self, rows: Sequence[Row]) -> None:
        """In the order of arrival."""
        now_s = self._clock()
        for row in rows:
            row.arrived_s = now_s
        self.waiting.extend(rows)

    def abort(self, rows: Sequence[Row]) -> None:
        """End these rows and free their blocks, now. Says nothing to rows that have ended."""
        for row in rows:
            if row.finish_reason is None:
                row.finish("abort")
                self._counts.aborted_rows += 1
            if row in self.running:
                self.running.remove(row)
            elif row in self.waiting:
                self.waiting.remove(row)
            self._release(row)

    def expire(self) -> list[Row]:
        """Abort the rows that are past their deadline."""
        now_s = self._clock()
        late = [row for row in (*self.waiting, *self.running) if row.deadline_s is not None and row.deadline_s < now_s]
        self.abort(late)
        return late

    def admit(self, max_rows: int, weights_version: int) -> None:
        """Let rows in while there is room for their prompts. One prompt many times is computed once, then shared: by
        rows of one space. Those of another never wait for it, or they would tell from the time that it is asked.
        """
        computing = {(row.space, row.prompt) for row in self.running if row.num_pending > 1}
        held_back: list[Row] = []
        while self.waiting and len(self.running) < max_rows:
            row = self.waiting[0]
            if len(row.ids) // BLOCK_TOKENS + 2 > self._pool.num_available and self.running:
                break
            self.waiting.popleft()
            if (row.space, row.prompt) in computing and len(row.prompt) > BLOCK_TOKENS:
                held_back.append(row)
                continue
            tokens = row.ids if row.tokens else row.prompt  # the same; of a tuple parts are cut faster
            row.lease = self._pool.open((row.space, weights_version), tokens)
            if row.lease.copy is not None:
                self._runner.copy_block(*row.lease.copy)
            row.num_computed = row.lease.num_cached
            row.began_s = row.began_s or self._clock()
            if not row.tokens:
                row.num_cached = row.lease.num_cached
                self._counts.prompt_tokens += len(row.prompt)
                self._counts.cached_tokens += row.num_cached
            if row.num_pending > 1:
                computing.add((row.space, row.prompt))
            self.running.append(row)
        self.waiting.extendleft(reversed(held_back))

    def plan(self, guesses: Mapping[Row, Guess], step_tokens: int) -> Work:
        """What every row brings to this step, with room for it; the youngest rows give way where there is none."""
        counts = share_budget([row.num_pending for row in self.running], step_tokens).counts
        work = [(row, count) for row, count in zip(self.running, counts, strict=True) if count]
        segments, rows, all_guesses = [], [], []
        for row, count in work:
            if row.lease is None:  # gave way to an older row
                continue
            guess = guesses.get(row, NO_GUESS)
            end = row.num_computed + count
            if not self._pool.extend(row.lease, end + len(guess.tokens)):
                guess = NO_GUESS
                self.make_room(row, end)
                if row.lease is None:
                    continue
            is_last = end == len(row.ids)
            new = [*row.ids[row.num_computed : end], *guess.tokens]
            segments.append(
                SequenceChunk(new, row.num_computed, row.lease.blocks, len(guess.tokens) + 1 if is_last else 0)
            )
            rows.append(row)
            all_guesses.append(guess)
        return segments, rows, all_guesses

    def make_room(self, row: Row, num_tokens: int) -> None:
        """For so many tokens of this row in all, at the cost of the youngest: it may be the row itself."""
        while row.lease is not None and not self._pool.extend(row.lease, num_tokens):
            self._give_way(self.running[-1])

    def make_room_ahead(self, steps: int) -> bool:
        """For so many more tokens of every row, as far as it may draw; False, and nothing changed, where that takes
        more than half of the blocks that could be had: whoever comes next needs some.
        """
        leases = [row.lease for row in self.running if row.lease is not None]
        ends = [row.num_computed + min(steps, row.limit - len(row.tokens)) for row in self.running]
        pairs = list(zip(leases, ends, strict=True))
        missing = sum(max(-(-end // BLOCK_TOKENS) - len(lease.blocks), 0) for lease, end in pairs)
        return 2 * missing <= self._pool.num_available and all(self._pool.extend(lease, end) for lease, end in pairs)

    def clear(self) -> None:
        """Everyone at work gives way."""
        while self.running:
            self._give_way(self.running[-1])

    def settle(self, row: Row) -> None:
        """After a step: a row that ended leaves, another shares what it has computed."""
        assert row.lease is not None
        if row.tokens and row.first_s is None:
            row.first_s = self._clock()
        if row.finish_reason is not None:
            self.running.remove(row)
            self._release(row)
            self._count_phases(row)
        elif row.num_computed // BLOCK_TOKENS > len(row.lease.nodes):
            self._pool.share(row.lease, row.ids[: row.num_computed])

    def _count_phases(self, row: Row) -> None:
        if row.began_s is not None and row.first_s is not None:
            self.phases.add(
                arrived_s=row.arrived_s,
                began_s=row.began_s,
                first_s=row.first_s,
                last_s=self._clock(),
                num_tokens=len(row.tokens),
            )

    def _give_way(self, row: Row) -> None:
        self.running.remove(row)
        self._release(row)
        self.waiting.appendleft(row)
        self._counts.preempted_rows += 1

    def _release(self, row: Row) -> None:
        if row.lease is not None:
            self._pool.close(row.lease, row.ids[: row.num_computed])
            row.lease, row.num_computed = None, 0
        self._released(row)
