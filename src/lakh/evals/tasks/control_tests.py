"""Tests with one literal changed, which an honest program fails.

In other languages than Python, test and code under test are one process, and code can find and print whatever the test
would print at its end. Such a program passes any test. A program that passes its test is run again with changed tests,
and counts as passed only if it fails one of them. Literals whose change breaks any program (names of modules, sizes of
arrays, exit codes) stay as they are.
"""

from __future__ import annotations

import random
import re
import secrets

__all__ = ["changed_tests"]

MOST = 8
_LITERAL = re.compile(
    r"""(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<number>(?<![\w.])\d+(?:\.\d+)?(?![\w.]))"""
    r"""|(?P<truth>\b(?:true|false)\b)"""
)
_STRUCTURE = re.compile(r"\b(?:require|import|include|from|package|use)\b|\bnew\s+\w+\[$|\breturn\s*$")


def changed_tests(test: str, generator: random.Random | None = None) -> list[str]:
    """At most MOST of them, in an order that a program cannot predict; those with a changed number or truth first."""
    generator = generator or secrets.SystemRandom()
    found = [match for match in _LITERAL.finditer(test) if _is_data(match)]
    generator.shuffle(found)
    found.sort(key=lambda match: match["text"] is not None)
    return [test[: match.start()] + _changed(match, generator) + test[match.end() :] for match in found[:MOST]]


def _is_data(literal: re.Match[str]) -> bool:
    before = literal.string[literal.string.rfind("\n", 0, literal.start()) + 1 : literal.start()]
    return re.search(r"\w", literal[0]) is not None and _STRUCTURE.search(before) is None


def _changed(literal: re.Match[str], generator: random.Random) -> str:
    if literal["truth"]:
        return "false" if literal["truth"] == "true" else "true"
    if literal["number"]:
        whole, dot, fraction = literal["number"].partition(".")
        return whole[:-1] + _other(whole[-1], "0123456789", generator) + dot + fraction
    text = literal["text"]
    places = [match.start() for match in re.finditer(r"(?<!\\)\w", text)]
    place = generator.choice(places)
    return text[:place] + _other(text[place], "abcdefghij", generator) + text[place + 1 :]


def _other(letter: str, letters: str, generator: random.Random) -> str:
    return generator.choice([one for one in letters if one != letter])
