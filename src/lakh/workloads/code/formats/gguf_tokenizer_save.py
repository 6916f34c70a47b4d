"""The keys of a GGUF file for a tokenizer.json and the files beside it: the reverse of gguf_tokenizer.py.

A tokenizer whose ids llama.cpp would not reproduce is refused: a pre-tokenizer without a name, or merges that do not
follow from scores of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lakh.errors import UserError
from lakh.spec.model import Model
from lakh.tokens.tokenizer import Tokenizer, pre_tokenizers
from lakh.tokens.tokenizer.folders.sentence_piece import (
    BYTE_TOKEN,
    CONTROL_TOKEN,
    NORMAL_TOKEN,
    UNDERSCORE,
    UNKNOWN_TOKEN,
    USER_TOKEN,
    merges_of,
)
from lakh.tokens.tokenizer.special_tokens import FIM_END_NAMES

__all__ = ["keys_of"]

HF = "export it with --format hf"
UNUSED_TOKEN = 5
_FIM_ROLES = {"prefix": "fim_pre", "suffix": "fim_suf", "middle": "fim_mid"}
_NAMED_ROLES = {"<|fim_pad|>": "fim_pad", "<|repo_name|>": "fim_rep", "<|file_sep|>": "fim_sep"}
_NAMED_ROLES |= dict.fromkeys(FIM_END_NAMES, "fim_sep")
_LOWEST_SCORE = -1e9  # of tokens that no merge makes


def keys_of(tokenizer_json: Path, spec: Model) -> dict[str, Any]:
    tokenizer = Tokenizer.load(tokenizer_json)
    if tokenizer.vocab_size > spec.vocab:
        found = f"has ids up to {tokenizer.vocab_size - 1}; the model's vocabulary has {spec.vocab} entries"
        raise UserError(str(tokenizer_json), found, "use the tokenizer that the model was trained with")
    description = json.loads(tokenizer.raw)
    model = description["model"]
    if model.get("type") != "BPE":
        raise UserError("tokenizer.json", f"is of the kind {model.get('type')}; GGUF files hold BPE", HF)
    tokens, kinds = _tokens(description, spec.vocab)
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    config = _config(tokenizer_json)
    is_sentence_piece = _is_sentence_piece(description)
    if is_sentence_piece:
        keys = _sentence_piece(description, tokens, kinds, merges)
    else:
        normalizer = (description.get("normalizer") or {}).get("type")
        if normalizer not in (None, "NFC"):  # llama.cpp does not normalize; Qwen's files ask for NFC
            raise UserError("tokenizer.json", f"normalizes by {normalizer}, which a GGUF file cannot say", HF)
        name = pre_tokenizers.name_of(description)
        if name is None:
            found = f"has a pre-tokenizer without a name in GGUF files: {pre_tokenizers.describe(description)}"
            raise UserError("tokenizer.json", found, HF)
        keys = {"model": "gpt2", "pre": name, "merges": [" ".join(merge) for merge in merges]}
    keys |= {"tokens": tokens, "token_type": kinds, **_roles(tokenizer, config)}
    whole = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    if template := _template(tokenizer_json, config):
        whole["tokenizer.chat_template"] = template
    return whole


def _tokens(description: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """All tokens and their types, padded to the model's vocabulary."""
    model, added = description["model"], description.get("added_tokens", ())
    by_id = {number: token for token, number in {**model["vocab"], **{t["content"]: t["id"] for t in added}}.items()}
    special = {token["id"] for token in added if token["special"]}
    user = {token["id"] for token in added if not token["special"]}
    has_bytes, unknown = bool(model.get("byte_fallback")), model.get("unk_token")

    def kind(number: int) -> int:
        token = by_id.get(number)
        if token is None:
            return UNUSED_TOKEN
        if token == unknown:
            return UNKNOWN_TOKEN
        if number in special:
            return CONTROL_TOKEN
        if number in user:
            return USER_TOKEN
        return BYTE_TOKEN if has_bytes and len(token) == 6 and token.startswith("<0x") else NORMAL_TOKEN

    numbers = range(size)
    return [by_id.get(number, f"<|unused_{number}|>") for number in numbers], [kind(number) for number in numbers]


