"""The code of the page on adding a task works and is short."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from lakh.evals.sandbox import Sandbox
from lakh.evals.tasks import TASKS

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
