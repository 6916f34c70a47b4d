"""The tokenizer of a GGUF file as the files of a checkpoint: tokenizer.json, and the roles of its special tokens.

    gpt2    byte-level BPE: tokens, merges and the name of a pre-tokenizer (gguf_pretokenizers.py)
    llama   SentencePiece BPE: tokens with scores, from which the merges follow; bytes for what is in no token

The ids of a text are those of llama.cpp, with one exception: lakh never encodes text as a control token, even where
merges would lead there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, normalizers

from lakh.errors import CorruptCheckpoint, UserError
from lakh.tokens.tokenizer.special_tokens import END_NAMES, FILE_END_NAMES, FIM_END_NAMES, FIM_NAMES
from lakh.workloads.code.formats.gguf_pretokenizers import PRE_TOKENIZERS

__all__ = ["BYTE_TOKEN", "CONTROL_TOKEN", "NORMAL_TOKEN", "UNKNOWN_TOKEN", "USER_TOKEN", "merges_of", "read"]

NORMAL_TOKEN, UNKNOWN_TOKEN, CONTROL_TOKEN, USER_TOKEN, BYTE_TOKEN = 1, 2, 3, 4, 6  # tokenizer.ggml.token_type
UNDERSCORE = "▁"  # a space in SentencePiece
AGAIN = "download the file again"
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Of tokenizer_config.json, and their names in the file."""
_FIM = {"prefix_token": ("fim_pre", "prefix"), "suffix_token": ("fim_suf", "suffix")}
_FIM |= {"middle_token": ("fim_mid", "middle")}
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Roles of tokens after which nothing follows, the usual one first."""
_MORE_ENDS: tuple[str, ...] = (
    *END_NAMES,
    "<|eot_id|>",
    "<|eom_id|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<EOT>",
)
_MORE_ENDS += (*FILE_END_NAMES, *FIM_END_NAMES)


def read(where: str, settings: Mapping[str, Any]) -> tuple[bytes, dict[str, bytes]]:
    """tokenizer.json, and the files beside it by name; `settings` are the keys of the file at `where`."""
    found = {key.removeprefix("tokenizer.ggml."): value for key, value in settings.items()}
    tokens = found.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise UserError(f"tokenizer ({where})", "is missing", "use a file with its tokenizer")
    kinds = found.get("token_type") or [NORMAL_TOKEN] * len(tokens)
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise CorruptCheckpoint(where, "has a damaged tokenizer (tokens repeat, or lack a type)", AGAIN)
    kinds = _with_known_roles(tokens, kinds)
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
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL_TOKEN, USER_TOKEN)]
    inner.add_tokens([AddedToken(token, normalized=False) for token, kind in added if kind == USER_TOKEN])
    inner.add_special_tokens([AddedToken(token, normalized=False) for token, kind in added if kind == CONTROL_TOKEN])
    control = {token: at for at, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == CONTROL_TOKEN}
    return inner.to_str().encode(), _files(settings, found, tokens, control, adds_begin=adds_begin)


def _with_known_roles(tokens: list[str], kinds: list[int]) -> list[int]:
    """Converters leave some tokens with a role as ordinary ones; they are control tokens, as in llama.cpp. Unlike
    there, an ordinary </s> stays one: Qwen's vocabulary has it as a tag of HTML."""
    known = {name for names in FIM_NAMES for name in names[:3]}
    known |= {name for name in _MORE_ENDS if name.startswith(("<|", "<｜"))}
    ends = set(_MORE_ENDS)
    return [
        CONTROL_TOKEN if token in known or (token in ends and kind == USER_TOKEN) else kind
        for token, kind in zip(tokens, kinds, strict=True)
    ]


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
    vocab = {token: number for number, token in enumerate(tokens)}
    unknown = found.get("unknown_token_id", 0)
    has_bytes = "<0x0A>" in vocab
    bpe = tokenizers.models.BPE(
        vocab,
        merges_of(tokens, scores, kinds),
        unk_token=tokens[unknown] if unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
    inner = tokenizers.Tokenizer(bpe)
    has_prefix = bool(found.get("add_space_prefix", True))
    spaces = normalizers.Replace(" ", UNDERSCORE)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend(UNDERSCORE), spaces]) if has_prefix else spaces
    parts = [decoders.Replace(UNDERSCORE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if has_prefix else parts)
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
    ends = [number(role) for role in _ENDS] + [control.get(name) for name in _MORE_ENDS]
    generation: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
    for role, key in (("bos_token", "bos_token_id"), ("pad_token", "pad_token_id")):
        if ids[role] is not None:
            generation[key] = ids[role]
    return {
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2).encode(),
        "generation_config.json": json.dumps(generation, indent=2).encode(),
    }
