"""Tokens that a folder adds to a vocabulary, as `added_tokens_decoder` of tokenizer_config.json describes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import AddedToken

from lakh.errors import CorruptCheckpoint, UserError

__all__ = ["ADDED", "AGAIN", "CONFIG", "add", "content", "described", "json_table"]

CONFIG, ADDED = "tokenizer_config.json", "added_tokens.json"
AGAIN = "copy the model's tokenizer again"
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word")


def described(
    where: str,
    files: Mapping[str, bytes],
    config: Mapping[str, Any],
    todo: str,
    vocab: Mapping[str, int] = MappingProxyType({}),
    *,
    in_raw_text: bool = False,
) -> dict[int, AddedToken]:
    """By their ids. Tokens of added_tokens.json that the vocabulary and tokenizer_config.json do not know are refused:
    whether they are special follows from no file. `in_raw_text`: texts are searched for them before they are
    normalized."""
    found: dict[int, AddedToken] = {}
    try:
        for number, entry in (config.get("added_tokens_decoder") or {}).items():
            flags = {flag: bool(entry.get(flag, False)) for flag in _FLAGS}
            flags["normalized"] &= not in_raw_text
            found[int(number)] = AddedToken(entry["content"], special=bool(entry.get("special")), **flags)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CorruptCheckpoint(f"{where}/{CONFIG}", "has a damaged added_tokens_decoder", AGAIN) from None
    known = {token.content for token in found.values()} | vocab.keys()
    for token in json_table(where, files, ADDED).keys() - known:
        raise UserError(
            f"{where}/{ADDED}", f"has {token}, which added_tokens_decoder of {CONFIG} does not describe", todo
        )
    return found


def add(inner: tokenizers.Tokenizer, where: str, tokens: Mapping[int, AddedToken], todo: str) -> None:
    """Add tokens to a tokenizer, which numbers new ones in their order."""
    for number, token in sorted(tokens.items()):
        inner.add_tokens([token])
        if inner.token_to_id(token.content) != number:
            found = f"gives {token.content} the id {number}, and ids before it are missing"
            raise UserError(where, found, todo)


def content(token: Any) -> str | None:
    """A token as a text, or as a table of a text and flags."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def json_table(where: str, files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    if name not in files:
        return {}
    try:
        data = json.loads(files[name])
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise CorruptCheckpoint(f"{where}/{name}", "is not a JSON object", AGAIN)
    return data
