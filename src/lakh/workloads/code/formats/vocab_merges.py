"""The tokenizer of a Hugging Face directory with vocab.json and merges.txt, as older checkpoints have them in place of
tokenizer.json.

They hold a byte-level BPE and not how texts are split, which the `tokenizer_class` in tokenizer_config.json must
decide: Qwen2Tokenizer does. Others are a UserError, also GPT2Tokenizer: StarCoder2, SmolLM and OLMo 2 name it and split
texts in ways of their own, so transformers itself gives other ids from these two files than from tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from lakh.errors import CorruptCheckpoint, UserError
from lakh.workloads.code.formats.gguf_pretokenizers import PRE_TOKENIZERS

__all__ = ["ADDED", "CONFIG", "MERGES", "SPECIAL", "VOCAB", "build"]

VOCAB, MERGES = "vocab.json", "merges.txt"
CONFIG, ADDED, SPECIAL = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
AGAIN = "copy the model's tokenizer again"
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word")
_DEFAULTS = dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")
_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")


def build(where: str, files: Mapping[str, bytes], todo: str) -> bytes:
    """tokenizer.json; `files` are those of the folder `where` by name, `todo` what to do with others."""
    config = _table(where, files, CONFIG)
    kind = config.get("tokenizer_class")
    if kind not in _CLASSES or config.get("add_prefix_space"):
        found = f"is {kind!r}, from which it does not follow how texts are split"
        raise UserError(f"tokenizer_class ({where}/{CONFIG})", found, todo)
    vocab = _table(where, files, VOCAB)
    if not vocab or not all(type(number) is int for number in vocab.values()):
        raise CorruptCheckpoint(f"{where}/{VOCAB}", "is no table of tokens and their ids", AGAIN)
    try:
        lines = files[MERGES].decode().split("\n")
        merges = [tuple(line.rstrip("\r").split(" ")) for line in lines if line and not line.startswith("#version")]
        inner = tokenizers.Tokenizer(models.BPE(vocab, merges))  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001 - the package raises bare Exception
        raise CorruptCheckpoint(f"{where}/{MERGES}", f"does not fit {VOCAB} ({error})", AGAIN) from None
    inner.normalizer, inner.decoder = normalizers.NFC(), decoders.ByteLevel()
    inner.pre_tokenizer = PRE_TOKENIZERS["qwen2"].build()
    for number, token in sorted(_added(where, files, config, vocab, todo).items()):
        inner.add_tokens([token])
        if inner.token_to_id(token.content) != number:
            found = f"gives {token.content} the id {number}, and ids before it are missing"
            raise UserError(where, found, todo)
    return inner.to_str().encode()


def _added(
    where: str, files: Mapping[str, bytes], config: Mapping[str, Any], vocab: Mapping[str, int], todo: str
) -> dict[int, AddedToken]:
    """Tokens that are found in a text before it is split, by their ids."""
    special = {**_DEFAULTS, **_table(where, files, SPECIAL), **config}
    names = {_content(special.get(role)) for role in _ROLES}
    more = special.get("additional_special_tokens") or ()
    names |= {_content(token) for token in more}
    found: dict[int, AddedToken] = {}
    for number, entry in (config.get("added_tokens_decoder") or {}).items():
        flags = {flag: bool(entry.get(flag, False)) for flag in _FLAGS}
        found[int(number)] = AddedToken(entry["content"], special=bool(entry.get("special")), **flags)
    known = {token.content for token in found.values()}
    for token in _table(where, files, ADDED).keys() - known:  # whether they are special follows from no file
        raise UserError(
            f"{where}/{ADDED}", f"has {token}, which added_tokens_decoder of {CONFIG} does not describe", todo
        )
    for name in sorted(name for name in names if name is not None and name not in known):
        if name not in vocab:
            raise UserError(where, f"names {name} as a special token, which has no id", AGAIN)
        found[vocab[name]] = AddedToken(name, special=True, normalized=False)
    return found


def _content(token: Any) -> str | None:
    """A token as a text, or as a table of a text and flags."""
    return token.get("content") if isinstance(token, dict) else token


def _table(where: str, files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        data = json.loads(files[name])
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise CorruptCheckpoint(f"{where}/{name}", "is not a JSON object", AGAIN)
    return data
