"""The tokenizer of a GGUF file as the files of a checkpoint: tokenizer.json, and the roles of its special tokens.

    gpt2    byte-level BPE: tokens, merges and the name of a pre-tokenizer (pre_tokenizers.py of tokens/tokenizer)
    llama   SentencePiece BPE: tokens with scores, from which the merges follow; bytes for what is in no token

The ids of a text are those of llama.cpp, with one exception: lakh never encodes text as a control token, even where
merges would lead there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders

from lakh.errors import CorruptCheckpoint, UserError
from lakh.tokens.tokenizer.folders import sentence_piece
from lakh.tokens.tokenizer.folders.sentence_piece import (
    CONTROL_TOKEN,
    MORE_ENDS,
    NORMAL_TOKEN,
    add_tokens,
    with_known_roles,
)
from lakh.tokens.tokenizer.pre_tokenizers import PRE_TOKENIZERS

__all__ = ["read"]

AGAIN = "download the file again"
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Of tokenizer_config.json, and their names in the file."""
_FIM = {"prefix_token": ("fim_pre", "prefix"), "suffix_token": ("fim_suf", "suffix")}
_FIM |= {"middle_token": ("fim_mid", "middle")}
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Roles of tokens after which nothing follows, the usual one first."""


def read(where: str, settings: Mapping[str, Any]) -> tuple[bytes, dict[str, bytes]]:
    """tokenizer.json, and the files beside it by name; `settings` are the keys of the file at `where`."""
    found = {key.removeprefix("tokenizer.ggml."): value for key, value in settings.items()}
    tokens = found.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise UserError(f"tokenizer ({where})", "is missing", "use a file with its tokenizer")
    kinds = found.get("token_type") or [NORMAL_TOKEN] * len(tokens)
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise CorruptCheckpoint(where, "has a damaged tokenizer (tokens repeat, or lack a type)", AGAIN)
    kinds = with_known_roles(tokens, kinds)
    model = found.get("model")
    try:
        if model == "gpt2":
            inner, adds_begin = _byte_level(where, found, tokens)
        elif model == "llama":
            inner, adds_begin = _sentence_piece(where, found, tokens, kinds), True
        else:
            known = "lakh reads gpt2 (byte-level BPE) and llama (SentencePiece)"
            raise UserError(f"tokenizer ({where})", f"is of the kind {model!r}", known)
    except (UserError, CorruptCheckpoint):
        raise
    except Exception as error:  # noqa: BLE001 - the package raises bare Exception
        raise CorruptCheckpoint(where, f"has a damaged tokenizer ({error})", AGAIN) from None
    add_tokens(inner, tokens, kinds)
    control = {token: at for at, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == CONTROL_TOKEN}
    return inner.to_str().encode(), _files(settings, found, tokens, control, adds_begin=adds_begin)


def _byte_level(where: str, found: Mapping[str, Any], tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    name = found.get("pre", "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        todo = f"lakh knows {', '.join(PRE_TOKENIZERS)}"
        raise UserError(f"tokenizer.ggml.pre ({where})", f"is {name!r}", todo)
    merges = [_pair(merge) for merge in found.get("merges", ())]
    vocab = {token: number for number, token in enumerate(tokens)}
    bpe = tokenizers.models.BPE(vocab, merges, ignore_merges=pre.ignores_merges)
    inner = tokenizers.Tokenizer(bpe)
    inner.pre_tokenizer, inner.decoder = pre.build(), decoders.ByteLevel()
    return inner, pre.adds_begin


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge[1:].partition(" ")  # the first character may be a space
    return merge[0] + left, right


def _sentence_piece(where: str, found: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    scores = found.get("scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CorruptCheckpoint(where, "has no scores of its tokens", AGAIN)
    adds_prefix = bool(found.get("add_space_prefix", True))
    return sentence_piece.build(tokens, scores, kinds, found.get("unknown_token_id", 0), adds_prefix=adds_prefix)


def _files(
    settings: Mapping[str, Any],
    found: Mapping[str, Any],
    tokens: list[str],
    control: Mapping[str, int],
    *,
    adds_begin: bool,
) -> dict[str, bytes]:
    """Of a checkpoint; `control` are the ids of control tokens."""

    def number(*names: str) -> int | None:
        for name in names:
            value = found.get(f"{name}_token_id")
            if isinstance(value, int) and 0 <= value < len(tokens):
                return value
        return None

    ids = {role: number(name) for role, name in _ROLES.items()}
    ids |= {role: number(*names) for role, names in _FIM.items()}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {role: tokens[at] for role, at in ids.items() if at is not None}
    config["add_bos_token"] = bool(found.get("add_bos_token", adds_begin)) and ids["bos_token"] is not None
    if isinstance(template := settings.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    ends = [number(role) for role in _ENDS] + [control.get(name) for name in MORE_ENDS]
    generation: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
    for role, key in (("bos_token", "bos_token_id"), ("pad_token", "pad_token_id")):
        if ids[role] is not None:
            generation[key] = ids[role]
    return {
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2).encode(),
        "generation_config.json": json.dumps(generation, indent=2).encode(),
    }
