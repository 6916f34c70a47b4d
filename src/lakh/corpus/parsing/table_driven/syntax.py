"""The syntax tables of syntax.toml as arrays for the kernels of this folder."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lakh.corpus.parsing.word_table import word_table

__all__ = ["TABLES", "TableSyntax", "table_syntax"]

TABLES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("syntax.toml").read_text(encoding="utf-8"))

# Places in `rules`.
FLAGS, LITERALS, DOUBLE, SINGLE, BACKTICK, CONTINUATION, PHRASE, INFIX = range(8)

# Bits of rules[FLAGS].
ENDS, OFFSIDE, SEMICOLON_ENDS, SEMICOLON_DROPS, CASELESS, HASH_IN_WORDS, GLUE, TUPLES, SAME_QUOTES, PLAIN_QUOTES = (
    1 << bit for bit in range(10)
)
(
    ONE_RESULT, BRACE_SUBSCRIPTS, KEEP_FIRST, DIRECTIVES, PRAGMAS, DOLLAR_COMMENTS, AFTER_BLANK, GROUPS, APPLICATION,
    KEEP_ARGUMENTS, SYMBOL_RUNS, QUALIFIED, WORDS_BEGIN, LITERAL_CALLS, BIT_STRINGS, OPERATOR_NAMES,
    RECORDS, UNICODE_OPERATORS, OWN_OPERATORS, LABELS, PERL_CALLS, MACROS,
    BLOCK_PARAMETERS, INFIX_METHODS,
) = (1 << bit for bit in range(10, 34))  # fmt: skip
_FLAGS = {
    "caseless": CASELESS,
    "hash_in_words": HASH_IN_WORDS,
    "tuples": TUPLES,
    "one_result": ONE_RESULT,
    "brace_subscripts": BRACE_SUBSCRIPTS,
    "keep_first": KEEP_FIRST,
    "directives": DIRECTIVES,
    "pragmas": PRAGMAS,
    "dollar_comments": DOLLAR_COMMENTS,
    "comments_after_blank": AFTER_BLANK,
    "groups": GROUPS,
    "application": APPLICATION,
    "keep_arguments": KEEP_ARGUMENTS,
    "symbol_runs": SYMBOL_RUNS,
    "qualified": QUALIFIED,
    "words_begin": WORDS_BEGIN,
    "literal_calls": LITERAL_CALLS,
    "bit_strings": BIT_STRINGS,
    "operator_names": OPERATOR_NAMES,
    "records": RECORDS,
    "unicode_operators": UNICODE_OPERATORS,
    "own_operators": OWN_OPERATORS,
    "labels": LABELS,
    "perl_calls": PERL_CALLS,
    "macros": MACROS,
    "block_parameters": BLOCK_PARAMETERS,
    "infix_methods": INFIX_METHODS,
}

# Bits of rules[LITERALS].
(
    TRIPLE, LONG_BRACKET, SHELL_HEREDOC, RUBY_HEREDOC, PHP_TEXT, PERL_QUOTES, RUBY_PERCENT, SLASH_REGEX, SIGILS,
    HERE_STRING, BAR_BRACES, DOLLAR_QUOTES, LINE_STRINGS, VERBATIM, R_RAW, DOLLAR_CHARACTER, QUESTION_CHARACTER,
    BACKSLASH_CHARACTER, ELLIPSIS, AMPERSAND, POD, SHELL_EXPANSION, REGEX_AFTER_BLANK,
    POINT_NUMBERS, RAW_TRIPLE, MULTILINE_REGEX,
) = (1 << bit for bit in range(26))  # fmt: skip
_LITERALS = {
    "triple": TRIPLE,
    "raw_triple": RAW_TRIPLE,
    "long_bracket": LONG_BRACKET,
    "shell_heredoc": SHELL_HEREDOC,
    "ruby_heredoc": RUBY_HEREDOC,
    "php_text": PHP_TEXT,
    "perl_quotes": PERL_QUOTES,
    "ruby_percent": RUBY_PERCENT,
    "slash_regex": SLASH_REGEX,
    "regex_after_blank": REGEX_AFTER_BLANK,
    "multiline_regex": MULTILINE_REGEX,
    "sigils": SIGILS,
    "here_string": HERE_STRING,
    "bar_braces": BAR_BRACES,
    "dollar_quotes": DOLLAR_QUOTES,
    "line_strings": LINE_STRINGS,
    "verbatim": VERBATIM,
    "r_raw": R_RAW,
    "dollar_character": DOLLAR_CHARACTER,
    "question_character": QUESTION_CHARACTER,
    "backslash_character": BACKSLASH_CHARACTER,
    "ellipsis": ELLIPSIS,
    "ampersand": AMPERSAND,
    "pod": POD,
    "point_numbers": POINT_NUMBERS,
    "shell_expansion": SHELL_EXPANSION,
}

# Bits of the mode of a quote.
(
    QUOTED,
    ESCAPE,
    DOUBLED,
    MULTILINE,
    CHARACTER,
    TRANSPOSE,
    HASH_BRACE,
    DOLLAR_BRACE,
    DOLLAR_PAREN,
    TICK_ESCAPE,
    BRACE_DOLLAR,
) = (1 << bit for bit in range(11))
_QUOTES = {
    "plain": 0,
    "escape": ESCAPE,
    "doubled": DOUBLED,
    "multiline": MULTILINE,
    "character": CHARACTER,
    "transpose": TRANSPOSE,
    "#{}": HASH_BRACE,
    "${}": DOLLAR_BRACE,
    "$()": DOLLAR_PAREN,
    "tick": TICK_ESCAPE,
    "{$}": BRACE_DOLLAR,
}

# Columns of `roles`, and bits of its last one.
BINARY, RIGHT_TO_LEFT, UNARY_LEVEL, BITS = range(4)
(
    BEFORE, AFTER, OPENS, CLOSES, LEADING, ACCESSOR, ASSIGNMENT, NEWLINE_WORD, REGEX_FOLLOWS, HEAD, KEYWORD, DEFINES,
    BLOCK_WORD, TAKES_LIST,
) = (1 << bit for bit in range(14))  # fmt: skip
_ROLES = {
    "before": BEFORE,
    "after": AFTER,
    "opens": OPENS,
    "closes": CLOSES,
    "leading": LEADING,
    "accessors": ACCESSOR,
    "assign": ASSIGNMENT,
    "newline_words": NEWLINE_WORD,
    "regex_words": REGEX_FOLLOWS,
    "heads": HEAD,
    "keywords": KEYWORD,
    "defines": DEFINES,
    "block_words": BLOCK_WORD,
    "lists": TAKES_LIST,
}

# Values of `classes`, beside those of lexer.py: bytes inside a name, not at its start.
INSIDE = 5

# Columns of `comments`.
KIND, OPEN_SIZE, OPEN, CLOSE_SIZE, CLOSE = 0, 1, 2, 8, 9
LINE, BLOCK, NESTED, WHOLE_LINES = range(4)
WIDTH = 15

# Bits of `bytes_of`.
(
    FREE_IN,
    SPACED,
    TRAILING,
    SPECIAL,
    COMMENT_START,
    TRAILING_SEMICOLON,
    GLUE_FREE,
    OPERATOR_START,  # of two bytes or more
) = (1 << bit for bit in range(8))

NON_ASSOCIATIVE, OWN = 2, 3
_ASSOCIATIVITY = {
    "left:": 0,
    "right:": 1,
    "none:": NON_ASSOCIATIVE,
    "own:": OWN,
    "unary:": 0,
    "phrase:": 0,
    "infix:": 0,
}


class TableSyntax(NamedTuple):
    rules: np.ndarray
    classes: np.ndarray
    """The class of each byte."""
    bytes_of: np.ndarray
    """Bits of each byte."""
    comments: np.ndarray
    known: np.ndarray
    """The keys of a word table: the operators and words that have a role."""
    roles: np.ndarray
    """Its rows."""


@lru_cache(maxsize=256)
def table_syntax(language: str) -> TableSyntax:
    """The table of a language; an unknown one keeps all of its lines."""
    table = TABLES.get(language, {})
    rules = np.zeros(8, np.int64)
    flags = sum(_FLAGS[name] for name in table.get("flags", []))
    flags |= {"ends": ENDS, "offside": ENDS | OFFSIDE, "free": 0}[table.get("newline", "ends")]
    flags |= {"keep": 0, "newline": SEMICOLON_ENDS, "drop": SEMICOLON_DROPS}[table.get("semicolon", "keep")]
    if "same_quotes" in table:
        flags |= SAME_QUOTES if table["same_quotes"] == "" else PLAIN_QUOTES
    flags |= GLUE if "glue" in table else 0
    rules[FLAGS] = flags
    rules[LITERALS] = sum(_LITERALS[name] for name in table.get("literals", []))
    for place, quote in ((DOUBLE, '"'), (SINGLE, "'"), (BACKTICK, "`")):
        if quote in table.get("strings", {}):
            rules[place] = QUOTED + sum(_QUOTES[word] for word in table["strings"][quote].split())
    levels = table.get("operators", [])
    rules[PHRASE] = levels.index("phrase:") + 1 if "phrase:" in levels else 0
    rules[INFIX] = levels.index("infix:") + 1 if "infix:" in levels else 0
    rules[CONTINUATION] = ord(table.get("continuation", "\0"))
    comments = [(LINE, mark, "") for mark in table.get("comments", [])]
    kind = NESTED if table.get("nested") else BLOCK
    comments += [(kind, *pair) for pair in table.get("blocks", [])]
    comments += [(WHOLE_LINES, *pair) for pair in table.get("whole_lines", [])]
    roles = _roles(table)
    bytes_of = _bytes(table, comments, [word for word in roles if len(word) > 1])
    return TableSyntax(rules, _classes(table), bytes_of, _comment_rows(comments), *word_table(roles, 4))


def _classes(table: dict[str, Any]) -> np.ndarray:
    classes = np.zeros(256, np.uint8)
    for byte in range(256):
        if (chr(byte).isalpha() and byte < 128) or byte == ord("_") or byte >= 128:
            classes[byte] = 2
        elif 48 <= byte <= 57:
            classes[byte] = 3
    for byte in table.get("name_start", "").encode():
        classes[byte] = 2
    for byte in table.get("name_inside", "").encode():
        classes[byte] = INSIDE
    for byte in b" \t\f\v\r" + table.get("blanks", "").encode():
        classes[byte] = 1
    classes[10] = 4
    return classes


def _bytes(table: dict[str, Any], comments: list[tuple[int, str, str]], long_words: list[str]) -> np.ndarray:
    bits = np.zeros(256, np.uint8)
    sets = {
        FREE_IN: table.get("free_in", "(["),
        SPACED: table.get("spaced", ""),
        TRAILING: table.get("trailing", ""),
        TRAILING_SEMICOLON: table.get("trailing_semicolon", ""),
        GLUE_FREE: table.get("glue", ""),
        SPECIAL: table.get("same_quotes", "") + "\"'",
        COMMENT_START: "".join(mark[:1] for _, mark, _ in comments),
        OPERATOR_START: "".join(word[0] for word in long_words),
    }
    for bit, members in sets.items():
        for byte in members.encode():
            bits[byte] |= bit
    return bits


def _comment_rows(comments: list[tuple[int, str, str]]) -> np.ndarray:
    rows = np.zeros((len(comments), WIDTH), np.int64)
    for row, (kind, mark, close) in zip(rows, sorted(comments, key=lambda one: -len(one[1])), strict=True):
        row[KIND], row[OPEN_SIZE], row[CLOSE_SIZE] = kind, len(mark), len(close)
        row[OPEN : OPEN + len(mark)] = list(mark.encode())
        row[CLOSE : CLOSE + len(close)] = list(close.encode())
    return rows


def _roles(table: dict[str, Any]) -> dict[str, list[int]]:
    """The roles of each word. Levels count from 1, the loosest operator; 0 is no operator."""
    found: dict[str, list[int]] = {}

    def row(word: str) -> list[int]:
        return found.setdefault(word, [0, 0, 0, 0])

    for level, operators in enumerate(table.get("operators", []), 1):
        first, *others = operators.split()
        kind, members = (first, others) if first in _ASSOCIATIVITY else ("left:", [first, *others])
        for word in members:
            if kind == "unary:":
                row(word)[UNARY_LEVEL] = level
            else:
                row(word)[BINARY] = level
                row(word)[RIGHT_TO_LEFT] = _ASSOCIATIVITY[kind]
    for name, bit in _ROLES.items():
        for word in table.get(name, "").split():
            row(word)[BITS] |= bit
    return found