def _is_sentence_piece(description: Mapping[str, Any]) -> bool:
    return bool(description["model"].get("byte_fallback"))


def _sentence_piece(
    description: Mapping[str, Any], tokens: list[str], kinds: list[int], merges: list[tuple[str, ...]]
) -> dict[str, Any]:
    """Scores from the order of merges: a token has that of the first one that makes it."""
    scores = [_LOWEST_SCORE] * len(tokens)
    by_token = {token: number for number, token in enumerate(tokens)}
    rank = 0
    for left, right in merges:
        number = by_token[left + right]
        if scores[number] == _LOWEST_SCORE:
            scores[number] = -float(rank)
            rank += 1
    usable = {token for token, kind in zip(tokens, kinds, strict=True) if kind in (NORMAL_TOKEN, USER_TOKEN)}
    given = {merge for merge in merges if usable.issuperset((*merge, "".join(merge)))}
    expected = set(merges_of(tokens, scores, kinds))
    lost, more = given - expected, expected - given
    if lost or more:
        pair = " ".join(next(iter(lost or more)))
        found = f"has merges that do not follow from scores of tokens ({len(lost | more)}, such as {pair!r})"
        raise UserError("tokenizer.json", found, HF)
    return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": _adds_prefix(description)}


def _adds_prefix(description: Mapping[str, Any]) -> bool:
    """Whether a text gets a leading space; a UserError for other normalization."""
    normalizer, pre = description.get("normalizer") or {}, description.get("pre_tokenizer") or {}
    parts = normalizer.get("normalizers", [normalizer] if normalizer else [])
    kinds = [part["type"] for part in parts]
    is_plain = all(part.get("content", UNDERSCORE) == UNDERSCORE for part in parts)
    if is_plain and not pre and kinds in (["Prepend", "Replace"], ["Replace"]):
        return "Prepend" in kinds
    splits_nothing = not pre or (pre["type"] == "Split" and pre["pattern"] == {"String": " "})
    if is_plain and kinds == ["Replace"] and splits_nothing:  # Gemma: there are no spaces left to split at
        return False
    if not kinds and pre.get("type") == "Metaspace" and not pre.get("split", True):
        return bool(pre.get("prepend_scheme", "always") != "never")
    raise UserError("tokenizer.json", f"normalizes by {kinds or pre.get('type')}, which a GGUF file cannot say", HF)


def _roles(tokenizer: Tokenizer, config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    begin = tokenizer.begin_ids[0] if tokenizer.begin_ids else _find(tokenizer, config.get("bos_token"))
    if begin is not None:
        found["bos_token_id"] = begin
    if tokenizer.end_ids:
        found["eos_token_id"] = tokenizer.end_ids[0]
    if len(tokenizer.end_ids) > 1:
        found["eot_token_id"] = tokenizer.end_ids[1]
    unknown = json.loads(tokenizer.raw)["model"].get("unk_token")
    if (number := _find(tokenizer, unknown)) is not None:
        found["unknown_token_id"] = number
    if tokenizer.pad_id is not None:
        found["padding_token_id"] = tokenizer.pad_id
    if tokenizer.fim is not None:
        for part, role in _FIM_ROLES.items():
            if (number := getattr(tokenizer.fim, part)) is not None:
                found[f"{role}_token_id"] = number
    for token, role in _NAMED_ROLES.items():
        if (number := _find(tokenizer, token)) is not None:
            found[f"{role}_token_id"] = number
    return {**found, "add_bos_token": bool(tokenizer.begin_ids), "add_eos_token": False}


def _find(tokenizer: Tokenizer, token: Any) -> int | None:
    token = token.get("content") if isinstance(token, dict) else token
    return tokenizer.find(token) if isinstance(token, str) else None


def _config(tokenizer_json: Path) -> dict[str, Any]:
    path = tokenizer_json.parent / "tokenizer_config.json"
    try:
        found = json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError:
        found = {}
    return found if isinstance(found, dict) else {}


def _template(tokenizer_json: Path, config: Mapping[str, Any]) -> str | None:
    path = tokenizer_json.parent / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8", "replace")
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}.get("default")
    return source if isinstance(source, str) else None
