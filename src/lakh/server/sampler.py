"""The sampler: samples the scheduled sequences of a step and verifies their draft tokens.

A sequence with draft tokens has several scored positions. A draft token is accepted while it equals the sampled token;
the first mismatch ends the step for that sequence. Drafts with probabilities (of a draft model, for a sequence without
a seed) are verified by rejection sampling instead.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from functools import partial
from typing import NamedTuple

import numpy as np
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
    exhausted: set[int] = set()
    if any(work.num_prompt for work in batch):
        logits = _score_prompts(batch, step.logits)
        step = LaunchedStep(logits, partial(most_likely, logits))
    if any(work.num_sampled for work in batch):
        is_greedy = all(work.seq.is_plain_greedy for work in batch)
        if is_greedy:
            sampled = step.most_likely()
        else:
            exhausted = _constrain_batch(batch, step.logits)
            sampled = _sample(batch, step.logits)
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
        result = _append(seq, tokens, draft.tokens, step.logits, start, exhausted)
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


def _positions(batch: ListOf[ScheduledSequence]) -> list[tuple[Sequence, list[int]]]:
    """The sequence of each scored position, and the draft tokens before it."""
    return [(work.seq, work.draft.tokens[:i]) for work in batch for i in range(work.num_sampled)]


def _constrain_batch(batch: ListOf[ScheduledSequence], logits: Tensor) -> set[int]:
    """Apply what the requests demand of their tokens, in place. Returns the positions that no id may follow."""
    constrained = {work.seq for work in batch if work.seq.is_constrained}
    if not constrained:
        return set()
    return {
        at
        for at, (seq, drafted) in enumerate(_positions(batch))
        if seq in constrained and not _constrain(logits[at], seq, drafted)
    }


def _sample(batch: ListOf[ScheduledSequence], logits: Tensor) -> list[int]:
    """A token for each scored position."""
    positions = _positions(batch)
    keys = [
        0 if seq.sampling.temperature == 0 else seq.noise_keys[len(seq.tokens) + len(drafted)]
        for seq, drafted in positions
    ]
    return sample(logits, [seq.sampling for seq, _ in positions], keys)


def _append(
    seq: Sequence, tokens: ListOf[int], draft: ListOf[int], logits: Tensor, start: int, exhausted: set[int]
) -> SampledSequence:
    """Append the sampled tokens up to the first that differs from the draft. Their logits begin at `start`; a sequence
    fails at a position that no id may follow.
    """
    if tokens and seq.sampling.max_tokens == 0:  # only the prompt was asked for
        seq.finish("length")
        return SampledSequence(0, 0)
    for index, token in enumerate(tokens):
        if start + index in exhausted:
            seq.fail("no token of the vocabulary can follow")
            return SampledSequence(index, index)
        if seq.sampling.logprobs is not None:
            seq.logprobs.append(token_logprobs(logits[start + index], token, seq.sampling.logprobs))
        seq.append(token)
        if index >= len(draft) or draft[index] != token:
            return SampledSequence(index + 1, index)
        if seq.finish_reason is not None:
            return SampledSequence(index + 1, index + 1)
    return SampledSequence(0, 0)


def _constrain(logits_V: Tensor, seq: Sequence, drafted: ListOf[int]) -> bool:
    """Apply what a request demands of the next token, after its tokens and these drafted ones, in place. Returns
    whether any id may follow. The order of biases and penalties is vLLM's.
    """
    sampling, generated = seq.sampling, [*seq.tokens, *drafted]
    if seq.processor is not None:
        seq.processor.apply(logits_V, generated)
    if sampling.has_penalties:
        logits_V.copy_(penalise(logits_V, sampling, seq.prompt, generated))
    if len(generated) < sampling.min_tokens:
        logits_V[[*seq.end_ids, *sampling.stop_token_ids]] = -torch.inf
    if seq.matcher is not None:
        _mask(logits_V, seq, drafted)
    allowed = seq.allowed_ids(drafted)
    if allowed is not None:
        logits_V.copy_(_restrict(logits_V, allowed))
    is_restricted = seq.processor is not None or seq.matcher is not None
    return not is_restricted or bool(logits_V.amax() > -torch.inf)


def _mask(logits_V: Tensor, seq: Sequence, drafted: ListOf[int]) -> None:
    assert seq.matcher is not None
    allowed_V = seq.matcher.allowed(drafted)
    if allowed_V is None:
        return
    if seq.matcher.error is None:
        if seq.sampling.ignore_eos:
            allowed_V = _without(allowed_V, seq.end_ids)
        logits_V.masked_fill_(torch.from_numpy(~allowed_V).to(logits_V.device), -torch.inf)
    elif not drafted:
        seq.fail(seq.matcher.error)


def _without(allowed_V: np.ndarray, ids: ListOf[int]) -> np.ndarray:
    """The same, without these ids if others are left."""
    others_V = allowed_V.copy()
    others_V[list(ids)] = False
    return others_V if others_V.any() else allowed_V


def _restrict(logits_V: Tensor, ids: ListOf[int]) -> Tensor:
    allowed = torch.tensor(ids, device=logits_V.device)
    return torch.full_like(logits_V, -torch.inf).index_copy(0, allowed, logits_V[allowed])
