"""The compiled encoder gives the ids of the `tokenizers` package, or None."""

from __future__ import annotations

import json
import tokenize
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakh.tokens.tokenizer import Tokenizer
from lakh.tokens.tokenizer import parallel_encode as encode
from lakh.tokens.tokenizer.fast_encoder import MAX_WORD, FastEncoder
from lakh.tokens.tokenizer.parallel_encode import encode_all

pytest.importorskip("numba", reason="the compiled encoder needs numba: pip install 'lakh[corpus]'")

SIGNS = "ab'sletrvdm 19\n\t\r .,(_\"é漢\u00a0\u3000²½\u200b𝔸"


@pytest.fixture(scope="module")
def fast(tokenizer: Tokenizer) -> FastEncoder:
    made = FastEncoder.of(tokenizer.raw)
    assert made is not None
    return made


def assert_same(fast: FastEncoder, tokenizer: Tokenizer, texts: list[str]) -> int:
    """Returns how many texts it was not sure of."""
    found = fast.encode([text.encode() for text in texts])
    for text, ids, expected in zip(texts, found, tokenizer.encode_batch(texts), strict=True):
        assert ids is None or ids.tolist() == expected, repr(text)
    return sum(ids is None for ids in found)


@settings(max_examples=200)
@given(st.lists(st.text(st.sampled_from(SIGNS), max_size=60), max_size=4))
def test_text_of_difficult_characters(fast: FastEncoder, tokenizer: Tokenizer, texts: list[str]) -> None:
    assert assert_same(fast, tokenizer, texts) == 0


@settings(max_examples=100)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_arbitrary_text(fast: FastEncoder, tokenizer: Tokenizer, text: str) -> None:
    assert_same(fast, tokenizer, [text])


def test_every_assigned_character(fast: FastEncoder, tokenizer: Tokenizer) -> None:
    """Between letters, digits, signs and blanks: its class decides where words end."""
    used = [chr(code) for code in range(0x3000) if unicodedata.category(chr(code)) not in ("Cs", "Cn")]
    assert assert_same(fast, tokenizer, [f"a{c} {c}{c} 1{c}.{c}\n{c} x{c}'s" for c in used]) == 0


def test_real_code(fast: FastEncoder, tokenizer: Tokenizer) -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(tokenize.__file__).parent.glob("*.py"))[:25]]
    assert assert_same(fast, tokenizer, texts) == 0


def test_unsupported_texts_are_left_to_the_package(fast: FastEncoder, tokenizer: Tokenizer) -> None:
    unsure = ["x" * (MAX_WORD + 1), "\U000e0001 \U0010ffff", "fine"]
    assert assert_same(fast, tokenizer, unsure) == 2
    assert assert_same(fast, tokenizer, ["x" * MAX_WORD]) == 0


def test_the_word_table_is_cleared_before_it_overflows(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakh.tokens.tokenizer.fast_encoder.WORD_POOL_BYTES", 64)
    monkeypatch.setattr("lakh.tokens.tokenizer.fast_encoder.ID_POOL", 600)
    small = FastEncoder.of(tokenizer.raw)
    assert small is not None
    assert assert_same(small, tokenizer, [f"name_{i} other{i}" for i in range(500)]) == 0


def test_other_tokenizers_are_not_supported(tokenizer: Tokenizer) -> None:
    document = json.loads(tokenizer.raw)
    for change in (
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": None},
        {"model": {**document["model"], "dropout": 0.1}},
        {"model": {"type": "Unigram"}},
    ):
        assert FastEncoder.of(json.dumps({**document, **change}).encode()) is None
    assert FastEncoder.of(b"[]") is None


def test_large_jobs_keep_their_order_on_any_number_of_threads(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"def f{i}(x): return x + {i} # {'word ' * (i % 7)}" + "x" * (600 * (i % 5 == 0)) for i in range(60)]
    batches = [[text.encode() for text in texts[i : i + 7]] for i in range(0, 60, 7)]
    slow = [ids.tolist() for batch in encode_all(tokenizer, batches, total_bytes=0) for ids in batch]
    monkeypatch.setattr(encode, "FAST_FROM_BYTES", 0)
    for workers in (1, 3):
        found = encode_all(tokenizer, batches, total_bytes=1, workers=workers)
        assert [ids.tolist() for batch in found for ids in batch] == slow
    assert slow == tokenizer.encode_batch(texts)
    assert np.int32 == next(encode_all(tokenizer, batches, total_bytes=1))[0].dtype
