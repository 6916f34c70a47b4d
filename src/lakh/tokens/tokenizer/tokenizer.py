"""Text to token ids and back, with the tokenizer of a run or of any checkpoint.

A tokenizer that lakh trains is a byte-level BPE: every byte has a token, so any text survives the round trip; every
digit is a token of its own; ids 0..15 are the special tokens in the order of SPECIAL_TOKENS. The tokenizer of another
checkpoint is used as it is, with the roles that its files give to its special tokens (special_tokens.py).

Text is never encoded as a special token, even if it contains `<|endoftext|>`, because a corpus of code contains files
about tokenizers. The folder of a tokenizer holds tokenizer.json, and manifest.json if `lakh tokens train` made it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import decoders, pre_tokenizers

from lakh import storage
from lakh.errors import DataError, UserError
from lakh.tokens.tokenizer import folders
from lakh.tokens.tokenizer.special_tokens import (
    END_NAMES,
    FILE_END_NAMES,
    FIM_END_NAMES,
    CheckpointRoles,
    find_fim,
    read_roles,
    roles_of,
)

__all__ = ["FILE", "NUM_SPECIAL", "SPECIAL_TOKENS", "Tokenizer", "byte_level_tokenizer", "threads"]

FILE = "tokenizer.json"
MADE_BY = "lakh tokens train CORPUS --out DIR"
NUM_SPECIAL = 16
ANCHOR = "☺"  # no merge joins it to what follows; the reference code of Code Llama and Mistral does the same
_NAMED = ("endoftext", "fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")
SPECIAL_TOKENS = tuple(
    f"<|{name}|>" for name in (*_NAMED, *(f"reserved_{i}" for i in range(NUM_SPECIAL - len(_NAMED))))
)


class Tokenizer:
    """A trained tokenizer, identified by the SHA-256 of its file."""

    def __init__(self, raw: bytes, where: str = FILE, roles: CheckpointRoles = CheckpointRoles()) -> None:  # noqa: B008
        try:
            self._inner = tokenizers.Tokenizer.from_buffer(raw)
        except BaseException as error:  # the package raises bare Exception, and its assertions are no Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            what = str(error).partition("\n")[0][:120]
            raise DataError(where, f"is not a tokenizer ({what})", f"make one with: {MADE_BY}") from None
        self._inner.encode_special_tokens = True  # text that contains a special token stays text
        self._inner.no_truncation()
        self._inner.no_padding()
        self.raw = raw
        """The bytes of tokenizer.json."""
        self._where, self._roles = where, roles
        self.sha256 = hashlib.sha256(raw).hexdigest()
        self.vocab_size = max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.end_ids = self._find_end_ids(roles)
        """The tokens that end a text, the usual one first; empty if it is unknown."""
        self.begin_ids = self._find_begin_ids(roles)
        """The tokens that a model expects before every text; mostly one or none."""
        pad = roles.pad_id if roles.pad_token is None else self._inner.token_to_id(roles.pad_token)
        self.pad_id: int | None = self._inner.token_to_id("<|fim_pad|>") if pad is None else pad
        self.fim = find_fim(self._inner.token_to_id, roles.fim_tokens)
        """Its fill-in-the-middle tokens, if it has them."""
        self.prefix_space = _find_prefix_space(json.loads(raw))
        """Whether a space is put before a text: never, at its beginning, or also after each special token."""

    @staticmethod
    def load(path: str | Path) -> Tokenizer:
        """Load tokenizer.json, or the tokenizer of a folder or URL, also one in another form (folders/)."""
        url = str(path)
        if not url.endswith(".json") and not (storage.is_local(url) and storage.local_path(url).is_file()):
            if not storage.exists(url):
                raise UserError(url, "no such folder", f"make a tokenizer with: {MADE_BY}")
            folder, url = url, storage.join(url, FILE)
            if not storage.exists(url) and folders.is_convertible(folder):
                found = folders.convert(folder)
                return Tokenizer(found.raw, folder, roles_of(folder, found.files))
        if not storage.exists(url):
            raise UserError(url, "no such file", f"make a tokenizer with: {MADE_BY}")
        return Tokenizer(storage.read_bytes(url), url, read_roles(url.rpartition("/")[0] or "."))

    def save(self, folder: str | Path) -> str:
        """Write tokenizer.json, byte for byte as it was read, into a folder; returns its URL."""
        url = storage.join(folder, FILE)
        storage.write_bytes(url, self.raw)
        return url

    def save_roles(self, folder: str | Path) -> None:
        """Write the roles that a checkpoint's files state into generation_config.json beside tokenizer.json."""
        url = storage.join(folder, "generation_config.json")
        storage.remove_tree(url)
        if self._roles != CheckpointRoles():
            ids = {"eos_token_id": list(self.end_ids), "pad_token_id": self.pad_id}
            storage.write_bytes(url, f"{json.dumps(ids)}\n".encode())

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        try:
            ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):
            found = "is not valid Unicode: it contains half of a surrogate pair"
            raise UserError("text", found, "send complete characters") from None
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """The ids of text that goes on where other text ended: without the space that is put before a text."""
        if self.prefix_space == "never" or not text:
            return self.encode(text)
        anchor, ids = self.encode(ANCHOR), self.encode(ANCHOR + text)
        return ids[len(anchor) :] if ids[: len(anchor)] == anchor else self.encode(text)

    def encode_pieces(self, pieces: Sequence[str | int]) -> list[int]:
        """The ids of one text with special tokens, which are given by their ids."""
        found: list[int] = []
        for number, piece in enumerate(pieces):
            if isinstance(piece, int):
                found.append(piece)
            elif number and self.prefix_space == "first":
                found += self.encode_continuation(piece)
            else:
                found += self.encode(piece)
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, on several threads."""
        return [item.ids for item in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], *, show_special: bool = False) -> str:
        """The text of these ids. An incomplete character becomes U+FFFD; special tokens are omitted by default."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=not show_special)
        return text

    def decode_continuation(self, ids: Sequence[int], *, show_special: bool = False) -> str:
        """The text of ids that go on where other text ended: decoders drop the space of a text's first token."""
        context = self.continuation_context
        text = self.decode([*context, *ids], show_special=show_special)
        return text[len(self.decode(context, show_special=show_special)) :] if context else text

    @cached_property
    def continuation_context(self) -> tuple[int, ...]:
        """Ids to decode before those that go on where other text ended; none if that changes nothing."""
        return () if self.prefix_space == "never" else tuple(self.encode(ANCHOR))

    @cached_property
    def file_end_ids(self) -> tuple[int, ...]:
        """The tokens that end the completion of a file: those that end a text, and those that begin another file."""
        found = [number for name in FILE_END_NAMES if (number := self.find(name)) is not None]
        return tuple(dict.fromkeys((*self.end_ids, *found)))

    @property
    def eot(self) -> int:
        """The token that ends a text."""
        if not self.end_ids:
            found = "has no token that ends a text"
            raise UserError(self._where, found, "name it as eos_token in tokenizer_config.json beside it")
        return self.end_ids[0]

    def token(self, number: int) -> str:
        """The name of a token, such as "</s>"."""
        return str(self._inner.id_to_token(number))

    def _find_end_ids(self, roles: CheckpointRoles) -> tuple[int, ...]:
        by_name = None if roles.end_token is None else self._inner.token_to_id(roles.end_token)
        found = [*roles.end_ids, *([] if by_name is None else [by_name])]
        if not found:
            found = [number for name in END_NAMES if (number := self._inner.token_to_id(name)) is not None][:1]
        found += [number for name in FIM_END_NAMES if (number := self._inner.token_to_id(name)) is not None]
        return tuple(dict.fromkeys(number for number in found if 0 <= number < self.vocab_size))

    def _find_begin_ids(self, roles: CheckpointRoles) -> tuple[int, ...]:
        begin = roles.begin_id if roles.begin_token is None else self._inner.token_to_id(roles.begin_token)
        if roles.adds_begin is not None:
            return (begin,) if roles.adds_begin and begin is not None else ()
        whole, plain = (self._inner.encode("a", add_special_tokens=adds).ids for adds in (True, False))
        return tuple(whole[: whole.index(plain[0])]) if plain and plain[0] in whole else ()

    def special(self, token: str) -> int:
        """The id of a special token, e.g. "<|fim_prefix|>"."""
        number = self.find(token)
        if number is None:
            raise UserError(self._where, f"has no token {token}", f"use one made with: {MADE_BY}")
        return number

    def find(self, token: str) -> int | None:
        """The id of a special token, if it exists."""
        number = self._inner.token_to_id(token)
        if number is None:  # the form of other tokenizers: <fim_prefix>
            number = self._inner.token_to_id(token.replace("<|", "<").replace("|>", ">"))
        return None if number is None else int(number)


