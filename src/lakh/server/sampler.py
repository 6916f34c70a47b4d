"""The sampler: samples the scheduled sequences of a step and verifies their draft tokens.

A sequence with draft tokens has several scored positions. A draft token is accepted while it equals the sampled token;
the first mismatch ends the step for that sequence. Drafts with probabilities (of a draft model, for a sequence without
a seed) are verified by rejection sampling instead.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lakh.server.model.launched_step import LaunchedStep
from lakh.server.sampling.tokens import most_likely, penalise, probabilities, sample, token_logprobs
from lakh.server.scheduler import ScheduledSequence
from lakh.server.sequence import Sequence
from lakh.server.speculation.rejection import rejection_sample

__all__ = ["SampledSequence", "sample_batch"]


class SampledSequence(NamedTuple):
    num_new_tokens: int
    num_accepted: int
    """Draft tokens that the model confirmed."""


def sample_batch(batch: ListOf[ScheduledSequence], step: LaunchedStep) -> list[SampledSequence]:
    """Append the new tokens to the sequences and advance their `num_computed`."""
    sampled: list[int] = []
    if any(work.num_prompt for work in batch):
        logits = _score_prompts(batch, step.logits)
        step = LaunchedStep(logits, partial(most_likely, logits))
    if any(work.num_sampled for work in batch):
        is_greedy = all(work.seq.is_plain_greedy for work in batch)
        sampled = step.most_likely() if is_greedy else _sample(batch, step.logits)
    results = []
    end = 0
    for work in batch:
        seq, segment, draft, _ = work
        start, end = end, end + work.num_sampled
        tokens = sampled[start:end]
        if draft.probabilities:
            target = probabilities(step.logits[start:end], [seq.sampling] * work.num_sampled)
            tokens = rejection_sample(draft, list(target), lambda: float(torch.rand(())))
        seq.num_computed = segment.start + len(segment.tokens) - len(draft.tokens)
        result = _append(seq, tokens, draft.tokens, step.logits, start)
        seq.num_computed += result.num_accepted
        results.append(result)
    return results


def _score_prompts(batch: ListOf[ScheduledSequence], logits: Tensor) -> Tensor:
    """Take the log-probabilities of prompts; returns the logits of the other scored tokens."""
    sampled: list[int] = []
    end = 0
    for work in batch:
        start, end = end, end + work.segment.scored
        first = start + work.num_prompt
        if work.seq.prompt_logprobs is not None and work.num_prompt:
            computed = work.segment.start + len(work.segment.tokens)
            prompt_end = min(computed, len(work.seq.prompt) - 1)
            work.seq.prompt_logprobs.add(prompt_end, logits[start:first])
        sampled += range(first, end)
    return logits[torch.tensor(sampled, dtype=torch.long, device=logits.device)]


def _sample(batch: ListOf[ScheduledSequence], logits: Tensor) -> list[int]:
    """A token for each scored position, after what the requests demand of it."""
    positions = [(work.seq, work.draft.tokens[:i]) for work in batch for i in range(work.num_sampled)]
    keys = [
        0 if seq.sampling.temperature == 0 else seq.noise_keys[len(seq.tokens) + len(drafted)]
        for seq, drafted in positions
    ]
    constrained = {work.seq for work in batch if work.seq.is_constrained}
    for at, (seq, drafted) in enumerate(positions):
        if seq in constrained:
            _constrain(logits[at], seq, drafted)
    return sample(logits, [seq.sampling for seq, _ in positions], keys)


def _append(seq: Sequence, tokens: ListOf[int], draft: ListOf[int], logits: Tensor, start: int) -> SampledSequence:
    """Append the sampled tokens up to the first that differs from the draft. Their logits begin at `start`."""
    if tokens and seq.sampling.max_tokens == 0:  # only the prompt was asked for
        seq.finish("length")
        return SampledSequence(0, 0)
    for index, token in enumerate(tokens):
        if seq.sampling.logprobs is not None:
            seq.logprobs.append(token_logprobs(logits[start + index], token, seq.sampling.logprobs))
        seq.append(token)
        if index >= len(draft) or draft[index] != token:
            return SampledSequence(index + 1, index)
        if seq.finish_reason is not None:
            return SampledSequence(index + 1, index + 1)
    return SampledSequence(0, 0)


def _constrain(logits_V: Tensor, seq: Sequence, drafted: ListOf[int]) -> None:
    """Apply what a request demands of the next token, after its tokens and these drafted ones, in place."""
    sampling, num_tokens = seq.sampling, len(seq.tokens) + len(drafted)
    if seq.matcher is not None:
        _mask(logits_V, seq, drafted)
    allowed = seq.allowed_ids(drafted)
    if allowed is not None:
        logits_V.copy_(_restrict(logits_V, allowed))
    if sampling.has_penalties:
        logits_V.copy_(penalise(logits_V, sampling, seq.prompt, [*seq.tokens, *drafted]))
    if num_tokens < sampling.min_tokens:
        logits_V[list(seq.end_ids)] = -torch.inf


def _mask(logits_V: Tensor, seq: Sequence, drafted: ListOf[int]) -> None:
    assert seq.matcher is not None
    allowed_V = seq.matcher.allowed(drafted)
    if allowed_V is None:
        return
    if seq.matcher.error is None and allowed_V.any():
        logits_V.masked_fill_(torch.from_numpy(~allowed_V).to(logits_V.device), -torch.inf)
    elif not drafted:
        seq.fail(seq.matcher.error or "no token of the vocabulary can follow")


def _restrict(logits_V: Tensor, ids: ListOf[int]) -> Tensor:
    allowed = torch.tensor(ids, device=logits_V.device)
    return torch.full_like(logits_V, -torch.inf).index_copy(0, allowed, logits_V[allowed])
