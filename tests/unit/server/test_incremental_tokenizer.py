"""Line-by-line tokenization gives the ids of the whole text; tenants share no cached lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from lakh.server.prompts.incremental_tokenizer import (
    LINE_COST_CHARS,
    MAX_LINE_CHARS,
    EncodeOptions,
    IncrementalTokenizer,
    TooMuchNewText,
    can_split,
    split_lines,
)
from lakh.tokens.tokenizer import Tokenizer

PARTS = [
    "a",
    "def ",
    "x1",
    " ",
    "  ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    "'s",
    "(",
    "):",
    "_",
    "é",
    "\u00a0",
    "\u2028",
    "\x1c",
    "\x85",
]
PARTS += ["<|endoftext|>", "return left + right", "日", "🙂", "12", "~", "!", "\x7f", "\n    "]
texts = st.lists(st.sampled_from(PARTS), max_size=40).map("".join)


@pytest.fixture(scope="module", params=["bytes", "digits, then bytes"])
def tokenizer(request: pytest.FixtureRequest, tokenizer_json: Path) -> Tokenizer:
    raw = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    if request.param != "bytes":
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_of])
    return Tokenizer(raw.to_str().encode())


@pytest.fixture(scope="module")
def lines(tokenizer: Tokenizer) -> IncrementalTokenizer:
    return IncrementalTokenizer(tokenizer, max_cached_chars=30 * LINE_COST_CHARS)  # evicts all the time


@pytest.mark.slow
@settings(max_examples=300)
@given(text=texts, more=texts)
def test_ids_are_those_of_the_whole_text(
    tokenizer: Tokenizer, lines: IncrementalTokenizer, text: str, more: str
) -> None:
    assert "".join(split_lines(text)) == text
    for typed in (text, text + more, more + text, text):
        assert lines.encode(typed) == tokenizer.encode(typed)
    assert max(len(lines._new), len(lines._old)) <= 30 + 120


def test_a_keystroke_encodes_only_its_own_line(tokenizer: Tokenizer) -> None:
    lines = IncrementalTokenizer(tokenizer)
    text = "def f(x):\n" + "    return x\n" * 50 + "    y"
    with pytest.raises(TooMuchNewText):
        lines.encode(text, EncodeOptions(max_new_chars=20))
    lines.encode(text)
    assert lines.encode(text, EncodeOptions(max_new_chars=0)) == tokenizer.encode(text)
    with pytest.raises(TooMuchNewText):
        lines.encode(text + "z", EncodeOptions(max_new_chars=len("\n    yz") - 1))
    assert lines.encode(text + "z", EncodeOptions(max_new_chars=len("\n    yz"))) == tokenizer.encode(text + "z")


def test_cache_spaces_do_not_share_lines(tokenizer: Tokenizer) -> None:
    lines, text = IncrementalTokenizer(tokenizer), "secret = 1\nprint(secret)"
    lines.encode(text, EncodeOptions("a"))
    lines.encode(text, EncodeOptions("a", 0))
    with pytest.raises(TooMuchNewText):
        lines.encode(text, EncodeOptions("b", len(text) - 1))


def test_min_tokens_is_a_lower_bound(tokenizer: Tokenizer) -> None:
    lines = IncrementalTokenizer(tokenizer)
    for text in ("", "x", "def add(left, right):\n    return left + right\n" * 30, "日本" * 50, " " * 500):
        assert lines.min_tokens(text) <= len(tokenizer.encode(text))
    assert lines.min_tokens("x" * 1_000_000) > 10_000
    assert IncrementalTokenizer(tokenizer, max_cached_chars=1).encode("x\n" * 20_000) == tokenizer.encode(
        "x\n" * 20_000
    )


def test_the_cache_is_bounded_by_its_characters(tokenizer: Tokenizer) -> None:
    lines = IncrementalTokenizer(tokenizer, max_cached_chars=10_000)
    for number in range(60):
        lines.encode("x" * 900 + f"{number}")
    kept = sum(len(line) + LINE_COST_CHARS for part in (lines._new, lines._old) for _, line in part)
    assert 10_000 <= kept <= 2 * 11_000


def test_a_very_long_line_is_not_cached(tokenizer: Tokenizer) -> None:
    lines = IncrementalTokenizer(tokenizer)
    text = "x" * (MAX_LINE_CHARS + 1)
    assert lines.encode(text) == tokenizer.encode(text)
    assert not lines._new


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
GOOD: dict[str, Any] = {"model": {"type": "BPE"}, "pre_tokenizer": BYTES, "normalizer": None, "added_tokens": []}
OTHERS: list[dict[str, Any]] = [
    {"pre_tokenizer": None},
    {"pre_tokenizer": {**BYTES, "use_regex": False}},
    {"pre_tokenizer": {**BYTES, "add_prefix_space": True}},
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split"}, BYTES]}},
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}},
    {"pre_tokenizer": {"type": "Metaspace"}},
    {"normalizer": {"type": "NFC"}},
    {"model": {"type": "Unigram"}},
    {"model": {"type": "BPE", "dropout": 0.1}},
    {"added_tokens": [{"content": "    ", "special": False}]},
]


@pytest.mark.parametrize("other", OTHERS)
def test_other_tokenizers_encode_the_whole_text(other: dict[str, Any]) -> None:
    assert can_split(GOOD)
    assert not can_split({**GOOD, **other})


def test_text_that_cannot_be_split_is_encoded_whole(tokenizer_json: Path) -> None:
    description = json.loads(tokenizer_json.read_bytes())
    description["pre_tokenizer"]["use_regex"] = False  # a token may now span a line break
    tokenizer = Tokenizer(json.dumps(description).encode())
    lines = IncrementalTokenizer(tokenizer)
    text = "def add(left, right):\n    return left\n"
    assert lines.encode(text) == tokenizer.encode(text)
    with pytest.raises(TooMuchNewText):
        lines.encode(text, EncodeOptions(max_new_chars=len(text) - 1))
