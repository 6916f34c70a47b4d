"""MBPP: short Python tasks with three asserts each (arXiv 2108.07732; data CC-BY-4.0, Google).

    mbpp             all 974 problems       mbpp-test   the 500 of the paper's test split (ids 11-510)
    mbpp-sanitized   the 427 that were checked by hand

The prompt is the paper's, with its three solved examples (ids 2, 3 and 4, which are themselves among the 974). A
completion is the whole program, up to [DONE].
"""

from __future__ import annotations

from typing import Any

from lakh.evals.data import BenchmarkFile
from lakh.evals.task import Problem, Program, Task, names_under_test

__all__ = ["FILES", "load"]

_FOLDER = "https://raw.githubusercontent.com/google-research/google-research/master/mbpp/"
_SHA256 = "ccf64ceae9c5403bf50a044cb6d505bfd2a2963ee58338ba268fd65beab92a9f"
_SANITIZED_SHA256 = "ca95deaa9a01ef0a6f439f88bcf0dd3db3563d22f22aad6cae04ebb9a8d8c8e9"
_FULL = BenchmarkFile("mbpp.jsonl", _SHA256, _FOLDER)
_SANITIZED = BenchmarkFile("sanitized-mbpp.json", _SANITIZED_SHA256, _FOLDER)
FILES = {"mbpp": _FULL, "mbpp-test": _FULL, "mbpp-sanitized": _SANITIZED}
EXAMPLE_IDS = (2, 3, 4)
TEST_IDS = range(11, 511)


def load(data: str | None = None, *, name: str = "mbpp") -> Task:
    is_sanitized = name == "mbpp-sanitized"
    text, setup = ("prompt", "test_imports") if is_sanitized else ("text", "test_setup_code")
    rows = FILES[name].rows(data, ("task_id", text, "code", "test_list", setup))
    by_id = {row["task_id"]: row for row in rows}
    shots = "".join(f"{_question(by_id[i], text)}{_lines(by_id[i]['code'])}\n[DONE]\n\n" for i in EXAMPLE_IDS)
    return Task(
        name=name,
        problems=tuple(
            _problem(row, shots + _question(row, text), "\n".join(row[setup]) if is_sanitized else row[setup])
            for row in rows
            if name != "mbpp-test" or row["task_id"] in TEST_IDS
        ),
        stops=("[DONE]",),
        prompt_form="3 examples (ids 2, 3, 4) with tests, [BEGIN] ... [DONE]",
        data_sha256=FILES[name].sha256,
        build=_program,
        is_whole=True,
    )


def _problem(row: dict[str, Any], prompt: str, setup: str) -> Problem:
    canonical = _lines(row["code"])
    test = "\n".join([_lines(setup), *map(_lines, row["test_list"])]) + "\n"
    return Problem(
        id=f"Mbpp/{row['task_id']}",
        prompt=prompt,
        canonical=canonical,
        test=test,
        names=names_under_test(canonical, test),
    )


def _question(row: dict[str, Any], text: str) -> str:
    listed = "\n".join(map(_lines, row["test_list"]))
    return (
        f"You are an expert Python programmer, and here is your task: {row[text]} "
        f"Your code should pass these tests:\n\n{listed}\n[BEGIN]\n"
    )


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n")


def _program(problem: Problem, completion: str) -> Program:
    return Program(completion + "\n", test=problem.test, reference=problem.canonical, names=problem.names)
