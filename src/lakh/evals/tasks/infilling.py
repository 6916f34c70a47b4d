"""HumanEval-Infilling: a gap in a solution, between prefix and suffix (arXiv 2207.14255; data MIT, OpenAI).

    infilling               1,033 gaps of one line       infilling-multi-line          5,815 of several lines
    infilling-random-span   1,640 gaps anywhere          infilling-random-span-light     164 of those

A model without fill-in-the-middle tokens cannot generate for it; samples can still be scored.
"""

from __future__ import annotations

from lakh.evals.data import BenchmarkFile
from lakh.evals.task import Task, problems_from
from lakh.evals.tasks.humaneval import KEYS, program

__all__ = ["FILES", "load"]

_FOLDER = "https://raw.githubusercontent.com/openai/human-eval-infilling/88062ff9859c875d04db115b698ed4b0f0395170/data/"
_TABLE = """
    infilling SingleLineInfilling 1277073e7ddce163ef68598c2bca777f688a53df99422f097e37362090f88e1f
    infilling-multi-line MultiLineInfilling 2f341612eee1d35da1357a4f365e0c0b3ba6e2b62eb491e88aaefa4855af0349
    infilling-random-span RandomSpanInfilling b4f330d8a8ff97bf85d9def497dffcae4d741e506449386a877236e422e33e8d
    infilling-random-span-light RandomSpanInfillingLight \
        1432250ecac0cb56e6f97f8faf0970419ef892a98fda7e1f5aa4c4b87209b760
"""
FILES = {
    name: BenchmarkFile(f"HumanEval-{kind}.jsonl.gz", sha256, _FOLDER)
    for name, kind, sha256 in (row.split() for row in _TABLE.strip().splitlines())
}


def load(data: str | None = None, *, name: str = "infilling") -> Task:
    file, one_line = FILES[name], name == "infilling"
    return Task(
        name=name,
        problems=problems_from(file.rows(data, (*KEYS, "suffix"))),
        stops=(),
        prompt_form="prefix and suffix around a hole",
        extraction="the first line" if one_line else "all that was written",
        data_sha256=file.sha256,
        build=program,
        take=_first_line if one_line else None,
        ended=_has_line if one_line else None,
        is_infilling=True,
    )


def _first_line(text: str) -> str:
    """Through the first newline that follows a non-blank character."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if line.strip():
            return "".join(lines[: number + 1])
    return text


def _has_line(text: str) -> bool:
    return text.lstrip().find("\n") > 0
