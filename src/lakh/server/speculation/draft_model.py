"""A draft model: a small model with the target's tokenizer, its own network and its own KV cache.

`propose` brings the draft up to date with a sequence's tokens (the uncached part of the prompt the first time, one or
two tokens later), then continues for the requested number of tokens, all sequences together. It drafts greedily for a
greedy sequence, with the target's own noise for a seeded one (so its completion stays what it would be without a
draft), and at random for an unseeded one, with probabilities for rejection sampling. A sequence for which the draft has
no free blocks gets no draft tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field

from torch import Tensor

from lakh.server.model.block_pool import Lease
from lakh.server.model.inference import SequenceChunk
from lakh.server.model.runner import Runner
from lakh.server.sampling.tokens import probabilities, sample
from lakh.server.sequence import Sequence
from lakh.server.speculation.rejection import DraftTokens

__all__ = ["DraftModel"]


@dataclass(eq=False)
class _DraftState:
    """What the draft model has computed of one sequence."""

    lease: Lease
    ids: list[int] = field(default_factory=list)
    """Tokens whose keys and values are in the lease's blocks."""


class DraftModel:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._states: dict[Sequence, _DraftState] = {}
        self._random = random.Random()

    def propose(self, wanted: ListOf[tuple[Sequence, int]]) -> dict[Sequence, DraftTokens]:
        """At most the given number of tokens for each sequence."""
        active = [
            (seq, most, state) for seq, most in wanted if most > 0 and (state := self._state(seq, most)) is not None
        ]
        drafts = {seq: DraftTokens([], []) for seq, _, _ in active}
        done = 0
        while active := [(seq, most, state) for seq, most, state in active if most > done]:
            if done and all(seq.sampling.temperature == 0 for seq, _, _ in active):
                steps = min(most for _, most, _ in active) - done
                self._continue_greedily(active, drafts, steps)
                done += steps
                continue
            chunks = [
                SequenceChunk(drafts[seq].tokens[-1:] or seq.ids[len(state.ids) :], len(state.ids), state.lease.blocks)
                for seq, _, state in active
            ]
            logits = self._runner.forward(chunks)
            for (_, _, state), chunk in zip(active, chunks, strict=True):
                state.ids += chunk.tokens
            self._sample(logits, [seq for seq, _, _ in active], drafts)
            done += 1
        return drafts

    def warm_up(self) -> None:
        self._runner.warm_up()

    def num_pending(self, seq: Sequence) -> int:
        """Tokens to compute before the next draft; one or two after a draft in the last step."""
        state = self._states.get(seq)
        return len(seq.ids) if state is None else len(seq.ids) - min(_common(state.ids, seq.ids), len(seq.ids) - 1)

    def release(self, seq: Sequence) -> None:
        """Free the sequence's blocks; its tokens stay in the prefix cache."""
        state = self._states.pop(seq, None)
        if state is not None:
            self._runner.pool.close(state.lease, state.ids[: _common(state.ids, seq.ids)])

    def _state(self, seq: Sequence, most: int) -> _DraftState | None:
        """The sequence's state with blocks for its tokens and its draft; None if there are no blocks."""
        pool = self._runner.pool
        state = self._states.get(seq)
        if state is None:
            if len(seq.ids) // pool.block_tokens + 2 > pool.num_available:
                return None
            lease = pool.open(seq.cache_space, seq.ids)
            if lease.copy is not None:
                self._runner.copy_block(*lease.copy)
            state = self._states[seq] = _DraftState(lease, seq.ids[: lease.num_cached])
        # Rejected draft tokens are overwritten; the last token is computed again for its logits.
        state.ids = state.ids[: min(_common(state.ids, seq.ids), len(seq.ids) - 1)]
        return state if pool.extend(state.lease, len(seq.ids) + most) else None

    def _continue_greedily(
        self, active: ListOf[tuple[Sequence, int, _DraftState]], drafts: dict[Sequence, DraftTokens], steps: int
    ) -> None:
        tokens = [drafts[seq].tokens[-1] for seq, _, _ in active]
        positions = [len(state.ids) for _, _, state in active]
        generated = self._runner.greedy(tokens, positions, [state.lease.blocks for _, _, state in active], steps)
        for (seq, _, state), token, *new in zip(active, tokens, *generated, strict=True):
            state.ids += [token, *new[:-1]]
            drafts[seq].tokens.extend(new)

    def _sample(self, logits: Tensor, seqs: ListOf[Sequence], drafts: dict[Sequence, DraftTokens]) -> None:
        """One more draft token for each of these sequences."""
        samplings = [seq.sampling for seq in seqs]
        keys = []
        for seq in seqs:
            if seq.sampling.temperature == 0:
                keys.append(0)
            elif seq.sampling.seed is None:
                keys.append(self._random.getrandbits(63))
            else:
                keys.append(seq.noise_keys[len(seq.tokens) + len(drafts[seq].tokens)])
        unseeded = [at for at, seq in enumerate(seqs) if seq.is_unseeded]
        if unseeded:
            q = probabilities(logits[unseeded], [samplings[at] for at in unseeded])
            for at, vector in zip(unseeded, q, strict=True):
                drafts[seqs[at]].probabilities.append(vector)
        for seq, token in zip(seqs, sample(logits, samplings, keys), strict=True):
            drafts[seq].tokens.append(token)


def _common(left: ListOf[int], right: ListOf[int]) -> int:
    """Length of the common prefix; compares the whole first, because mostly only the end differs."""
    size = min(len(left), len(right))
    if list(left[:size]) == list(right[:size]):
        return size
    return next(at for at in range(size) if left[at] != right[at])
