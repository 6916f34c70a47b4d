"""MBXP and multilingual HumanEval: the same problems in other languages (arXiv 2210.14868; data CC-BY-4.0 and MIT).

A row is one program in three parts: prompt, completion, test. It runs where the language's own tools are installed on
this machine; elsewhere its verdict is "not_run", which is no part of a score. Canonical solutions exist for some rows
only.

The tests ask JavaScript for lodash's isEqual; a small one of ours stands in, so that nothing needs to be installed.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lakh import storage
from lakh.evals.data import BenchmarkFile, read_rows
from lakh.evals.task import NONCE, CommandProgram, Problem, Task
from lakh.evals.sandbox.verdict import SandboxLimits, SandboxVerdict
from lakh.evals.sandbox.isolation import ENVIRONMENT

__all__ = ["FILES", "LANGUAGES", "Language", "load", "load_any"]

_FOLDER = "https://raw.githubusercontent.com/amazon-science/mxeval/e09974f990eeaf0c0e8f2b5eaff4be66effb2c86/data/"
_SHA256 = {
    "mbxp/mbcpp_release_v1.2.jsonl": "34a842515927e230eb2bd6e409a44c80a852b0afcbe1172786bd08cfef8b85b0",
    "mbxp/mbgp_release_v1.1.jsonl": "90f519222a4c45bdbed8309076433d2f573c6f37329a848581fa789839b67da8",
    "mbxp/mbjp_release_v1.2.jsonl": "139a0fcdff2f4c6d456c546c82f43a1f389dfe3125f5f2c3f6a12f478483dffd",
    "mbxp/mbjsp_release_v1.2.jsonl": "9e443a1911bcedd8b5193f43d3217666fbf669cd00d54265941a8eb17e396f5a",
    "multilingual_humaneval/HumanEval_go_v1.jsonl": "b3797a20b951627d67dec749cc1954e4a151cf0096d1649f96d62597a76a47af",
    "multilingual_humaneval/HumanEval_java_v1.1.jsonl": (
        "2373bd083b7be445a5273add8a932e0fea3d1e3c1a59d55beba369e90e5d0d02"
    ),
    "multilingual_humaneval/HumanEval_javascript_v1.1.jsonl": (
        "cbd4421a18387fcf791a047e2904e1ff8287b11fede50a7fb5e3cd3814cb1653"
    ),
}
FILES = {
    "mbxp-cpp": "mbxp/mbcpp_release_v1.2.jsonl",
    "mbxp-go": "mbxp/mbgp_release_v1.1.jsonl",
    "mbxp-java": "mbxp/mbjp_release_v1.2.jsonl",
    "mbxp-javascript": "mbxp/mbjsp_release_v1.2.jsonl",
    "humaneval-go": "multilingual_humaneval/HumanEval_go_v1.jsonl",
    "humaneval-java": "multilingual_humaneval/HumanEval_java_v1.1.jsonl",
    "humaneval-javascript": "multilingual_humaneval/HumanEval_javascript_v1.1.jsonl",
}
KEYS = ("task_id", "prompt", "test", "language", "entry_point")
# A JVM has some thirty threads before it does anything, and compilers are larger than what they compile.
LIMITS = SandboxLimits(cpu_s=20, wall_s=240, memory_MiB=2048, file_MiB=64, tmp_MiB=128, processes=128)
TOOL_FOLDERS = "/usr/bin:/bin"  # what the sandbox shows

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
    """From where each tool is to what is run."""
    prove: Callable[[str], str]
    """The test, changed so that it prints the nonce after its last check."""
    stops: tuple[str, ...]
    extra: tuple[tuple[str, str], ...] = ()


def _before_last(closing: str, words: str) -> Callable[[str], str]:
    """Put words before the last match of a pattern that ends the test."""
    return lambda test: re.sub(closing, lambda found: words + found.group(0), test, count=1)


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
    path = FILES[name]
    file = BenchmarkFile(path.rpartition("/")[2], _SHA256[path], f"{_FOLDER}{path}")
    return _task(name, file.name, file.read(data), file.sha256)


def load_any(data: str | None = None) -> Task:
    """Any file of this form; what it is, its sha256 in the result tells."""
    import hashlib

    from lakh.errors import UserError

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
        problems=tuple(
            Problem(
                id=row["task_id"],
                prompt=row["prompt"],
                canonical=row.get("canonical_solution") or "",
                test=row["test"],
                entry_point=row["entry_point"],
                language=row["language"],
            )
            for row in rows
        ),
        stops=stops,
        prompt_form="raw prompt",
        extraction="up to and with the first stop string",
        data_sha256=sha256,
        build=_program,
        take=functools.partial(_through_stop, stops=stops),
        limits=LIMITS,
    )


def _through_stop(text: str, stops: tuple[str, ...]) -> str:
    """The stop string closes the function, so it stays; an engine that cut it off gets it back."""
    at = text.find(stops[0])
    return (text[:at] if at >= 0 else text.rstrip("\n")) + stops[0]


def _program(problem: Problem, completion: str) -> CommandProgram | SandboxVerdict:
    language = LANGUAGES.get(problem.language)
    if language is None:
        return SandboxVerdict("not_run", f"{problem.language} is not known here")
    found = {tool: shutil.which(tool, path=TOOL_FOLDERS) for tool in language.tools}
    missing = [tool for tool, path in found.items() if path is None]
    if missing:
        return SandboxVerdict("not_run", f"{missing[0]} is not installed in {TOOL_FOLDERS}")
    # Real paths: without /proc, a program that was started by a link cannot find what lies beside it.
    tools = {tool: os.path.realpath(path) for tool, path in found.items() if path is not None}
    text = f"{problem.prompt}{completion}\n{language.prove(problem.test)}"
    environment = dict(ENVIRONMENT)
    if "java" in tools:
        environment["LD_LIBRARY_PATH"] = str(Path(tools["java"]).parents[1] / "lib")
    return CommandProgram({language.file: text, **dict(language.extra)}, language.commands(tools), environment)
