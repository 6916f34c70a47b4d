"""Files of tiktoken, a line for each token: `tiktoken.model` of Kimi K2 and Moonlight, and `qwen.tiktoken`.

How texts are split and which ids special tokens have is in the Python code of such a folder, which lakh does not run.
It knows two of them by the `tokenizer_class` in tokenizer_config.json; a folder whose code has another pattern is
refused. The ids are those of tiktoken, which splits runs of more than 25,000 characters before it (Kimi).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, normalizers

from lakh.errors import UserError
from lakh.tokens.tokenizer.folders import added
from lakh.tokens.tokenizer.folders.ranks import byte_pairs, read_ranks
from lakh.tokens.tokenizer.pre_tokenizers import KIMI, PRE_TOKENIZERS

__all__ = ["KIMI_FILE", "QWEN_FILE", "build"]

KIMI_FILE, QWEN_FILE = "tiktoken.model", "qwen.tiktoken"


@dataclass(frozen=True)
class _Kind:
    tokenizer_class: str
    pattern: str
    reserved: int
    """Ids behind those of the file."""
    named: tuple[str, ...] = ()
    """The first of them; others that tokenizer_config.json does not name are `filler`."""
    filler: str = "<|reserved_token_{id}|>"
    normalizer: normalizers.Normalizer | None = None


_KINDS = {
    KIMI_FILE: _Kind("TikTokenTokenizer", KIMI, 256),
    QWEN_FILE: _Kind(
        "QWenTokenizer",
        PRE_TOKENIZERS["qwen2"].patterns[0],
        208,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))),
        normalizer=normalizers.NFC(),
    ),
}


def build(
    file: str, where: str, files: Mapping[str, bytes], config: Mapping[str, Any], todo: str
) -> tuple[tokenizers.Tokenizer, Mapping[str, Any]]:
    """The tokenizer and its tokenizer_config.json, of `file`, one of the `files` of the folder `where`."""
    kind = _KINDS[file]
    if config.get("tokenizer_class") != kind.tokenizer_class:
        found = f"is {config.get('tokenizer_class')!r}, from which it does not follow how the tokens of {file} are used"
        raise UserError(f"tokenizer_class ({where}/{added.CONFIG})", found, todo)
    for name in sorted(name for name in files if name.endswith(".py")):
        _require_pattern(f"{where}/{name}", files[name], kind, todo)
    ranks = read_ranks(f"{where}/{file}", files[file])
    inner = byte_pairs(f"{where}/{file}", ranks, kind.pattern)
    if kind.normalizer is not None:
        inner.normalizer = kind.normalizer
    tokens = added.described(where, files, config, todo)
    numbers = range(len(ranks), len(ranks) + kind.reserved)
    names = dict(zip(numbers, kind.named, strict=False))
    for number in numbers:
        if number not in tokens:
            name = names.get(number, kind.filler.format(id=number))
            tokens[number] = AddedToken(name, special=True, normalized=False)
    added.add(inner, where, tokens, todo)
    known = {"bos_token": "[BOS]", "eos_token": "[EOS]"} if file == KIMI_FILE else {"eos_token": "<|endoftext|>"}
    roles = {role: name for role, name in known.items() if inner.token_to_id(name) is not None}
    return inner, {**roles, "add_bos_token": False, **config}


def _require_pattern(where: str, source: bytes, kind: _Kind, todo: str) -> None:
    """Refuse code with another pattern. It is read as text: its strings, those of a list as alternatives."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UserError(where, "is no Python code that says how texts are split", todo) from None
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    if kind.tokenizer_class not in classes:
        return
    found = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            parts = [one.value for one in node.elts if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            found.add("|".join(parts))
    if kind.pattern not in found:
        raise UserError(where, "splits texts by another pattern than the one that lakh knows", todo)
