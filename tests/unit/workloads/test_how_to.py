"""The page on adding a model architecture: its changes apply to the code, and its test passes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/how-to/add-a-model-architecture.md"
# The import hook of an editable install precedes PYTHONPATH.
WITHOUT_EDITABLE_INSTALL = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
"""


@pytest.mark.slow
def test_the_architecture_of_the_how_to_page_works(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install transformers")
    text = PAGE.read_text(encoding="utf-8")
    (change,) = re.findall(r"```diff\n(.*?)```", text, flags=re.DOTALL)
    architecture, test = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len((architecture + test).splitlines()) + len(re.findall(r"^\+", change, flags=re.M)) < 150
    shutil.copytree(ROOT / "src/lakh", tmp_path / "src/lakh", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply"], input=change, text=True, cwd=tmp_path, check=True)
    (tmp_path / "src/lakh/workloads/code/architectures/arcee.py").write_text(architecture)
    (tmp_path / "test_arcee.py").write_text(test)
    (tmp_path / "conftest.py").write_text(WITHOUT_EDITABLE_INSTALL)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_arcee.py"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
