"""Byte-level BPE compiled with numba: the same ids as the `tokenizers` package, many times as fast.

Text is split into words by hand-written rules instead of a regular expression, and the ids of known words come from a
hash table. The rules are those of `training.py`: every digit by itself, and otherwise GPT-2's pattern: contractions,
letters or other characters with one space before them, white space.

Texts with a word longer than MAX_WORD bytes (merging is quadratic), or with characters unknown to Python's Unicode
tables, are left to the package. `FastEncoder.of` returns None for a tokenizer.json with other rules or without numba.

60 MB of memory per encoder. numba caches the compiled code on disk. Releases the GIL while encoding.
"""

from __future__ import annotations

import functools
import itertools
import json
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from lakh.tokens.tokenizer.detokenizer import byte_characters

F = TypeVar("F", bound=Callable[..., Any])

try:
    from lakh.compiled import compiled

    HAS_NUMBA = True
except ModuleNotFoundError:
    HAS_NUMBA = False

    def compiled(function: F) -> F:
        return function


__all__ = ["FastEncoder"]

OTHER, LETTER, NUMBER, SPACE, UNKNOWN = 0, 1, 2, 3, 4
KNOWN_CODES = 0x40000  # code points with a class; only private ones lie above
MAX_WORD = 512
SLOTS = 1 << 19  # of the word table, which is cleared when half full
WORD_POOL_BYTES = 8 << 20
ID_POOL = 4 << 20
UNSUPPORTED = ("dropout", "byte_fallback", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")

PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


class FastEncoder:
    """Encodes texts of one tokenizer. Not thread-safe: use one per thread."""

    def __init__(self, bytes_to_ids: np.ndarray, pairs: np.ndarray, merged: np.ndarray) -> None:
        self._vocabulary = (bytes_to_ids, pairs, merged)
        self._word_table = (
            np.zeros(SLOTS, np.uint64),  # hashes
            np.zeros((SLOTS, 4), np.int32),  # of a word: start and length of its bytes, start and count of its ids
            np.zeros(WORD_POOL_BYTES, np.uint8),
            np.zeros(ID_POOL, np.int32),
            np.zeros(3, np.int64),  # used words, bytes, ids
        )

    @staticmethod
    def of(raw: bytes) -> FastEncoder | None:
        """The encoder of a tokenizer.json, or None if its rules are not supported."""
        if not HAS_NUMBA:
            return None
        try:
            document = json.loads(raw)
            model = document["model"]
            plain = model["type"] == "BPE" and not any(model.get(key) for key in UNSUPPORTED)
            if not plain or document["normalizer"] or document["post_processor"]:
                return None
            if document["pre_tokenizer"] != PRE_TOKENIZER or any(not t["special"] for t in document["added_tokens"]):
                return None
            vocab = model["vocab"]
            bytes_to_ids = np.array([vocab[letter] for letter in byte_characters()], np.int32)
            merges: dict[tuple[int, int], tuple[int, int]] = {}
            for rank, merge in enumerate(model["merges"]):
                left, right = merge if isinstance(merge, list) else merge.split(" ")
                merges.setdefault((vocab[left], vocab[right]), (rank, vocab[left + right]))
        except (KeyError, TypeError, ValueError):
            return None
        return FastEncoder(bytes_to_ids, *_merge_table(merges))

    def sibling(self) -> FastEncoder:
        """Another encoder of the same tokenizer, for another thread."""
        return FastEncoder(*self._vocabulary)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray | None]:
        """The ids (int32) of each text, which must be valid UTF-8; None for texts that the package must encode."""
        if not texts:
            return []
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        data = np.frombuffer(b"".join(texts), np.uint8)
        out = np.empty(len(data), np.int32)
        id_ends = np.empty(len(texts), np.int64)
        known = np.empty(len(texts), np.bool_)
        _encode(data, ends, _classes(), *self._vocabulary, *self._word_table, out, id_ends, known)
        out = out[: id_ends[-1]].copy()  # about a third of the buffer
        edges = itertools.pairwise([0, *id_ends.tolist()])
        return [out[a:b] if ok else None for (a, b), ok in zip(edges, known.tolist(), strict=True)]


