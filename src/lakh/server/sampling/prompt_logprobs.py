"""Log-probabilities of a prompt's tokens, added step by step as the prompt is computed.

A step's logits are reduced to a few numbers per token at once, so a long prompt never holds its logits for the whole
vocabulary. They are the model's own: penalties, temperature and the form of a completion do not change them. An id that
the tokenizer does not have (a padded embedding table has some) counts as impossible, as in a completion.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lakh.server.sampling.tokens import LOWEST_LOGPROB, Logprobs

__all__ = ["PromptLogprobs", "reduce_logits"]

SLICE_LOGITS = 1 << 22  # in float32 at a time: 16 MiB


class PromptLogprobs:
    """Of one prompt: all tokens but the first. The copies of a prompt in one request share them."""

    def __init__(self, prompt: Sequence[int], num_top: int) -> None:
        """`num_top`: most likely ids to keep for each position."""
        self._prompt, self._num_top = prompt, num_top
        self._found: list[Logprobs] = []
        self._weights_version = -1

    def __len__(self) -> int:
        """Positions whose logits were used; each gave the log-probability of the next token."""
        return len(self._found)

    @property
    def is_complete(self) -> bool:
        return len(self._found) == len(self._prompt) - 1

    def begin(self, weights_version: int) -> bool:
        """Before a sequence (again) computes its prompt: start over if the weights are others than before. Returns
        whether what is known is of these weights: complete ones stay.
        """
        if self._weights_version != weights_version and not (self._found and self.is_complete):
            self._found, self._weights_version = [], weights_version
        return self._weights_version == weights_version

    def num_needed(self, end: int) -> int:
        """The logits that are needed of the positions before `end`: the last ones that are not known yet."""
        return max(min(end, len(self._prompt) - 1) - len(self._found), 0)

    def add(self, end: int, logits_NV: Tensor) -> None:
        """The logits of the positions before `end`; a copy of the prompt may have added some of them in this step."""
        needed = self.num_needed(end)
        if needed:
            first = end - needed
            tokens = self._prompt[first + 1 : end + 1]
            self._found += reduce_logits(logits_NV[len(logits_NV) - needed :], tokens, self._num_top)

    def items(self) -> tuple[Logprobs | None, ...]:
        """One for each token of the prompt; None for the first, which follows nothing."""
        return (None, *self._found)


def reduce_logits(logits_NV: Tensor, tokens: Sequence[int], num_top: int) -> list[Logprobs]:
    """The log-probability and rank of each token, and the most likely ids, from the logits of the positions before."""
    num_ids = logits_NV.shape[1]
    rows = max(SLICE_LOGITS // num_ids, 1)
    found: list[Logprobs] = []
    for first in range(0, len(tokens), rows):
        scores_NV = logits_NV[first : first + rows].float().log_softmax(dim=-1).clamp_(min=LOWEST_LOGPROB)
        part = tokens[first : first + rows]
        ids_N = torch.tensor(part, device=scores_NV.device)
        own_N1 = scores_NV.gather(1, ids_N.clamp(max=num_ids - 1)[:, None])
        own_N1.masked_fill_((ids_N >= num_ids)[:, None], LOWEST_LOGPROB)
        ranks_N = (scores_NV > own_N1).sum(dim=-1) + 1
        values_NK, top_NK = scores_NV.topk(min(num_top, num_ids))
        rows_of = (own_N1[:, 0], ranks_N, top_NK, values_NK)
        for token, own, rank, top, values in zip(part, *(one.tolist() for one in rows_of), strict=True):
            found.append(Logprobs(token, own, tuple(zip(top, values, strict=True)), rank))
    return found
