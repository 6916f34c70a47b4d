"""MBXP and multilingual HumanEval: the same problems in other languages (arXiv 2210.14868; data CC-BY-4.0 and MIT).

A row is one program in three parts: prompt, completion, test. It runs if the language's tools are installed on this
machine; otherwise its verdict is "not_run" and it is not part of the score. Only some rows have canonical solutions.

The JavaScript tests use lodash's isEqual; a small implementation of it is included, so nothing has to be installed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lakh import storage
from lakh.errors import UserError
from lakh.evals.data import BenchmarkFile, read_rows
from lakh.evals.sandbox.isolation import ENVIRONMENT
from lakh.evals.sandbox.verdict import SandboxLimits, SandboxVerdict
from lakh.evals.task import NONCE, CommandProgram, Problem, Task, problems_from

__all__ = ["FILES", "LANGUAGES", "Language", "load", "load_any"]

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

_IS_EQUAL = """
function same(a, b) {
  if (a === b || (a !== a && b !== b)) return true;
  if (typeof a !== 'object' || typeof b !== 'object' || a === null || b === null) return false;
  if (Object.getPrototypeOf(a) !== Object.getPrototypeOf(b)) return false;
  if (a instanceof Date) return a.getTime() === b.getTime();
  if (a instanceof Set || a instanceof Map) {
    if (a.size !== b.size) return false;
    const left = [...b];
    return [...a].every((x) => { const i = left.findIndex((y) => same(x, y)); return i >= 0 && (left.splice(i, 1),
    true); });
  }
  const keys = Object.keys(a);
  return keys.length === Object.keys(b).length && keys.every((k) => Object.hasOwn(b, k) && same(a[k], b[k]));
}
exports.isEqual = same;
"""


@dataclass(frozen=True)
class Language:
    tools: tuple[str, ...]
    file: str
    commands: Callable[[dict[str, str]], tuple[tuple[str, ...], ...]]
    """Paths of the tools -> commands to run."""
    with_nonce: Callable[[str], str]
    """The test, changed to print the nonce after its last check."""
    stops: tuple[str, ...]
    extra: tuple[tuple[str, str], ...] = ()


def _before_last(closing: str, statement: str) -> Callable[[str], str]:
    """Put a statement before the match of a pattern that ends the test."""
    return lambda test: re.sub(closing, lambda found: statement + found.group(0), test, count=1)


LANGUAGES = {
    "javascript": Language(
        ("node",),
        "main.js",
        lambda tool: ((tool["node"], "--max-old-space-size=512", "main.js"),),
        lambda test: f"{test}\nconsole.log('{NONCE}');\n",
        ("\n}\n",),
        (("node_modules/lodash/index.js", _IS_EQUAL),),
    ),
    "java": Language(
        ("javac", "java"),
        "main.java",
        lambda tool: (
            (tool["javac"], "-J-Xmx512m", "-J-XX:+UseSerialGC", "-J-XX:TieredStopAtLevel=1", "-d", ".", "main.java"),
            (tool["java"], "-Xmx512m", "-Xss64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", ".", "Main"),
        ),
        _before_last(r"\}\s*\}\s*$", f'System.out.println("{NONCE}");\n'),
        ("\n    }\n",),
    ),
    "cpp": Language(
        ("g++",),
        "main.cpp",
        lambda tool: ((tool["g++"], "-std=c++17", "-O1", "-w", "-o", "main", "main.cpp"), ("/tmp/main",)),
        _before_last(r"return 0;\s*\}\s*$", f'std::cout << std::endl << "{NONCE}" << std::endl;\n    '),
        ("\n}\n",),
    ),
    "go": Language(
        ("go",),
        "main.go",
        lambda tool: ((tool["go"], "build", "-o", "main", "main.go"), ("/tmp/main",)),
        _before_last(r"\}\s*$", f'println("{NONCE}")\n'),
        ("\n}\n",),
    ),
    "rust": Language(
        ("rustc",),
        "main.rs",
        lambda tool: ((tool["rustc"], "-A", "warnings", "-o", "main", "main.rs"), ("/tmp/main",)),
        _before_last(r"\}\s*$", f'println!("{NONCE}");\n'),
        ("\n}\n",),
    ),
}


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
    stops = LANGUAGES[language].stops if language in LANGUAGES else ("\n}\n",)
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
    language = LANGUAGES.get(problem.language)
    if language is None:
        return SandboxVerdict("not_run", f"{problem.language} is not supported")
    found = {tool: shutil.which(tool, path=TOOL_FOLDERS) for tool in language.tools}
    missing = [tool for tool, path in found.items() if path is None]
    if missing:
        return SandboxVerdict("not_run", f"{missing[0]} is not installed in {TOOL_FOLDERS}")
    # Real paths: without /proc, a program started through a link cannot find the files next to it.
    tools = {tool: os.path.realpath(path) for tool, path in found.items() if path is not None}
    text = f"{problem.prompt}{completion}\n{language.with_nonce(problem.test)}"
    environment = dict(ENVIRONMENT)
    if "java" in tools:
        environment["LD_LIBRARY_PATH"] = str(Path(tools["java"]).parents[1] / "lib")
    return CommandProgram({language.file: text, **dict(language.extra)}, language.commands(tools), environment)
