"""MBPP: short Python tasks with three asserts each (arXiv 2108.07732; data CC-BY-4.0, Google).

    mbpp             all 974 problems       mbpp-test   the 500 of the paper's test split (ids 11-510)
    mbpp-sanitized   the 427 that were checked by hand

The prompt is the paper's, with its three solved examples (ids 2, 3 and 4, which are themselves among the 974). A
completion is the whole program, up to [DONE].
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lakh.evals.data import BenchmarkFile, read_rows
from lakh.evals.task import Problem, Program, Task, names_under_test

__all__ = ["FULL", "SANITIZED", "load", "load_sanitized", "load_test"]

_FOLDER = "https://raw.githubusercontent.com/google-research/google-research/master/mbpp/"
FULL = BenchmarkFile(
    "mbpp.jsonl", "ccf64ceae9c5403bf50a044cb6d505bfd2a2963ee58338ba268fd65beab92a9f", f"{_FOLDER}mbpp.jsonl"
)
SANITIZED = BenchmarkFile(
    "sanitized-mbpp.json",
    "ca95deaa9a01ef0a6f439f88bcf0dd3db3563d22f22aad6cae04ebb9a8d8c8e9",
    f"{_FOLDER}sanitized-mbpp.json",
)
EXAMPLE_IDS = (2, 3, 4)
TEST_IDS = range(11, 511)
STOPS = ("[DONE]",)


def load(data: str | None = None) -> Task:
    rows = read_rows(FULL.name, FULL.read(data), ("task_id", "text", "code", "test_list", "test_setup_code"))
    setups = {row["task_id"]: row["test_setup_code"] for row in rows}
    return _task("mbpp", FULL, rows, "text", setups)


def load_test(data: str | None = None) -> Task:
    whole = load(data)
    kept = {f"Mbpp/{number}" for number in TEST_IDS}
    return replace(whole, name="mbpp-test", problems=tuple(p for p in whole.problems if p.id in kept))


def load_sanitized(data: str | None = None) -> Task:
    rows = read_rows(SANITIZED.name, SANITIZED.read(data), ("task_id", "prompt", "code", "test_list", "test_imports"))
    setups = {row["task_id"]: "\n".join(row["test_imports"]) for row in rows}
    return _task("mbpp-sanitized", SANITIZED, rows, "prompt", setups)


def _task(name: str, file: BenchmarkFile, rows: list[dict[str, Any]], key: str, setups: dict[int, str]) -> Task:
    by_id = {row["task_id"]: row for row in rows}
    shots = "".join(
        f"{_question(by_id[i][key], by_id[i]['test_list'])}{_lines(by_id[i]['code'])}\n[DONE]\n\n" for i in EXAMPLE_IDS
    )
    return Task(
        name=name,
        problems=tuple(_problem(row, shots, key, setups[row["task_id"]]) for row in rows),
        stops=STOPS,
        prompt_form="3 examples (ids 2, 3, 4) with tests, [BEGIN] ... [DONE]",
        extraction="cut at the first stop string",
        data_sha256=file.sha256,
        build=_program,
    )


def _problem(row: dict[str, Any], shots: str, key: str, setup: str) -> Problem:
    canonical = _lines(row["code"])
    test = "\n".join([_lines(setup), *map(_lines, row["test_list"])]) + "\n"
    return Problem(
        id=f"Mbpp/{row['task_id']}",
        prompt=shots + _question(row[key], row["test_list"]),
        canonical=canonical,
        test=test,
        names=names_under_test(canonical, test),
    )


def _question(text: str, tests: list[str]) -> str:
    listed = "\n".join(map(_lines, tests))
    return (
        f"You are an expert Python programmer, and here is your task: {text} "
        f"Your code should pass these tests:\n\n{listed}\n[BEGIN]\n"
    )


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n")


def _program(problem: Problem, completion: str) -> Program:
    return Program(
        source=completion + "\n",
        test=problem.test,
        reference=problem.canonical,
        names=problem.names,
    )
