"""The hash table of words: every word has its row, and no other word has one."""

from __future__ import annotations

import numpy as np
import pytest

from lakh.corpus.parsing.lexer import CLIKE, PYTHON, TEMPLATE, hash_bytes, hash_of
from lakh.corpus.parsing.normal_form.precedence import KOTLIN, SWIFT, word_precedences
from lakh.corpus.parsing.table_driven.syntax import OPERATOR_START, TABLES, table_syntax
from lakh.corpus.parsing.word_table import EMPTY, NO_ROW, row_of, word_table


def test_every_word_has_its_row() -> None:
    words = {f"word{n}": (n, -n) for n in range(1000)}
    keys, rows = word_table(words, 2)
    for word, row in words.items():
        assert tuple(rows[row_of(keys, hash_of(word))]) == row
    assert all(row_of(keys, hash_of(f"other{n}")) == NO_ROW for n in range(1000))


def test_words_that_share_a_slot_are_found_around_the_end() -> None:
    last = [word for n in range(2000) if hash_of(word := f"w{n}") & 15 == 15][:3]  # three words have 16 slots
    keys, rows = word_table({word: (n,) for n, word in enumerate(last, 1)}, 1)
    assert len(keys) == 16
    assert [int(rows[row_of(keys, hash_of(word)), 0]) for word in last] == [1, 2, 3]
    absent = next(h for n in range(2000) if (h := hash_of(f"x{n}")) & 15 == 15)
    assert row_of(keys, absent) == NO_ROW


def test_an_empty_table_has_no_word() -> None:
    keys, rows = word_table({}, 4)
    assert list(keys) == [EMPTY]
    assert rows.shape == (1, 4)
    assert row_of(keys, hash_of("a")) == NO_ROW


@pytest.mark.parametrize(("family", "flags"), [(PYTHON, 0), (CLIKE, TEMPLATE), (CLIKE, KOTLIN), (CLIKE, SWIFT)])
def test_if_and_return_are_words_of_every_precedence_table(family: int, flags: int) -> None:
    keys, _ = word_precedences(family, flags)
    assert row_of(keys, hash_of("return")) != NO_ROW
    assert row_of(keys, hash_of("not_a_keyword")) == NO_ROW


@pytest.mark.parametrize("language", sorted(TABLES))
def test_operators_of_a_language_begin_with_marked_bytes(language: str) -> None:
    syntax = table_syntax(language)
    operators = [word for level in TABLES[language].get("operators", []) for word in level.split() if word[-1] != ":"]
    for word in operators:
        assert row_of(syntax.known, hash_of(word)) != NO_ROW
        if len(word) > 1:
            assert syntax.bytes_of[word.encode()[0]] & OPERATOR_START
    assert np.count_nonzero(syntax.known) >= len(set(operators))


def test_hashes_in_python_are_those_of_compiled_code() -> None:
    for word in ("", "a", "class", "=>", "é漢字", *(f"w{n}" * (n % 7) for n in range(300))):
        data = np.frombuffer(word.encode(), np.uint8)
        assert hash_of(word) == hash_bytes(data, 0, len(data)), word
