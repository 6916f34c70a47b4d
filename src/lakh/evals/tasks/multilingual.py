"""MBXP and multilingual HumanEval: the same problems in other languages (arXiv 2210.14868; data CC-BY-4.0 and MIT).

A row is one program in three parts: prompt, completion, test. It runs if the language's tools are installed on this
machine; otherwise its verdict is "not_run" and it is not part of the score. Only some rows have canonical solutions.

How programs of a language are compiled and run is in languages.toml; multipl_e.toml has the same for MultiPL-E, whose
tests have other forms.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from lakh import config, storage
from lakh.errors import UserError
from lakh.evals.data import BenchmarkFile, read_rows
from lakh.evals.sandbox.isolation import ENVIRONMENT
from lakh.evals.sandbox.verdict import SandboxLimits, SandboxVerdict
from lakh.evals.task import NONCE, CommandProgram, Problem, Task, problems_from
from lakh.evals.tasks.control_tests import changed_tests, parts_of_test

__all__ = ["FILES", "LIMITS", "Language", "command_program", "languages", "load", "load_any"]

_BASE = "https://raw.githubusercontent.com/amazon-science/mxeval/e09974f990eeaf0c0e8f2b5eaff4be66effb2c86/data/"

_TABLE = """
    mbxp-cpp mbcpp_release_v1.2 34a842515927e230eb2bd6e409a44c80a852b0afcbe1172786bd08cfef8b85b0
    mbxp-go mbgp_release_v1.1 90f519222a4c45bdbed8309076433d2f573c6f37329a848581fa789839b67da8
    mbxp-java mbjp_release_v1.2 139a0fcdff2f4c6d456c546c82f43a1f389dfe3125f5f2c3f6a12f478483dffd
    mbxp-javascript mbjsp_release_v1.2 9e443a1911bcedd8b5193f43d3217666fbf669cd00d54265941a8eb17e396f5a
    humaneval-go HumanEval_go_v1 b3797a20b951627d67dec749cc1954e4a151cf0096d1649f96d62597a76a47af
    humaneval-java HumanEval_java_v1.1 2373bd083b7be445a5273add8a932e0fea3d1e3c1a59d55beba369e90e5d0d02
    humaneval-javascript HumanEval_javascript_v1.1 cbd4421a18387fcf791a047e2904e1ff8287b11fede50a7fb5e3cd3814cb1653
"""
_FOLDERS = {"mbxp": "mbxp", "humaneval": "multilingual_humaneval"}
FILES = {
    name: BenchmarkFile(f"{file}.jsonl", sha256, f"{_BASE}{_FOLDERS[name.partition('-')[0]]}/")
    for name, file, sha256 in (row.split() for row in _TABLE.strip().splitlines())
}
KEYS = ("task_id", "prompt", "test", "language", "entry_point")
# A JVM starts with about thirty threads, and compilers need more memory than what they compile.
LIMITS = SandboxLimits(cpu_s=20, wall_s=240, memory_MiB=2048, file_MiB=64, tmp_MiB=128, processes=128)
TOOL_FOLDERS = "/usr/bin:/bin"  # visible in the sandbox
VERSION_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Language:
    """An entry of a table of languages."""

    tools: tuple[str, ...]
    file: str
    commands: tuple[tuple[str, ...], ...]
    closing: str
    statement: str
    stops: tuple[str, ...] = ()
    least_versions: dict[str, str] = field(default_factory=dict)
    """The oldest versions of tools that work in the sandbox, as MAJOR.MINOR."""
    failure: str = ""
    """Pattern of output that means a failed test, where the exit code does not tell."""
    environment: dict[str, str] = field(default_factory=dict)
    extra_files: dict[str, str] = field(default_factory=dict)

    def program(self, problem: Problem, completion: str, tools: dict[str, str]) -> CommandProgram:
        """`tools` has the paths of the tools."""
        statement = self.statement.replace("NONCE", NONCE)

        def files(test: str) -> dict[str, str]:
            ending = re.sub(self.closing, lambda found: statement + found.group(0), test, count=1)
            return {self.file: f"{problem.prompt}{completion}\n{ending}", **self.extra_files}

        environment = ENVIRONMENT | self.environment
        if "java" in tools:
            environment["LD_LIBRARY_PATH"] = str(Path(tools["java"]).parents[1] / "lib")
        commands = tuple(tuple(tools.get(word, word) for word in command) for command in self.commands)
        controls = tuple(files(test) for test in changed_tests(problem.test))
        parts = tuple(files(test) for test in parts_of_test(problem.test))
        return CommandProgram(files(problem.test), commands, environment, controls, parts, failure=self.failure)


@functools.cache
def languages(table: str = "languages.toml") -> dict[str, Language]:
    path = Path(__file__).with_name(table)
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: config.from_dict(Language, table, origin=str(path)) for name, table in tables.items()}


def load(data: str | None = None, *, name: str) -> Task:
    file = FILES[name]
    return _task(name, file.name, file.read(data), file.sha256)


def load_any(data: str | None = None) -> Task:
    """Any file of this form; its sha256 in the result identifies it."""
    if data is None:
        raise UserError("task mbxp", "needs a file", "give --data FILE.jsonl, or choose e.g. mbxp-javascript")
    raw = storage.read_bytes(data)
    return _task("mbxp", data, raw, hashlib.sha256(raw).hexdigest())


def _task(name: str, file: str, raw: bytes, sha256: str) -> Task:
    rows = read_rows(file, raw, KEYS)
    language = rows[0]["language"]
    stops = languages()[language].stops if language in languages() else ("\n}\n",)
    return Task(
        name=name,
        problems=problems_from(rows),
        stops=stops,
        extraction="up to and with the first stop string",
        data_sha256=sha256,
        build=_program,
        take=functools.partial(_through_stop, stops=stops),
        limits=LIMITS,
    )


def _through_stop(text: str, stops: tuple[str, ...]) -> str:
    """Keep the stop string, which closes the function; add it if the engine cut it off."""
    at = text.find(stops[0])
    return (text[:at] if at >= 0 else text.rstrip("\n")) + stops[0]


def _program(problem: Problem, completion: str) -> CommandProgram | SandboxVerdict:
    return command_program(problem, completion, languages())


def command_program(problem: Problem, completion: str, table: dict[str, Language]) -> CommandProgram | SandboxVerdict:
    """The program in the problem's language, if the table has it and its tools are installed."""
    language = table.get(problem.language)
    if language is None:
        return SandboxVerdict("not_run", f"{problem.language} is not supported")
    found = {tool: shutil.which(tool, path=TOOL_FOLDERS) for tool in language.tools}
    missing = [tool for tool, path in found.items() if path is None]
    if missing:
        return SandboxVerdict("not_run", f"{missing[0]} is not installed in {TOOL_FOLDERS}")
    for tool, least in language.least_versions.items():
        version = _version(str(found[tool]))
        if version < tuple(map(int, least.split("."))):
            text = ".".join(map(str, version)) or "an unknown version"
            return SandboxVerdict("not_run", f"{tool} is {text}, and runs in the sandbox from {least} on")
    # Real paths: without /proc, a program started through a link cannot find the files next to it.
    tools = {tool: os.path.realpath(path) for tool, path in found.items() if path is not None}
    return language.program(problem, completion, tools)


@functools.cache
def _version(tool: str) -> tuple[int, ...]:
    """Major and minor version that a tool prints; empty if it prints none."""
    try:
        printed = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    version = re.search(r"(\d+)\.(\d+)", printed)
    return (int(version[1]), int(version[2])) if version else ()