def _find_prefix_space(description: Mapping[str, Any]) -> Literal["never", "first", "always"]:
    """As a tokenizer.json says it."""
    for step in (*_steps(description.get("normalizer")), *_steps(description.get("pre_tokenizer"))):
        if step.get("type") == "Prepend" or (step.get("type") == "ByteLevel" and step.get("add_prefix_space")):
            return "always"
        if step.get("type") == "Metaspace":
            scheme = step.get("prepend_scheme") or ("always" if step.get("add_prefix_space", True) else "never")
            return "first" if scheme == "first" else "never" if scheme == "never" else "always"
    return "never"


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer, or those of a sequence."""
    if isinstance(part, dict):
        yield part
        for inner in part.get("normalizers") or part.get("pretokenizers") or ():
            yield from _steps(inner)


def byte_level_tokenizer(bpe: tokenizers.models.BPE, *, single_digits: bool = True) -> tokenizers.Tokenizer:
    """Byte-level BPE with GPT-2's splitting of text, with every digit by itself if `single_digits`."""
    inner = tokenizers.Tokenizer(bpe)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)]
    inner.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level]) if single_digits else byte_level
    inner.decoder = decoders.ByteLevel()
    return inner


@contextlib.contextmanager
def threads() -> Iterator[None]:
    """Let `tokenizers` use threads, without its warning when the process forks later."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ.setdefault(name, "true")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
