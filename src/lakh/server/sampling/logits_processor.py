"""The logits processor of one request: logit_bias, allowed_token_ids and bad_words, as vLLM defines them.

A bad word is tokenized as it goes on where other text ended, with a space before it and without one; its last token is
excluded where the tokens before it were sampled. vLLM leaves out the form with a space where it has another number of
tokens, so that such a word can still appear after a space; here both forms are excluded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lakh.errors import UserError
from lakh.server.sampling.params import MAX_BIAS, SamplingParams

if TYPE_CHECKING:
    from lakh.tokens.tokenizer import Tokenizer

__all__ = ["LogitsProcessor", "check_token_ids"]


class LogitsProcessor:
    def __init__(self, sampling: SamplingParams, tokenizer: Tokenizer) -> None:
        """The ids of `sampling` are within the vocabulary (check_token_ids)."""
        self._bias = {number: bias for number, bias in sampling.logit_bias if bias > -MAX_BIAS}
        self._allowed = sampling.allowed_token_ids
        banned = {number for number, bias in sampling.logit_bias if bias <= -MAX_BIAS}
        self._endings: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)
        """Bad words of several tokens by the last but one."""
        for ids in _bad_word_ids(sampling.bad_words, tokenizer):
            if len(ids) == 1:
                banned.add(ids[0])
            elif ids:
                self._endings[ids[-2]].add(ids)
        self._banned = sorted(banned)
        self._tensors: tuple[torch.device, Tensor, Tensor, Tensor | None] | None = None

    def apply(self, logits_V: Tensor, generated: Sequence[int]) -> None:
        """In place, for the token after these generated ones."""
        biased, bias, excluded_V = self._on(logits_V)
        if len(biased):
            logits_V[biased] += bias
        if excluded_V is not None:
            logits_V.masked_fill_(excluded_V, -torch.inf)
        for ids in self._endings.get(generated[-1], ()) if generated else ():
            if tuple(generated[-len(ids) + 1 :]) == ids[:-1]:
                logits_V[ids[-1]] = -torch.inf

    def _on(self, logits_V: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The ids with a bias, their biases, and which ids are always excluded, on the device of the logits."""
        device = logits_V.device
        if self._tensors is None or self._tensors[0] != device:
            excluded_V = None
            if self._allowed is not None or self._banned:
                excluded_V = torch.full((len(logits_V),), self._allowed is not None)
                excluded_V[list(self._allowed or ())] = False
                excluded_V[self._banned] = True
                excluded_V = excluded_V.to(device)
            biased = torch.tensor(list(self._bias), dtype=torch.long, device=device)
            bias = torch.tensor(list(self._bias.values()), dtype=logits_V.dtype, device=device)
            self._tensors = device, biased, bias, excluded_V
        return self._tensors[1:]


def check_token_ids(sampling: SamplingParams, num_ids: int) -> None:
    """Raise a UserError for ids that the tokenizer does not have."""
    lists = {
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": tuple(number for number, _ in sampling.logit_bias),
        "allowed_token_ids": sampling.allowed_token_ids or (),
    }
    for name, ids in lists.items():
        if ids and max(ids) >= num_ids:
            raise UserError(name, f"{max(ids)} is outside the vocabulary", f"use ids from 0 to {num_ids - 1}")


def _bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> set[tuple[int, ...]]:
    try:
        texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]
        return {tuple(tokenizer.encode_continuation(text)) for text in texts}
    except UserError as error:
        raise UserError("bad_words", error.found, error.todo) from None
