"""The scheduler: waiting and running queues, KV-cache blocks, and how many tokens each sequence computes in a step.

Sequences start while there are blocks for their prompts: in order of arrival for one tenant, and fairly between several
(fairness.py). A tenant with nothing running does not wait for another's long completions: the youngest of the tenant
with the most is preempted for it. In a step, decoding sequences go first
with one token and their draft tokens each, so a long prompt never stalls them; the rest of the token budget goes to
prompts in order of arrival, in chunks. When blocks run out, the youngest running sequence is preempted: it gives its
blocks back, moves to the head of the waiting queue and is recomputed later.

Not thread-safe: the engine's lock guards every call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from lakh.server.fairness import ShareCounts
from lakh.server.metrics import EngineCounters, EngineMetrics
from lakh.server.model.block_pool import BLOCK_TOKENS, Lease
from lakh.server.model.inference import SequenceChunk
from lakh.server.model.runner import Runner
from lakh.server.sequence import Sequence
from lakh.server.speculation.rejection import DraftTokens

__all__ = [
    "MIN_PROMPT_TOKENS",
    "ScheduledSequence",
    "Scheduler",
    "drafts_within",
    "prompt_tokens_within",
    "split_token_budget",
    "steps_between_proposals",
    "steps_to_launch",
]

NO_DRAFT = DraftTokens([], [])
MIN_PROMPT_TOKENS = 32  # fewer read the weights too often
MAX_PROMPT_TOKENS = 1 << 20


class ScheduledSequence(NamedTuple):
    """What one sequence computes in a step."""

    seq: Sequence
    segment: SequenceChunk
    draft: DraftTokens
    num_prompt: int = 0
    """Of the scored tokens, the first ones: their logits are for log-probabilities of the prompt."""

    @property
    def num_sampled(self) -> int:
        return self.segment.scored - self.num_prompt


class Scheduler:
    def __init__(
        self,
        runner: Runner,
        counters: EngineCounters,
        clock: Callable[[], float],
        on_release: Callable[[Sequence], None],
    ) -> None:
        """Calls `on_release` for every sequence that gives its blocks back. `observer` may be set later."""
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.observer: EngineMetrics | None = None
        self.prompts_first = False
        """Decoding sequences wait while prompts fill whole steps. More tokens/s of a batch that starts at once, because
        its sequences then decode and finish together; a stream pauses meanwhile."""
        self._runner, self._pool, self._counters = runner, runner.pool, counters
        self._clock, self._on_release = clock, on_release

    def submit(self, seqs: Iterable[Sequence]) -> None:
        now_s = self._clock()
        for seq in seqs:
            seq.arrived_s = now_s
            self.waiting.append(seq)

    def abort(self, seqs: Iterable[Sequence]) -> None:
        """Finish these sequences and free their blocks now. No-op for finished ones."""
        for seq in seqs:
            if seq.finish_reason is None:
                seq.finish("abort")
                self._counters.aborted_seqs += 1
            if seq in self.running:
                self.running.remove(seq)
            elif seq in self.waiting:
                self.waiting.remove(seq)
            self._release(seq)

    def abort_expired(self) -> list[Sequence]:
        """Abort the sequences that are past their deadline."""
        now_s = self._clock()
        late = [seq for seq in (*self.waiting, *self.running) if seq.is_late(now_s)]
        self.abort(late)
        return late

    def admit(self, max_seqs: int, weights_version: int) -> None:
        """Start waiting sequences while there are blocks for their prompts.

        Sequences with the same prompt in one cache space wait for the first to compute it, then share its blocks.
        Sequences of another space never wait for it: the delay would reveal that the prompt is in use.
        """
        if not self.waiting:
            return
        computing = {seq.prefill_key for seq in self.running if seq.num_pending > 1}
        counts = ShareCounts(seq.share for seq in self.running)
        held_back: list[Sequence] = []
        while self.waiting:
            index = counts.next_to_start([seq.share for seq in self.waiting])
            seq = self.waiting[index]
            if not self._make_room(seq, max_seqs, counts):
                break
            self.waiting.remove(seq)
            key = seq.prefill_key
            if key in computing and len(seq.prompt) > BLOCK_TOKENS:
                held_back.append(seq)
                continue
            self._open_lease(seq, weights_version)
            self.running.append(seq)
            counts.add(seq.share)
            if seq.num_pending > 1:
                computing.add(key)
        self.waiting.extendleft(reversed(held_back))

    def _make_room(self, seq: Sequence, max_seqs: int, counts: ShareCounts) -> bool:
        """Whether there is room to start a sequence, after preempting others where its share has nothing running."""
        while self.running:
            num_blocks = len(seq.ids) // BLOCK_TOKENS + 2
            if len(self.running) < max_seqs and num_blocks <= self._pool.num_available:
                break
            victim = counts.to_preempt(seq.share, [one.share for one in self.running])
            if victim is None:
                return False
            counts.add(self.running[victim].share, -1)
            self._preempt(self.running[victim])
        return True

    def admit_reserved(
        self,
        max_seqs: int,
        weights_version: int,
        *,
        num_tokens: Callable[[Sequence], int],
        prefill: Callable[[list[Sequence]], None],
        prefill_tokens: int,
    ) -> None:
        """Offline admission: reserve blocks for all tokens of a sequence (`num_tokens`), so none is ever preempted.

        Calls `prefill` for batches of about `prefill_tokens` prompt tokens; it computes all but the last token of each
        prompt. Copies of a prompt that is running share its blocks and copy its partial block.
        """
        running = {seq.prompt: seq for seq in self.running}
        batch: list[Sequence] = []
        batch_tokens = 0

        def compute() -> None:
            nonlocal batch_tokens
            if batch:
                prefill(batch)
            for seq in batch:
                assert seq.lease is not None
                seq.num_computed = len(seq.prompt) - 1
                self._pool.share(seq.lease, seq.prompt[:-1])
            batch.clear()
            batch_tokens = 0

        while self.waiting and len(self.running) < max_seqs:
            seq = self.waiting[0]
            twin = running.get(seq.prompt)
            if twin is not None and any(twin is one for one in batch):
                compute()  # so that this copy finds the blocks of the first
            lease = self._open_lease(seq, weights_version)
            if not self._pool.extend(lease, num_tokens(seq)):
                self._pool.close(lease, seq.prompt[: lease.num_cached])
                seq.lease, seq.num_computed = None, 0
                assert self.running, "the cache holds less than one context"
                break
            self.running.append(self.waiting.popleft())
            needed = len(seq.prompt) - 1
            if twin is not None and twin.lease is not None and seq.num_computed < needed:
                for index in range(seq.num_computed // BLOCK_TOKENS, -(-needed // BLOCK_TOKENS)):
                    self._runner.copy_block(twin.lease.blocks[index], lease.blocks[index])
                seq.num_computed = needed
            if seq.num_computed < needed:
                batch.append(seq)
                batch_tokens += needed - seq.num_computed
                if batch_tokens >= prefill_tokens:
                    compute()
            running.setdefault(seq.prompt, seq)
        compute()

    def _open_lease(self, seq: Sequence, weights_version: int) -> Lease:
        """Give a sequence the cached blocks of its prefix."""
        if seq.prompt_logprobs is not None:
            seq.has_mixed_weights |= not seq.prompt_logprobs.begin(weights_version)
        lease = seq.lease = self._pool.open((seq.prefix_space, weights_version), seq.reusable_ids)
        seq.has_mixed_weights |= bool(seq.tokens) and seq.weights_version != weights_version
        seq.weights_version = weights_version
        if lease.copy is not None:
            self._runner.copy_block(*lease.copy)
        seq.num_computed = lease.num_cached
        seq.started_s = seq.started_s or self._clock()
        if not seq.tokens:
            seq.num_cached = lease.num_cached
            self._counters.prompt_tokens += len(seq.prompt)
            self._counters.cached_tokens += seq.num_cached
        return lease

    def schedule(self, drafts: Mapping[Sequence, DraftTokens], step_tokens: int) -> list[ScheduledSequence]:
        """What every running sequence computes in this step. Preempts the youngest where blocks run out."""
        limits, room = self._runner.step_limits, self._runner.max_prompt_logits
        if limits is not None:  # draft tokens count: beside a long prompt they would make the step too large
            num_scored = limits.scored - len(self.running)
            if any(seq.scores_prompt for seq in self.running):
                num_scored //= 2  # leave half to prompts
            drafts = drafts_within(drafts, num_scored)
            num_drafted = sum(len(draft.tokens) for draft in drafts.values())
            step_tokens = min(step_tokens, limits.tokens - num_drafted)
            room = min(room, limits.scored - len(self.running) - num_drafted)
        pending = _scorable([(seq.num_pending, seq.scores_prompt) for seq in self.running], room)
        counts = split_token_budget(pending, step_tokens, prompts_first=self.prompts_first).counts
        planned = [(seq, count) for seq, count in zip(self.running, counts, strict=True) if count]
        batch = []
        for seq, count in planned:
            if seq.lease is None:  # preempted for an older sequence
                continue
            draft = drafts.get(seq, NO_DRAFT)
            end = seq.num_computed + count
            if not self._pool.extend(seq.lease, end + len(draft.tokens)):
                draft = NO_DRAFT
                while seq.lease is not None and not self._pool.extend(seq.lease, end):
                    self._preempt(self.running[-1])  # which may be the sequence itself
                if seq.lease is None:
                    continue
            num_sampled = len(draft.tokens) + 1 if end == len(seq.ids) else 0
            num_prompt = 0 if seq.prompt_logprobs is None else seq.prompt_logprobs.num_needed(end)
            tokens = [*seq.ids[seq.num_computed : end], *draft.tokens]
            chunk = SequenceChunk(tokens, seq.num_computed, seq.lease.blocks, num_prompt + num_sampled, seq.adapter)
            batch.append(ScheduledSequence(seq, chunk, draft, num_prompt))
        return batch

    def reserve_ahead(self, num_steps: int) -> bool:
        """Reserve blocks for up to `num_steps` more tokens of every running sequence.

        Returns False and changes nothing if that takes more than half of the available blocks: the next request needs
        some.
        """
        leases = [seq.lease for seq in self.running if seq.lease is not None]
        ends = [seq.num_computed + min(num_steps, seq.max_new_tokens - len(seq.tokens)) for seq in self.running]
        pairs = list(zip(leases, ends, strict=True))
        missing = sum(max(-(-end // BLOCK_TOKENS) - len(lease.blocks), 0) for lease, end in pairs)
        return 2 * missing <= self._pool.num_available and all(self._pool.extend(lease, end) for lease, end in pairs)

    def preempt_all(self) -> None:
        while self.running:
            self._preempt(self.running[-1])

    def finish(self, seq: Sequence) -> None:
        """Remove a finished sequence and free its blocks."""
        self.running.remove(seq)
        self._release(seq)

    def finish_step(self, seq: Sequence) -> None:
        """Remove a finished sequence; share the full blocks of any other."""
        assert seq.lease is not None
        if seq.tokens and seq.first_token_s is None:
            seq.first_token_s = self._clock()
        if seq.finish_reason is not None:
            self.finish(seq)
            if self.observer is not None:
                self.observer.observe_completion(seq, self._clock(), len(seq.tokens))
        elif seq.num_computed // BLOCK_TOKENS > len(seq.lease.nodes):
            self._pool.share(seq.lease, seq.ids[: seq.num_computed])

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._release(seq)
        self.waiting.appendleft(seq)
        self._counters.preempted_seqs += 1

    def _release(self, seq: Sequence) -> None:
        if seq.lease is not None:
            self._pool.close(seq.lease, seq.ids[: seq.num_computed])
            seq.lease, seq.num_computed = None, 0
        self._on_release(seq)


# --- pure decisions ---


class TokenBudget(NamedTuple):
    pending: list[int]
    """Tokens that each running sequence has to compute, in order of arrival."""
    counts: list[int]
    """Of these, in this step; 0 waits for the next step."""

    @property
    def reason(self) -> str:
        given = [(pending, count) for pending, count in zip(*self, strict=True) if count]
        prompts = [pending > count for pending, count in given if pending > 1]
        part = f"{len(prompts)} prompts advance ({sum(prompts)} in part)"
        return f"{len(given) - len(prompts)} decode, {part}, {self.counts.count(0)} wait"


def split_token_budget(pending: list[int], budget: int, *, prompts_first: bool = False) -> TokenBudget:
    """At least one sequence gets work. `prompts_first`: if prompts fill the step, decoding sequences wait."""
    waits = prompts_first and sum(count for count in pending if count > 1) >= max(budget, 1)
    counts = [int(count == 1 and not waits) for count in pending]
    left = max(budget - sum(counts), 0 if any(counts) else 1)
    for index, count in enumerate(pending):
        if count > 1 and left > 0:
            counts[index] = min(count, left)
            left -= counts[index]
    return TokenBudget(pending, counts)


def _scorable(pending: list[tuple[int, bool]], room: int) -> list[int]:
    """The pending tokens of each sequence; of those whose prompt is scored (True), in order of arrival and at least
    one, `room` in all: each needs the logits of the whole vocabulary.
    """
    counts = []
    room = max(room, 1)
    for count, is_scored in pending:
        counts.append(min(count, room) if is_scored else count)
        room -= counts[-1] if is_scored else 0
    return counts


def prompt_tokens_within(seconds: float, took_s: float, num_tokens: int) -> int:
    """Prompt tokens that fit into a step of `seconds` where `num_tokens` took `took_s`, but at least MIN_PROMPT_TOKENS.
    A token costs more the more tokens are before it.
    """
    return max(MIN_PROMPT_TOKENS, int(seconds * num_tokens / took_s)) if took_s > 0 else MAX_PROMPT_TOKENS


def drafts_within(drafts: Mapping[Sequence, DraftTokens], num_tokens: int) -> dict[Sequence, DraftTokens]:
    """The drafts of the first sequences, up to this number of tokens in all."""
    kept = {}
    for seq, draft in drafts.items():
        num_tokens -= len(draft.tokens)
        if num_tokens < 0:
            break
        kept[seq] = draft
    return kept


class _DecodeAheadLimits(NamedTuple):
    min_seqs: int
    steps_ahead: int
    """Greedy steps the GPU may run ahead of the last token that the host has read."""
    steps_between_proposals: int


_LIMITS = (
    _DecodeAheadLimits(32, 4, 8),
    _DecodeAheadLimits(9, 2, 4),
    _DecodeAheadLimits(2, 2, 2),
    _DecodeAheadLimits(1, 4, 8),
)


def steps_between_proposals(num_seqs: int) -> int:
    """Greedy steps before draft tokens are looked for again: fewer where a step serves few sequences and a draft can
    gain more. A single sequence whose text repeats nothing can wait.
    """
    return _limits(num_seqs).steps_between_proposals


def steps_to_launch(left: list[int], unread: int) -> int:
    """Greedy steps to launch now. `left`: tokens that each sequence may still sample after what was read; `unread`:
    steps launched since.

    A request that arrives meanwhile waits for everything launched, so launch only as many steps as hide the host's work
    on the tokens of half of them (64 sequences, 1.2B parameters, H200: 1.1 ms; a step takes 2.1 ms). Finished sequences
    cost a step as much as the others, so do not launch a step that half of the sequences do not need.
    """
    ahead = _limits(len(left)).steps_ahead
    more = [max(count - unread, 0) for count in left]
    steps = min(ahead - unread, ahead // 2, max(more))
    while steps > 0 and 2 * sum(count >= steps for count in more) <= len(left):
        steps -= 1
    return max(steps, 0)


def _limits(num_seqs: int) -> _DecodeAheadLimits:
    return next(limits for limits in _LIMITS if num_seqs >= limits.min_seqs)
