"""The code of the page on adding a task works and is short."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path

import pytest

from lakh.evals.sandbox import Sandbox
from lakh.evals.tasks import TASKS, load_task

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "add-an-evaluation-task.md"


def test_the_task_of_the_how_to_page_works(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text(encoding="utf-8")
    task_code, test_code = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    added = re.findall(r"^\+ .*", text, flags=re.M)
    assert len((task_code + test_code).splitlines()) + len(added) < 150
    module = types.ModuleType("lakh.evals.tasks.own_functions")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(task_code, vars(module))
    monkeypatch.setitem(TASKS, "own-functions", module.load)
    space: dict[str, object] = {}
    exec(test_code, space)
    (test,) = (value for name, value in space.items() if name.startswith("test_"))
    test(sandbox, tmp_path)  # type: ignore[operator]


def test_the_task_file_of_the_page_is_valid(tmp_path: Path) -> None:
    (described,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "mytask.toml").write_text(described)
    row = {
        "key": "a",
        "question": "def f():\n",
        "checks": "assert f() == 1",
        "answer": "    return 1\n",
        "function": "f",
    }
    (tmp_path / "problems.jsonl").write_text(json.dumps(row) + "\n")
    task = load_task(str(tmp_path / "mytask.toml"))
    assert (task.name, task.problems[0].entry_point, task.limits.cpu_s) == ("sql-helpers", "f", 10)
