"""`vocab.json` and `merges.txt`, as older folders have them, as tokenizer.json.

They hold a byte-level BPE and not how texts are split, which the `tokenizer_class` in tokenizer_config.json must
decide: Qwen2Tokenizer does. Others are a UserError, also GPT2Tokenizer: StarCoder2, SmolLM and OLMo 2 name it and split
texts in ways of their own, so transformers itself gives other ids from these two files than from tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from lakh.errors import CorruptCheckpoint, UserError
from lakh.tokens.tokenizer.folders import added
from lakh.tokens.tokenizer.folders.added import AGAIN, CONFIG
from lakh.tokens.tokenizer.pre_tokenizers import PRE_TOKENIZERS

__all__ = ["MERGES", "VOCAB", "build"]

VOCAB, MERGES = "vocab.json", "merges.txt"
SPECIAL = "special_tokens_map.json"
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_DEFAULTS = dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")
_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")


def build(
    where: str, files: Mapping[str, bytes], config: Mapping[str, Any], todo: str
) -> tuple[tokenizers.Tokenizer, Mapping[str, Any]]:
    """The tokenizer and its tokenizer_config.json; `files` are those of the folder `where` by name, `todo` is what to
    do with others."""
    kind = config.get("tokenizer_class")
    if kind not in _CLASSES or config.get("add_prefix_space"):
        found = f"is {kind!r}, from which it does not follow how texts are split"
        raise UserError(f"tokenizer_class ({where}/{CONFIG})", found, todo)
    vocab = added.json_table(where, files, VOCAB)
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
    tokens = added.described(where, files, config, todo)
    known = {token.content for token in tokens.values()}
    for name in sorted(_special(where, files, config) - known):
        if name not in vocab:
            raise UserError(where, f"names {name} as a special token, which has no id", AGAIN)
        tokens[vocab[name]] = AddedToken(name, special=True, normalized=False)
    added.add(inner, where, tokens, todo)
    return inner, config


def _special(where: str, files: Mapping[str, bytes], config: Mapping[str, Any]) -> set[str]:
    """The names of tokens with a role."""
    special = {**_DEFAULTS, **added.json_table(where, files, SPECIAL), **config}
    more = special.get("additional_special_tokens") or ()
    names = {added.content(token) for token in (*(special.get(role) for role in _ROLES), *more)}
    return {name for name in names if name is not None}
