"""Runs the attacks of each language in each way that a user may run lakh, and counts those that got through.

    here         as whoever runs this, in its environment
    root, bare   root with the system's Python, outside a virtual environment
    user, bare   an ordinary user, likewise

An attack gets through if its verdict is "passed", or if the honest program after it does not pass.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.eval.attacks.suite import SCRIPTS, run_attacks
from bench.harness import BenchRow

__all__ = ["WAYS", "attack_table"]

WAYS = ("here", "root, bare", "user, bare")
USER = 54321  # in no password file
TIMEOUT_S = 3600.0


def attack_table(
    languages: Iterable[str],
    backends: Sequence[str],
    progress: Callable[[str], object],
    *,
    ways: Sequence[str] = WAYS,
    scripts: Sequence[str] = SCRIPTS,
) -> list[BenchRow]:
    """A row for each language, backend and way; logs every attack that got through."""
    rows: list[BenchRow] = []
    for language in languages:
        for backend in backends if language == "python" else ("bubblewrap",):  # landlock has no folder to compile in
            for way in ways:
                found = _attack(language, backend, way, scripts)
                for name, text in found["failures"].items():
                    progress(f"{language}, {backend}, {way}: {name}: {text}")
                row: BenchRow = {"language": language, "backend": backend, "way": way, "attacks": found["attacks"]}
                rows.append(row | {"got_through": len(found["failures"]), "note": found["note"]})
                progress(" ".join(f"{key}: {value};" for key, value in rows[-1].items()))
    return rows


def _attack(language: str, backend: str, way: str, scripts: Sequence[str]) -> dict[str, Any]:
    if way == "here":
        return run_attacks(language, backend, scripts)
    system = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if system is None or os.geteuid() != 0:
        return {"attacks": 0, "failures": {}, "note": "needs root, and a python3 in /usr/bin"}
    top = Path(__file__).resolve().parents[3]
    uid = USER if way == "user, bare" else 0
    done = subprocess.run(
        [system, "-B", "-m", "bench.eval.attacks", language, backend, *scripts],
        env={"PYTHONPATH": f"{top}/src:{top}", "PATH": os.environ["PATH"]},
        cwd="/", user=uid, group=uid, extra_groups=[], capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        note = (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
        return {"attacks": 0, "failures": {}, "note": note}
