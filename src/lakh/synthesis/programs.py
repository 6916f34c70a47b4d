"""A model's answer as a program with tests, and what the sandbox runs of it.

Tests are the functions named test_* at the top level; the rest is the program under test. A model may write tests that
check nothing, so the same tests must fail when every function of the program returns None (the control).
"""

from __future__ import annotations

import ast
import copy
import warnings
from dataclasses import dataclass

from lakh.evals.sandbox.program import Program

__all__ = ["MIN_TESTS", "SynthesizedProgram", "UnusableAnswer", "program_from"]

MIN_TESTS = 2
RAN = "lakh_tests_that_ran"
MAX_CUTS = 20


@dataclass(frozen=True)
class UnusableAnswer:
    reason: str
    """syntax, no-code, no-tests."""
    detail: str = ""


@dataclass(frozen=True)
class SynthesizedProgram:
    text: str
    """The whole module: code, then tests."""
    tests: tuple[str, ...]

    def to_run(self) -> Program:
        """Code and tests run in the isolated process; the examiner asks it how many tests came to their end."""
        return self._program(self.text)

    def control(self) -> Program:
        """The same with functions that return None: tests that pass with these check nothing."""
        tree = copy.deepcopy(_parsed(self.text))
        assert tree is not None
        for node in _functions_under_test(tree):
            node.body = [ast.Return(ast.Constant(None))]
        return self._program(ast.unparse(ast.fix_missing_locations(tree)))

    def _program(self, text: str) -> Program:
        calls = "\n".join(f"{name}()" for name in self.tests)
        source = f"{text}\n\n{calls}\n\n\ndef {RAN}():\n    return {len(self.tests)}\n"
        return Program(source, test=f"assert {RAN}() == {len(self.tests)}\n", names=(RAN,))


def program_from(text: str) -> SynthesizedProgram | UnusableAnswer:
    """The program in a text that may end in the middle of a statement."""
    text, tree = _longest_module(text)
    if tree is None:
        return UnusableAnswer("syntax", "is not Python")
    defined = {node.name for node in _functions_under_test(tree)}
    if not defined:
        return UnusableAnswer("no-code", "defines no function or class")
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and _is_test(node)]
    useful = [node.name for node in tests if _checks(node, defined)]
    if len(useful) < MIN_TESTS:
        found = f"{len(useful)} tests call the code and compare a result; {MIN_TESTS} are needed"
        return UnusableAnswer("no-tests", found)
    return SynthesizedProgram(text, tuple(node.name for node in tests))


def _parsed(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escapes
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _longest_module(text: str) -> tuple[str, ast.Module | None]:
    """The text without the unfinished statement at its end."""
    text = text.replace("\r\n", "\n").rstrip() + "\n"
    for _ in range(MAX_CUTS):
        tree = _parsed(text)
        if tree is not None:
            return text, tree
        lines = text.rstrip("\n").split("\n")
        starts = [at for at, line in enumerate(lines) if at and line and line[0] not in " \t#)]}"]
        if not starts:
            break
        text = "\n".join(lines[: starts[-1]]).rstrip() + "\n"
    return text, None


def _is_test(node: ast.FunctionDef) -> bool:
    given = node.args
    takes_any = given.args or given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg
    return node.name.startswith("test_") and not takes_any


def _functions_under_test(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions, and methods of classes, that are no tests."""
    found: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        found += [one for one in inner if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [node for node in found if not node.name.startswith("test_")]


def _checks(test: ast.stmt, defined: set[str]) -> bool:
    """Whether a test has an assert and uses a name of the program."""
    nodes = list(ast.walk(test))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return any(isinstance(node, ast.Assert) for node in nodes) and bool(names & defined)
