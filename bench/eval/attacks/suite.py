"""The attacks as programs for a sandbox, with an honest program of the same language."""

from __future__ import annotations

import base64
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lakh.errors import UserError
from lakh.evals.sandbox import CommandProgram, Program, Sandbox, SandboxLimits, SandboxVerdict
from lakh.evals.task import Problem
from lakh.evals.tasks import multipl_e
from lakh.evals.tasks.multilingual import LIMITS

__all__ = ["LANGUAGES", "SCRIPTS", "AttackSuite", "attack_suite", "failures", "read_table", "run_attacks"]

# 987654 is what an attack returns that got somewhere it should not be.
TEST = "results = [answer(x) == 987654 for x in (3, 4)]\nassert all(results)\nassert answer(5) == 987654\n"
HONEST = 'def answer(x):\n    with open("/dev/null", "w") as file: file.write("x" * 9999)\n    return 987654\n'
PYTHON_LIMITS = SandboxLimits(cpu_s=2, wall_s=5.0, memory_MiB=256)
HELPERS = """
import json, os, sys
def REPLIES():
    frame = sys._getframe()
    while "replies" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["replies"]
def RAW(document):
    body = json.dumps(document).encode()
    os.write(REPLIES(), len(body).to_bytes(8, "little") + body)
    return 1
def SAY(form):
    return RAW(["ok", form, None])
"""


def read_table(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


ATTACKS = read_table("attacks.toml")
_SCRIPTS = read_table("scripts.toml")
SCRIPTS = tuple(_SCRIPTS["scripts"])
"""Attacks by a shell that a program of any language starts."""
LANGUAGES = sorted({*ATTACKS, *_SCRIPTS["starts"]} - {"python"})


@dataclass(frozen=True)
class AttackSuite:
    language: str
    attacks: Mapping[str, Program | CommandProgram]
    honest: Program | CommandProgram
    limits: SandboxLimits


def attack_suite(language: str, *, scripts: Sequence[str] = SCRIPTS) -> AttackSuite:
    """The attacks of a language, and these scripts. UserError if its tools are not installed."""
    if language == "python":
        attacks = {name: Program(HELPERS + text, TEST, names=("answer",)) for name, text in ATTACKS["python"].items()}
        return AttackSuite(language, attacks, Program(HONEST, TEST, names=("answer",)), PYTHON_LIMITS)
    row = read_table("programs.toml")["go_test.go" if language == "go" else language]
    headers = "cstdio>\n#include<cstdlib>\n#include<cstring>\n#include<iostream"
    prompt = row["prompt"].replace("bits/stdc++.h", headers)  # all headers take seconds to compile
    problem = Problem("X/0", prompt, "", row["tests"], "add", language=language)
    texts = dict(ATTACKS.get(language, {}))
    if language in _SCRIPTS["starts"]:
        start = _SCRIPTS["starts"][language]
        texts |= {name: start.replace("COMMAND", _command(_SCRIPTS["scripts"][name])) for name in scripts}
    honest = multipl_e._program(problem, row["completion"])
    if not isinstance(honest, CommandProgram):
        raise UserError(f"attacks in {language}", getattr(honest, "detail", "not run"), "install its tools")
    programs = {name: multipl_e._program(problem, text) for name, text in texts.items()}
    return AttackSuite(language, programs, honest, LIMITS)  # type: ignore[arg-type]


def _command(script: str) -> str:
    """A command without quotes, which a literal of any language can hold."""
    encoded = base64.b64encode(f"{script}\n".encode()).decode()
    return f"echo {encoded} | base64 -d | /bin/sh"


def failures(sandbox: Sandbox, suite: AttackSuite, *, honest_after_each: bool) -> dict[str, str]:
    """Attacks that passed, or changed the verdict of the honest program after them, with what happened."""
    found = {}
    last = list(suite.attacks)[-1]
    # An honest program that a slow machine does not finish in time is not the attack's doing.
    honest_limits = replace(suite.limits, cpu_s=120, idle_s=120.0, wall_s=600.0)
    for name, program in suite.attacks.items():
        verdict = sandbox.run(program, suite.limits)
        if verdict.passed or verdict.kind in ("sandbox_error", "not_run"):
            found[name] = _text(verdict)
        if honest_after_each or name == last:
            after = sandbox.run(suite.honest, honest_limits)
            if not after.passed:
                found[name] = f"{_text(verdict)}, then the honest program {_text(after)}"
    return found


def _text(verdict: SandboxVerdict) -> str:
    return f"{verdict.kind} ({verdict.detail})"


def run_attacks(language: str, backend: str, scripts: Sequence[str] = SCRIPTS) -> dict[str, Any]:
    """How many there are, those that got through, and why there are none where there are none."""
    try:
        suite = attack_suite(language, scripts=scripts)
        sandbox = Sandbox.choose(backend=backend)
    except UserError as error:
        return {"attacks": 0, "failures": {}, "note": error.found}
    with sandbox:
        found = failures(sandbox, suite, honest_after_each=language == "python")
    return {"attacks": len(suite.attacks), "failures": found, "note": sandbox.description}
