"""The tokenizer of a folder without tokenizer.json, from the files that it has in place of it.

tekken.py                Mistral's tekken.json          ranks.py           byte strings with ranks: tekken, tiktoken
tiktoken_file.py         tiktoken.model, qwen.tiktoken  sentence_piece.py  tokens with scores: tokenizer.model, GGUF
vocab_merges.py          vocab.json and merges.txt      added.py           tokens that tokenizer_config.json adds
sentence_piece_model.py  tokenizer.model

No code of the folder is run. A file whose ids lakh would not reproduce is a UserError, a damaged one a DataError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import tokenizers
from tokenizers import processors

from lakh import storage
from lakh.errors import CorruptCheckpoint, LakhError, UserError
from lakh.tokens.tokenizer.folders import added, sentence_piece_model, tekken, tiktoken_file, vocab_merges

__all__ = ["ConvertedTokenizer", "convert", "is_convertible"]

TOKENIZER_JSON = "tokenizer.json"
_BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""What says which tokens there are, and which of them have a role."""
Build = Callable[
    [str, Mapping[str, bytes], Mapping[str, Any], str], tuple[tokenizers.Tokenizer, Mapping[str, Any]]
]  # where, files by name, tokenizer_config.json, what to do with others
_KINDS: dict[tuple[str, ...], Build] = {
    (tekken.FILE,): tekken.build,
    (tiktoken_file.KIMI_FILE,): partial(tiktoken_file.build, tiktoken_file.KIMI_FILE),
    (tiktoken_file.QWEN_FILE,): partial(tiktoken_file.build, tiktoken_file.QWEN_FILE),
    (vocab_merges.VOCAB, vocab_merges.MERGES): vocab_merges.build,
    (sentence_piece_model.FILE,): sentence_piece_model.build,
}
"""By the files that each kind consists of; of several kinds in a folder the first is used."""
_UNREAD = ("vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
"""Tokenizers that lakh does not read."""


@dataclass(frozen=True)
class ConvertedTokenizer:
    raw: bytes
    """tokenizer.json."""
    files: Mapping[str, bytes]
    """What lies beside it, by name: the folder's files of roles, tokenizer_config.json and its chat template."""


def convert(folder: str) -> ConvertedTokenizer:
    """The tokenizer of a folder that has no tokenizer.json."""
    names = set(storage.list_dir(folder))
    convert_it = f"AutoTokenizer.from_pretrained({folder!r}).save_pretrained({folder!r})"
    todo = f"copy the model's tokenizer.json there, or make it with transformers: {convert_it}"
    for kind, build in _KINDS.items():
        if names.issuperset(kind):
            code = {name for name in names if name.startswith("tokenization_") and name.endswith(".py")}
            wanted = names & {*kind, *_BESIDE, *code}
            files = {name: storage.read_bytes(storage.join(folder, name)) for name in sorted(wanted)}
            return _finish(folder, files, build, todo)
    others = _unread(names)
    url = storage.join(folder, TOKENIZER_JSON)
    if not others:
        raise UserError(url, "no such file", "copy the model's tokenizer there")
    raise UserError(url, f"no such file; {others[0]} is there, which lakh does not read", todo)


def is_convertible(folder: str) -> bool:
    """Whether a folder has files of a tokenizer in another form, also of one that `convert` refuses."""
    names = set(storage.list_dir(folder))
    return any(names.issuperset(kind) for kind in _KINDS) or bool(_unread(names))


def _unread(names: Iterable[str]) -> list[str]:
    return [name for name in sorted(names) if name in _UNREAD or name.startswith("tokenizer.model.")]


def _finish(folder: str, files: Mapping[str, bytes], build: Build, todo: str) -> ConvertedTokenizer:
    config = added.json_table(folder, files, added.CONFIG)
    try:
        inner, found = build(folder, files, config, todo)
        begin = added.content(found.get("bos_token"))
        if found.get("add_bos_token") and begin is not None and (number := inner.token_to_id(begin)) is not None:
            inner.post_processor = processors.TemplateProcessing(
                single=[begin, "$A"], pair=[begin, "$A", "$B"], special_tokens=[(begin, number)]
            )
        raw = inner.to_str().encode()
    except BaseException as error:  # the package raises bare Exception, and its assertions are no Exception
        if isinstance(error, LakhError):
            raise
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        what = str(error).partition("\n")[0][:120]
        raise CorruptCheckpoint(folder, f"has a damaged tokenizer ({what})", added.AGAIN) from None
    if found is not config:  # what the folder says of its own class and code is not true of tokenizer.json
        found = {key: value for key, value in found.items() if key != "auto_map"}
        found["tokenizer_class"] = "PreTrainedTokenizerFast"
    beside = {name: files[name] for name in _BESIDE if name in files}
    return ConvertedTokenizer(raw, {**beside, added.CONFIG: json.dumps(found, ensure_ascii=False, indent=2).encode()})
