"""A document that kills its worker is named, counted and skipped; the other documents are not affected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lakh.corpus import read_documents
from lakh.corpus.reports.lookup import find_document

TIMEOUT_S = 200
FAULT = """
import importlib.util, os, signal, sys

class Faulty:  # a native parser with a bug, played: what it is given makes it fall over
    def __init__(self, loader):
        self.loader, self.create_module = loader, loader.create_module

    def exec_module(self, module):
        self.loader.exec_module(module)
        real = module.error_share

        def error_share(data, *args, **kwargs):
            if b"deadly" in data:
                os.kill(os.getpid(), signal.SIGSEGV)
            return real(data, *args, **kwargs)

        module.error_share = error_share

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "lakh.corpus.filters.quality":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        spec.loader = Faulty(spec.loader)
        return spec

sys.meta_path.insert(0, Finder())
"""


def write(root: Path, number: int) -> None:
    for file in range(number):
        path = root / f"pkg{file % 7}" / f"module_{file}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"def function_{file}_{line}(a, b):\n    return a * {line} + b - {file}\n" for line in range(12)]
        path.write_text("\n".join(lines))


def build(root: Path, out: Path, *options: str, faults: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if faults is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(faults), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "lakh", "corpus", "build", f"own:{root}", "--out", str(out), *options, "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment)


def answer_of(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def kept(out: Path) -> dict[str, str]:
    found = {}
    for batch in read_documents(str(out), ["path", "sha256"]):
        found.update(zip(*(column.to_pylist() for column in batch.columns), strict=True))
    return found


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    folder = tmp_path / "faults"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(FAULT)
    return folder


@pytest.mark.timeout(TIMEOUT_S)
def test_a_document_that_kills_its_worker_is_isolated(tmp_path: Path, faults: Path) -> None:
    root = tmp_path / "library"
    write(root, 40)
    healthy = answer_of(build(root, tmp_path / "healthy", "--workers", "2", "--set", "split_bytes=20000"))
    (root / "pkg3" / "poison.py").write_text("def deadly(a, b):\n    return a + b\n" * 20)
    faulty = answer_of(build(root, tmp_path / "faulty", "--workers", "2", "--set", "split_bytes=20000", faults=faults))
    assert faulty["dropped"] == {**healthy["dropped"], "crashed": 1}  # type: ignore[dict-item]
    assert kept(tmp_path / "faulty") == kept(tmp_path / "healthy")
    history = find_document(str(tmp_path / "faulty"), "library/pkg3/poison.py")
    assert (history.reason, history.detail) == ("crashed", "its worker died 3 times")


@pytest.mark.timeout(TIMEOUT_S)
def test_a_small_build_that_died_isolates_its_workers_the_second_time(tmp_path: Path, faults: Path) -> None:
    root = tmp_path / "library"
    write(root, 10)
    (root / "poison.py").write_text("def deadly(a, b):\n    return a + b\n" * 20)
    assert build(root, tmp_path / "out", faults=faults).returncode == -11  # a single task, in the driver's own process
    answer = answer_of(build(root, tmp_path / "out", faults=faults))
    assert (answer["kept"], answer["dropped"]) == (10, {"crashed": 1})


@pytest.mark.timeout(TIMEOUT_S)
def test_a_document_that_needs_more_memory_than_a_worker_has_is_isolated(tmp_path: Path) -> None:
    root = tmp_path / "library"
    write(root, 10)
    lines = "".join(f"value_{number} = {number}\n" for number in range(1_000_000))
    (root / "huge.py").write_text(lines)  # 22 MB, for which the lexer would take 1.3 GB
    answer = answer_of(build(root, tmp_path / "out", "--workers", "1", "--set", "filters.max_file_bytes=50000000"))
    assert (answer["kept"], answer["dropped"]) == (10, {"crashed": 1})
    assert int(str(answer["peak_rss_bytes"])) < 1 << 30
