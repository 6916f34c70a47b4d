"""Find reference programs in Python documents, whatever their indentation, comments and names.

Names must map one to one; keywords, built-ins, attributes, numbers, strings and operators must be equal. In a program
with fewer than NAMED_TOKENS tokens the function must also have its name: others wrote `return len(x)` too. Candidates
come from a hash of ANCHOR tokens in which all free names count as equal; each candidate is then compared token by
token, so a match never depends on hashing alone. Linear in the text.
"""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from lakh.compiled import compiled
from lakh.corpus.parsing.lexer import hash_of
from lakh.corpus.parsing.text_features import tokens_of

__all__ = ["ProgramIndex", "ReferenceProgram", "low_bits_table"]

ANCHOR = 8
"""Tokens of a program that must agree before it is compared closely."""
NAMED_TOKENS = 14
TABLE_BITS = 16
FIXED_WORDS = frozenset(keyword.kwlist) | frozenset(name for name in dir(builtins) if name.islower())


@dataclass(frozen=True)
class ReferenceProgram:
    """Tokens of a reference program: `coarse` has 0 for every free name, `back` the distance to its last use."""

    task: str
    coarse: np.ndarray
    back: np.ndarray
    anchor: int
    name: int = 0
    """The hash of the function's name if it must be the same; else 0."""

    @staticmethod
    def of(task: str, code: str, min_tokens: int) -> ReferenceProgram | None:
        """The largest function or class of the code, without docstring; None if it has too few tokens."""
        coarse, full = _largest_block(code)
        if len(coarse) < max(min_tokens, ANCHOR):
            return None
        last: dict[int, int] = {}
        back = np.zeros(len(coarse), np.int64)
        for at, (kind, name) in enumerate(zip(coarse.tolist(), full.tolist(), strict=True)):
            if kind == 0:
                back[at] = at - last[name] if name in last else 0
                last[name] = at
        # the anchor with the most distinct tokens is the rarest
        variety = [len(set(coarse[at : at + ANCHOR].tolist())) for at in range(len(coarse) - ANCHOR + 1)]
        name = int(full[1]) if len(coarse) < NAMED_TOKENS and coarse[1] == 0 else 0
        return ReferenceProgram(task, coarse, back, int(np.argmax(variety)), name)


class ProgramIndex:
    """Reference programs by the hash of their anchor."""

    def __init__(self, programs: Iterable[ReferenceProgram]) -> None:
        distinct: dict[bytes, ReferenceProgram] = {}
        for program in programs:
            distinct.setdefault(program.coarse.tobytes() + program.back.tobytes() + b"%d" % program.name, program)
        self.programs = tuple(distinct.values())
        anchors = np.array([_anchor_hash(p.coarse, p.anchor, ANCHOR) for p in self.programs], np.int64)
        self._owners = np.argsort(anchors, kind="stable")
        self._anchors = anchors[self._owners]
        self._table = low_bits_table(anchors)

    def find(self, data: bytes) -> str:
        """The task of the first program that a Python text contains, or ""."""
        if not self.programs:
            return ""
        coarse, full, _ = _tokens(data)
        for at, slot in _find_anchors(coarse, ANCHOR, self._anchors, self._table):
            last = int(np.searchsorted(self._anchors, self._anchors[slot], side="right"))
            for owner in self._owners[slot:last]:
                program = self.programs[owner]
                begin = at - program.anchor
                if _agrees(coarse, full, begin, program.coarse, program.back) and (
                    not program.name or int(full[begin + 1]) == program.name
                ):
                    return program.task
        return ""


def low_bits_table(keys: np.ndarray) -> np.ndarray:
    """A bit for each low half of a key: a prefilter that ends most look-ups."""
    table = np.zeros(1 << TABLE_BITS, np.bool_)
    table[keys & ((1 << TABLE_BITS) - 1)] = True
    return table


def _largest_block(code: str) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of the largest top-level function or class, or all tokens if there is none."""
    coarse, full, tops = _tokens(code.encode())
    heads = np.flatnonzero(np.isin(full, [hash_of(word) for word in ("def", "class", "async")]) & tops)
    bounds = [*np.flatnonzero(tops).tolist(), len(full)]
    blocks = [(next((b for b in bounds if b > head), len(full)) - head, -head) for head in heads.tolist()]
    if not blocks:
        return coarse, full
    size, start = max(blocks)
    return coarse[-start : -start + size], full[-start : -start + size]


def _tokens(data: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(coarse, full, tops): tokens without layout and docstrings; `tops` marks the first of a top-level statement."""
    tokens = tokens_of(data, "python")
    size = len(tokens.hashes)
    coarse, full, tops = np.empty(size, np.int64), np.empty(size, np.int64), np.zeros(size, np.bool_)
    count = _strip(tokens.hashes, tokens.kinds, _fixed_words(), hash_of("."), coarse, full, tops)
    return coarse[:count], full[:count], tops[:count]


@lru_cache(maxsize=1)
def _fixed_words() -> np.ndarray:
    return np.array(sorted(hash_of(word) for word in FIXED_WORDS), np.int64)


@compiled
def _strip(hashes: Any, kinds: Any, fixed: Any, dot: int, coarse: Any, full: Any, tops: Any) -> int:
    count = 0
    level = 0
    fresh = True  # at the first token of a logical line
    size = len(hashes)
    last = np.int64(0)
    for i in range(size):
        if kinds[i] == 4:
            if hashes[i] == 1:
                level += 1
            elif hashes[i] == 2:
                level -= 1
            fresh = True
            continue
        if fresh and kinds[i] == 2 and (i + 1 == size or kinds[i + 1] == 4):
            continue  # a string alone on its line
        free = False
        if kinds[i] == 0 and last != dot:
            at = np.searchsorted(fixed, hashes[i])
            free = at >= len(fixed) or fixed[at] != hashes[i]
        coarse[count] = 0 if free else hashes[i]
        full[count] = hashes[i]
        tops[count] = fresh and level == 0
        count += 1
        last = hashes[i]
        fresh = False
    return count


@compiled
def _anchor_hash(coarse: Any, begin: int, size: int) -> Any:
    h = np.uint64(1)  # unsigned, as in lexer.hash_bytes
    for k in range(size):
        h = (h ^ np.uint64(coarse[begin + k])) * np.uint64(0x9E3779B97F4A7C15)
        h = h ^ (h >> np.uint64(32))
    return np.int64(h)


@compiled
def _find_anchors(coarse: Any, size: int, anchors: Any, table: Any) -> Any:
    found = [(0, 0) for _ in range(0)]
    for i in range(len(coarse) - size + 1):
        h = _anchor_hash(coarse, i, size)
        if table[h & np.int64(0xFFFF)]:
            at = np.searchsorted(anchors, h)
            if at < len(anchors) and anchors[at] == h:
                found.append((i, int(at)))
    return found


@compiled
def _agrees(coarse: Any, full: Any, begin: int, target: Any, back: Any) -> bool:
    """Whether a program is at `begin`, with its free names mapped one to one."""
    if begin < 0 or begin + len(target) > len(coarse):
        return False
    for k in range(len(target)):
        if coarse[begin + k] != target[k]:
            return False
    for k in range(len(target)):
        if target[k] != 0:
            continue
        if back[k] > 0:
            if full[begin + k] != full[begin + k - back[k]]:
                return False
        else:  # a name not seen before must be a new one here too
            for j in range(k):
                if target[j] == 0 and full[begin + j] == full[begin + k]:
                    return False
    return True
