"""Decode-ahead (asynchronous scheduling): greedy steps launched on the GPU before earlier tokens are read.

The GPU uses the blocks that the sequences had at the start, also for a sequence that has finished since. Meanwhile
blocks may be freed but none allocated: no sequence starts or grows. Later launches follow on the same stream, so a
decode-ahead can be dropped at any time with steps unread; the sequences continue from the tokens that were read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lakh.server.scheduler import Scheduler, steps_to_launch
from lakh.server.sequence import Sequence

if TYPE_CHECKING:
    from lakh.server.model.gpu.decode import Decoder
    from lakh.server.model.gpu.decode_batch import MultiStepDecode

__all__ = ["DecodeAhead"]


STEPS_OF_BATCH = 64
"""Steps of a decode-ahead of many sequences. One of few sequences has more: between two of them the GPU is idle for a
tenth of a millisecond. Blocks are reserved for all steps."""


class DecodeAhead:
    def __init__(self, seqs: Iterable[Sequence], burst: MultiStepDecode, max_steps: int) -> None:
        """The sequences hold blocks for up to `max_steps` steps."""
        self.seqs = list(seqs)
        self.num_read = 0
        self.spent_s = 0.0
        """The engine's own time, without what its caller does between steps."""
        self._burst, self._max_steps, self._launched = burst, max_steps, 0

    @classmethod
    def start(
        cls, scheduler: Scheduler, decoder: Decoder, context: int, max_steps: int | None = None
    ) -> DecodeAhead | None:
        """Reserve blocks and prepare the GPU's batch.

        None unless every running sequence is greedy and past its prompt, none waits, and there are blocks.
        """
        seqs = scheduler.running
        if scheduler.waiting or not 0 < len(seqs) <= decoder.max_sequences:
            return None
        if not all(
            seq.is_plain_greedy and seq.num_pending == 1 and len(seq.tokens) < seq.max_new_tokens for seq in seqs
        ):
            return None
        # A finished sequence keeps writing: none may reach the end of the context.
        most = min(decoder.max_steps, max(decoder.max_steps // len(seqs), STEPS_OF_BATCH))
        steps = min(most, context + 1 - max(len(seq.ids) for seq in seqs), max_steps or most)
        while steps and not scheduler.reserve_ahead(steps):
            steps //= 2
        if not steps:
            return None
        blocks = [seq.lease.blocks for seq in seqs if seq.lease is not None]
        burst = decoder.multi_step([seq.ids[-1] for seq in seqs], [seq.num_computed for seq in seqs], blocks)
        return cls(seqs, burst, steps)

    @property
    def is_done(self) -> bool:
        """Every launched step was read, or every sequence has finished."""
        return self._launched == self.num_read or all(seq.finish_reason is not None for seq in self.seqs)

    def launch(self) -> int:
        """Launch the steps allowed before the next read; returns their number."""
        before = self._launched
        left = [0 if seq.finish_reason is not None else seq.max_new_tokens - len(seq.tokens) for seq in self.seqs]
        while steps := min(steps_to_launch(left, self._launched - self.num_read), self._max_steps - self._launched):
            self._burst.launch(steps)
            self._launched += steps
        return self._launched - before

    def read(self) -> int:
        """Wait for the oldest steps and append their tokens; returns the number of tokens.

        If this fails, only some sequences have their tokens: drop the decode-ahead.
        """
        steps = self._burst.read()
        self.num_read += len(steps)
        num_tokens = 0
        for seq, *tokens in zip(self.seqs, *steps, strict=True):
            before = len(seq.tokens)
            for token in tokens:
                seq.append(token)
            seq.num_computed += len(seq.tokens) - before
            num_tokens += len(seq.tokens) - before
        return num_tokens
