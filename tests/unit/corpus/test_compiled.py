from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lakh.corpus import compiled


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
    header = "from lakh.corpus.compiled import compiled\n"
    outer.write_text(f"{header}from inner_kernel import step\n@compiled\ndef twice(x):\n    return 2 * step(x)\n")
    for number, (body, wanted) in enumerate([("x + 1", 8), ("x + 7", 20)]):
        inner.write_text(f"{header}@compiled\ndef step(x):\n    return {body}\n")
        os.utime(inner, ns=(number * 10**9, number * 10**9))
        compiled._folder_stamp.cache_clear()  # as in a new process
        load(inner, monkeypatch)
        assert load(outer, monkeypatch).twice(3) == wanted
    assert list(tmp_path.rglob("outer_kernel.twice*.nbi"))  # the result is cached
