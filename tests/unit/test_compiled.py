from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lakh import compiled


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_change_of_an_imported_kernel_recompiles_its_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    inner, outer = tmp_path / "inner_kernel.py", tmp_path / "outer_kernel.py"
    header = "from lakh.compiled import compiled\n"
    outer.write_text(f"{header}from inner_kernel import step\n@compiled\ndef twice(x):\n    return 2 * step(x)\n")
    for number, (body, wanted) in enumerate([("x + 1", 8), ("x + 7", 20)]):
        inner.write_text(f"{header}@compiled\ndef step(x):\n    return {body}\n")
        os.utime(inner, ns=(number * 10**9, number * 10**9))
        compiled._folder_stamp.cache_clear()  # as in a new process
        load(inner, monkeypatch)
        assert load(outer, monkeypatch).twice(3) == wanted
    assert list(tmp_path.rglob("outer_kernel.twice*.nbi"))  # the result is cached


CALLER = """
import sys, time
from pathlib import Path
from numba import extending

sys.path.insert(0, sys.argv[1])
from lakh import compiled

def slow_body():
    Path(sys.argv[1], f"compiles-{sys.argv[2]}").touch()
    time.sleep(1.0)

import kernel
extending.overload(kernel.constant)(lambda: (slow_body(), lambda: 7)[1])
print(kernel.answer())
"""


@pytest.mark.slow
def test_processes_that_need_one_function_compile_it_once(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(
        "from lakh.compiled import compiled\ndef constant(): pass\n@compiled\ndef answer():\n    return constant()\n"
    )
    commands = [[sys.executable, "-c", CALLER, str(tmp_path), str(number)] for number in range(3)]
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for command in commands]
    assert [process.communicate(timeout=120)[0] for process in processes] == [b"7\n"] * 3
    assert len(list(tmp_path.glob("compiles-*"))) == 1
