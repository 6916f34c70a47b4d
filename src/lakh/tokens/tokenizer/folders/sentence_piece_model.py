"""`tokenizer.model`, the protobuf message of SentencePiece, as tokenizer.json.

    ModelProto       1 pieces*   2 trainer_spec   3 normalizer_spec
    SentencePiece    1 text      2 score (float)  3 kind
    TrainerSpec      3 model_type (2: BPE)   24 treat_whitespace_as_suffix   40 unk_id  41 bos_id  42 eos_id  43 pad_id
    NormalizerSpec   2 precompiled_charsmap  3 add_dummy_prefix  4 remove_extra_whitespaces  5 escape_whitespaces

Field numbers: sentencepiece_model.proto of github.com/google/sentencepiece. A message is a row of fields: a varint of
number and wire type, then a varint (0), 8 bytes (1), a length and bytes (2), or 4 bytes (5).

What changes a text before it is merged (Unicode forms, removed spaces) and other kinds of models are refused.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from lakh.errors import CorruptCheckpoint, UserError
from lakh.tokens.tokenizer.folders import added, sentence_piece
from lakh.tokens.tokenizer.folders.added import AGAIN

__all__ = ["FILE", "build"]

FILE = "tokenizer.model"
BPE = 2
_MODEL_TYPES = {1: "unigram", 3: "word", 4: "char"}
_RANKS = re.compile(rb"[A-Za-z0-9+/]+=* \d+\n")
"""The first line of a file of tiktoken: Llama 3 has one of this name."""
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5


def build(
    where: str, files: Mapping[str, bytes], config: Mapping[str, Any], todo: str
) -> tuple[tokenizers.Tokenizer, Mapping[str, Any]]:
    """The tokenizer and its tokenizer_config.json."""
    place = f"{where}/{FILE}"
    if _RANKS.match(files[FILE]):
        raise UserError(place, "is a file of tiktoken, from which it does not follow how texts are split", todo)
    try:
        model = list(_fields(files[FILE]))
        trainer, normalizer = (
            dict(_fields(b"".join(value for number, value in model if number == wanted))) for wanted in (2, 3)
        )
        pieces = [dict(_fields(value)) for number, value in model if number == 1]
        tokens = [piece[1].decode() for piece in pieces]
        scores = [struct.unpack("<f", piece.get(2, bytes(4)))[0] for piece in pieces]
        kinds = [int(piece.get(3, sentence_piece.NORMAL_TOKEN)) for piece in pieces]
        unknown, *roles = (_number(trainer, field, usual) for field, usual in ((40, 0), (41, 1), (42, 2), (43, -1)))
    except (ValueError, KeyError, AttributeError, TypeError, struct.error):  # bytes where a number belongs, or none
        raise CorruptCheckpoint(place, "is no model of SentencePiece", AGAIN) from None
    if not tokens or len(set(tokens)) != len(tokens):
        raise CorruptCheckpoint(place, "is no model of SentencePiece: it has no tokens, or one twice", AGAIN)
    _require_known(place, trainer, normalizer, todo)
    kinds = sentence_piece.with_known_roles(tokens, kinds)
    prefix = config.get("add_prefix_space")
    inner = sentence_piece.build(
        tokens,
        scores,
        kinds,
        unknown,
        adds_prefix=bool(_number(normalizer, 3, 1) if prefix is None else prefix),
        after_special=config.get("legacy") is not False,
    )
    sentence_piece.add_tokens(inner, tokens, kinds)
    vocab = {token: number for number, token in enumerate(tokens)}
    more = added.described(where, files, config, todo, vocab, in_raw_text=True)
    added.add(inner, where, more, todo)
    names = {
        role: tokens[number]
        for role, number in zip(("bos_token", "eos_token", "pad_token"), roles, strict=True)
        if 0 <= number < len(tokens)
    }
    return inner, {**names, "add_bos_token": "bos_token" in names, **config}


def _require_known(where: str, trainer: Mapping[int, Any], normalizer: Mapping[int, Any], todo: str) -> None:
    kind = _number(trainer, 3, 1)
    found = None
    if kind != BPE:
        found = f"is a model of the kind {_MODEL_TYPES.get(kind, kind)}; lakh reads bpe"
    elif normalizer.get(2):
        name = normalizer.get(1, b"").decode(errors="replace")
        found = f"normalizes texts ({name}), which lakh does not do"
    elif _number(normalizer, 4, 1):
        found = "removes spaces from texts, which lakh does not do"
    elif not _number(normalizer, 5, 1) or _number(trainer, 24, 0):
        found = "marks spaces in a way of its own, which lakh does not do"
    if found is not None:
        raise UserError(where, found, todo)


def _number(message: Mapping[int, Any], field: int, usual: int) -> int:
    """Of a field; negative ones are written as numbers of 64 bits."""
    value = int(message.get(field, usual))
    return value - (1 << 64) if value >= 1 << 63 else value


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message: numbers of varints, bytes of others. A damaged message is a ValueError."""
    at = 0
    while at < len(raw):
        key, at = _varint(raw, at)
        kind, size = key & 7, 0
        if kind == _VARINT:
            value, at = _varint(raw, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(raw, at)
        elif kind in (_FIXED_32, _FIXED_64):
            size = 4 if kind == _FIXED_32 else 8
        else:
            raise ValueError(f"wire type {kind}")
        if at + size > len(raw):
            raise ValueError("the message ends inside a field")
        yield key >> 3, raw[at : at + size]
        at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(raw):
            break
        byte, at = raw[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number does not end")