@functools.cache
def _classes() -> np.ndarray:
    kinds = {"L": LETTER, "N": NUMBER}
    classes = np.empty(KNOWN_CODES, np.uint8)
    category = unicodedata.category
    for code in range(KNOWN_CODES):
        name = category(chr(code))
        classes[code] = UNKNOWN if name == "Cn" else kinds.get(name[0], OTHER)
    spaces = [*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F]
    classes[[*spaces, 0x3000]] = SPACE
    return classes


def _merge_table(merges: dict[tuple[int, int], tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """An open-addressed table: pair of ids -> (rank, merged id)."""
    size = 1 << max(4, (2 * len(merges)).bit_length())
    pairs = np.full(size, -1, np.int64)
    merged = np.zeros((size, 2), np.int32)
    for (left, right), value in merges.items():
        pair = left << 32 | right
        slot = (pair * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) >> 20 & (size - 1)
        while pairs[slot] >= 0:
            slot = slot + 1 & (size - 1)
        pairs[slot] = pair
        merged[slot] = value
    return pairs, merged


@compiled
def _find(pairs, left, right):
    mask = len(pairs) - 1
    pair = np.int64(left) << 32 | np.int64(right)
    slot = np.int64((np.uint64(pair) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20)) & mask
    while pairs[slot] >= 0:
        if pairs[slot] == pair:
            return slot
        slot = slot + 1 & mask
    return -1


@compiled
def _merge_word(data, start, stop, bytes_to_ids, pairs, merged, out, place):
    """Write the ids of one word to out[place:] and return their number; merges the leftmost pair of lowest rank."""
    count = stop - start
    for i in range(count):
        out[place + i] = bytes_to_ids[data[start + i]]
    ranks = np.empty(MAX_WORD, np.int64)
    for i in range(count - 1):
        slot = _find(pairs, out[place + i], out[place + i + 1])
        ranks[i] = merged[slot, 0] if slot >= 0 else 1 << 62
    while count > 1:
        best = 0
        for i in range(1, count - 1):
            if ranks[i] < ranks[best]:
                best = i
        if ranks[best] == 1 << 62:
            break
        slot = _find(pairs, out[place + best], out[place + best + 1])
        out[place + best] = merged[slot, 1]
        for i in range(best + 1, count - 1):
            out[place + i] = out[place + i + 1]
            ranks[i - 1] = ranks[i]
        count -= 1
        if best < count - 1:
            slot = _find(pairs, out[place + best], out[place + best + 1])
            ranks[best] = merged[slot, 0] if slot >= 0 else 1 << 62
        if best > 0:
            slot = _find(pairs, out[place + best - 1], out[place + best])
            ranks[best - 1] = merged[slot, 0] if slot >= 0 else 1 << 62
    return count


@compiled
def _class_at(data, at, stop, classes):
    """(class, bytes) of the character at an offset; (-1, 0) at the end."""
    if at >= stop:
        return -1, 0
    first = np.int64(data[at])
    if first < 0x80:
        return np.int64(classes[first]), 1
    if first < 0xE0:
        code, size = (first & 0x1F) << 6 | data[at + 1] & 0x3F, 2
    elif first < 0xF0:
        code, size = (first & 0x0F) << 12 | np.int64(data[at + 1] & 0x3F) << 6 | data[at + 2] & 0x3F, 3
    else:
        code = (first & 0x07) << 18 | np.int64(data[at + 1] & 0x3F) << 12 | np.int64(data[at + 2] & 0x3F) << 6
        code, size = code | data[at + 3] & 0x3F, 4
    if code >= KNOWN_CODES:
        return UNKNOWN, size
    return np.int64(classes[code]), size


@compiled
def _run_end(data, at, stop, classes, wanted):
    """The end of a run of characters of one class."""
    while at < stop:
        kind, size = _class_at(data, at, stop, classes)
        if kind != wanted:
            break
        at += size
    return at


@compiled
def _word_end(data, at, stop, classes):
    """The end of the word that begins at `at`; -1 for an unknown character."""
    kind, size = _class_at(data, at, stop, classes)
    if kind == UNKNOWN:
        return -1
    if kind == NUMBER:
        return at + size
    if kind == LETTER:
        return _run_end(data, at, stop, classes, LETTER)
    if kind == OTHER:
        if data[at] == 0x27 and at + 1 < stop:  # 's 't 'm 'd 're 've 'll
            one = data[at + 1]
            if one == 0x73 or one == 0x74 or one == 0x6D or one == 0x64:
                return at + 2
            if at + 2 < stop:
                two = data[at + 2]
                if (one == 0x72 and two == 0x65) or (one == 0x76 and two == 0x65) or (one == 0x6C and two == 0x6C):
                    return at + 3
        return _run_end(data, at, stop, classes, OTHER)
    # spaces
    next_kind, _ = _class_at(data, at + size, stop, classes)
    if data[at] == 0x20 and (next_kind in (LETTER, OTHER)):
        return _run_end(data, at + 1, stop, classes, next_kind)
    last = at
    end = at
    while end < stop:
        kind, size = _class_at(data, end, stop, classes)
        if kind != SPACE:
            break
        last = end
        end += size
    after, _ = _class_at(data, end, stop, classes)
    # A digit is a word of its own, so the white space before it stays together.
    if after == -1 or after == NUMBER or last == at:
        return end
    return last


@compiled
def _encode(data, ends, classes, bytes_to_ids, pairs, merged, hashes, places, words, ids, used, out, id_ends, known):
    mask = SLOTS - 1
    at = np.int64(0)
    place = np.int64(0)
    for text in range(len(ends)):
        stop = ends[text]
        begin = place
        known[text] = True
        while at < stop:
            end = _word_end(data, at, stop, classes)
            if end < 0 or end - at > MAX_WORD:
                known[text] = False
                break
            name = np.uint64(0xCBF29CE484222325)
            for i in range(at, end):
                name = (name ^ np.uint64(data[i])) * np.uint64(0x100000001B3)
            name = (name ^ (name >> np.uint64(29))) | np.uint64(1)  # never 0, which marks a free slot
            slot = np.int64((name * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)) & mask
            found = False
            while hashes[slot] != 0:
                if hashes[slot] == name and places[slot, 1] == end - at:
                    same = True
                    for i in range(end - at):
                        if words[places[slot, 0] + i] != data[at + i]:
                            same = False
                            break
                    if same:
                        found = True
                        break
                slot = slot + 1 & mask
            if found:
                first = places[slot, 2]
                count = np.int64(places[slot, 3])
                for i in range(count):
                    out[place + i] = ids[first + i]
            else:
                count = np.int64(_merge_word(data, at, end, bytes_to_ids, pairs, merged, out, place))
                if used[0] >= SLOTS // 2 or used[1] + end - at > len(words) or used[2] + count > len(ids):
                    hashes[:] = 0
                    used[:] = 0
                    slot = np.int64((name * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)) & mask
                hashes[slot] = name
                places[slot, 0] = used[1]
                places[slot, 1] = end - at
                places[slot, 2] = used[2]
                places[slot, 3] = count
                for i in range(end - at):
                    words[used[1] + i] = data[at + i]
                for i in range(count):
                    ids[used[2] + i] = out[place + i]
                used[0] += 1
                used[1] += end - at
                used[2] += count
            place += count
            at = end
        if not known[text]:
            place = begin
            at = stop
        id_ends[text] = place
