"""SentencePiece's BPE: tokens with scores, from which the merges follow, and bytes for what is in no token.

`tokenizer.model` files (sentence_piece_model.py) and GGUF files of the kind `llama` hold one.
"""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers

from lakh.tokens.tokenizer.special_tokens import END_NAMES, FILE_END_NAMES, FIM_END_NAMES, FIM_NAMES

__all__ = [
    "BYTE_TOKEN",
    "CONTROL_TOKEN",
    "MORE_ENDS",
    "NORMAL_TOKEN",
    "UNDERSCORE",
    "UNKNOWN_TOKEN",
    "USER_TOKEN",
    "add_tokens",
    "build",
    "merges_of",
    "with_known_roles",
]

NORMAL_TOKEN, UNKNOWN_TOKEN, CONTROL_TOKEN, USER_TOKEN, BYTE_TOKEN = 1, 2, 3, 4, 6
"""Kinds of tokens: the numbers of SentencePiece, which GGUF files have, too."""
UNDERSCORE = "▁"  # a space in SentencePiece
MORE_ENDS: tuple[str, ...] = (
    *END_NAMES,
    "<|eot_id|>",
    "<|eom_id|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<EOT>",
)
MORE_ENDS += (*FILE_END_NAMES, *FIM_END_NAMES)


def build(
    tokens: list[str],
    scores: list[float],
    kinds: list[int],
    unknown: int,
    *,
    adds_prefix: bool,
    after_special: bool = True,
) -> tokenizers.Tokenizer:
    """The tokenizer, without its added tokens. A space is put before a text if `adds_prefix`; `after_special`: also
    before text behind a special token. Otherwise, as transformers has it, a text that starts with a space gets no
    second one."""
    vocab = {token: number for number, token in enumerate(tokens)}
    bpe = tokenizers.models.BPE(
        vocab,
        merges_of(tokens, scores, kinds),
        unk_token=tokens[unknown] if unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback="<0x0A>" in vocab,
    )
    inner = tokenizers.Tokenizer(bpe)
    spaces = normalizers.Replace(" ", UNDERSCORE)
    if adds_prefix and not after_special:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement=UNDERSCORE, prepend_scheme="first", split=False)
    else:
        inner.normalizer = normalizers.Sequence([normalizers.Prepend(UNDERSCORE), spaces]) if adds_prefix else spaces
    parts = [decoders.Replace(UNDERSCORE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if adds_prefix else parts)
    return inner


def merges_of(tokens: list[str], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE, which joins the two neighbours whose joint token has the highest score."""
    usable = {token for token, kind in zip(tokens, kinds, strict=True) if kind in (NORMAL_TOKEN, USER_TOKEN)}
    order = sorted(range(len(tokens)), key=lambda number: -scores[number])
    found: list[tuple[str, str]] = []
    for number in order:
        token = tokens[number]
        if token in usable:
            splits = ((token[:at], token[at:]) for at in range(1, len(token)))
            found += [(left, right) for left, right in splits if left in usable and right in usable]
    return found


def with_known_roles(tokens: list[str], kinds: list[int]) -> list[int]:
    """Converters leave some tokens with a role as ordinary ones; they are control tokens, as in llama.cpp. Unlike
    there, an ordinary </s> stays one: Qwen's vocabulary has it as a tag of HTML."""
    known = {name for names in FIM_NAMES for name in names[:3]}
    known |= {name for name in MORE_ENDS if name.startswith(("<|", "<｜"))}
    ends = set(MORE_ENDS)
    return [
        CONTROL_TOKEN if token in known or (token in ends and kind == USER_TOKEN) else kind
        for token, kind in zip(tokens, kinds, strict=True)
    ]


def add_tokens(inner: tokenizers.Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Tokens that are found in a text before it is merged, and control tokens."""
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL_TOKEN, USER_TOKEN)]
    inner.add_tokens([AddedToken(token, normalized=False) for token, kind in added if kind == USER_TOKEN])
    inner.add_special_tokens([AddedToken(token, normalized=False) for token, kind in added if kind == CONTROL_TOKEN])
