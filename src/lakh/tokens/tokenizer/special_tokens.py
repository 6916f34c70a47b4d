"""The roles of special tokens: which id ends a text, which begins one, which mark a fill-in-the-middle prompt.

A checkpoint says them in files beside tokenizer.json: generation_config.json and config.json (ids), and
tokenizer_config.json (tokens). Where these are missing, known names decide: those that `lakh tokens train` writes, and
those of published model families. A role that no token has is None; what needs it is refused when it is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lakh import storage
from lakh.errors import DataError

__all__ = [
    "END_NAMES",
    "FILE_END_NAMES",
    "FIM_END_NAMES",
    "FIM_NAMES",
    "CheckpointRoles",
    "FimTokens",
    "find_fim",
    "read_roles",
    "roles_of",
]

ROLE_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
END_NAMES = (
    "<|endoftext|>",
    "<endoftext>",
    "</s>",
    "<|end_of_text|>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
)


class FimTokens(NamedTuple):
    prefix: int
    suffix: int
    middle: int | None
    """None: the prompt is the suffix, then the prefix, each after its token (Codestral)."""
    has_spm: bool = True
    """Trained with the suffix before the prefix as well."""


# (prefix, suffix, middle, has_spm) as tokenizers spell them. Sources: the model cards of the families.
FIM_NAMES: tuple[tuple[str, str, str | None, bool], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", True),  # lakh, Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", True),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", True),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", False),
    ("▁<PRE>", "▁<SUF>", "▁<MID>", True),  # Code Llama
    ("[PREFIX]", "[SUFFIX]", None, True),  # Codestral
)

FIM_END_NAMES = ("<|file_separator|>",)
"""Tokens that end a middle and that no file states. CodeGemma: it writes the separator of files there."""

FILE_END_NAMES = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
"""Tokens after which another file begins, or nothing: the completion of a file ends there (lakh, Qwen, StarCoder)."""


def find_fim(
    id_of: Callable[[str], int | None], stated: tuple[str | None, str | None, str | None] = (None, None, None)
) -> FimTokens | None:
    """The fill-in-the-middle tokens of a vocabulary: those with known names, or prefix, suffix and middle as `stated`
    by the files of a checkpoint."""
    more = () if stated[0] is None or stated[1] is None else ((stated[0], stated[1], stated[2], False),)
    for prefix, suffix, middle, has_spm in (*FIM_NAMES, *more):
        first, second, third = id_of(prefix), id_of(suffix), None if middle is None else id_of(middle)
        if first is not None and second is not None and (middle is None or third is not None):
            return FimTokens(first, second, third, has_spm)
    return None


@dataclass(frozen=True)
class CheckpointRoles:
    """What the files of a checkpoint say."""

    end_ids: tuple[int, ...] = ()
    end_token: str | None = None
    pad_id: int | None = None
    pad_token: str | None = None
    begin_id: int | None = None
    begin_token: str | None = None
    adds_begin: bool | None = None
    """Whether text starts with it; None: as tokenizer.json says."""
    fim_tokens: tuple[str | None, str | None, str | None] = (None, None, None)
    """Of prefix, suffix and middle, for names that are not known."""


def read_roles(folder: str) -> CheckpointRoles:
    """The roles that the files of a folder state; empty ones where it has none of them."""
    urls = {name: storage.join(folder, name) for name in ROLE_FILES}
    return roles_of(folder, {name: storage.read_bytes(url) for name, url in urls.items() if storage.exists(url)})


def roles_of(folder: str, files: Mapping[str, bytes]) -> CheckpointRoles:
    """The roles that files of a folder state, by their names."""
    config, generation, names = (_table(folder, files, name) for name in ROLE_FILES)
    ids = {**config, **generation}
    adds = names.get("add_bos_token")
    return CheckpointRoles(
        end_ids=_ids(ids.get("eos_token_id")),
        end_token=_token(names.get("eos_token")),
        pad_id=next(iter(_ids(ids.get("pad_token_id"))), None),
        pad_token=_token(names.get("pad_token")),
        begin_id=next(iter(_ids(ids.get("bos_token_id"))), None),
        begin_token=_token(names.get("bos_token")),
        adds_begin=adds if isinstance(adds, bool) else None,
        fim_tokens=(
            _token(names.get("prefix_token")),
            _token(names.get("suffix_token")),
            _token(names.get("middle_token")),
        ),
    )


def _table(folder: str, files: Mapping[str, bytes], name: str) -> Mapping[str, Any]:
    if name not in files:
        return {}
    try:
        data = json.loads(files[name])
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise DataError(storage.join(folder, name), "is not a JSON object", "copy the model again")
    return {key: value for key, value in data.items() if value is not None}


def _ids(value: Any) -> tuple[int, ...]:
    """An id, or a list of them."""
    values = value if isinstance(value, list) else [value]
    return tuple(number for number in values if isinstance(number, int) and not isinstance(number, bool))


def _token(value: Any) -> str | None:
    """A token, or the table in which older files describe it."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None
