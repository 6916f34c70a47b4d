"""Fixtures: a sandbox, skipped where this machine cannot have one, and toy data."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lakh
from lakh.evals import calibrate
from lakh.evals.sandbox import Sandbox, isolation
from lakh.evals.sandbox.backends import bubblewrap
from lakh.evals.task import Problem, Program, Task
from lakh.storage import cache_folder


def missing_for_sandbox() -> str | None:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return "bubblewrap is not installed: apt-get install bubblewrap"
    plain = [bwrap, "--unshare-all", "--ro-bind", "/", "/", "true"]
    probe = subprocess.run(plain, capture_output=True, text=True, timeout=30, check=False)
    return None if probe.returncode == 0 else f"bubblewrap cannot make namespaces here: {probe.stderr.strip()}"


@pytest.fixture(scope="session")
def bubblewrap_sandbox() -> Iterator[Sandbox | None]:
    """None where the machine lacks bubblewrap; isolation that starts and does not hold is a failure."""
    if missing_for_sandbox():
        yield None
        return
    with Sandbox.choose(backend="bubblewrap") as chosen:
        yield chosen


@pytest.fixture(scope="session")
def sandbox(bubblewrap_sandbox: Sandbox | None) -> Sandbox:
    if bubblewrap_sandbox is None:
        pytest.skip(missing_for_sandbox() or "bubblewrap could not start: apt-get install bubblewrap")
    return bubblewrap_sandbox


TOKEN = f"LAKH_TEST_TOKEN={uuid.uuid4().hex}"


@pytest.fixture(scope="session", autouse=True)
def marked_processes() -> None:
    """Every process that these tests start in a sandbox has the token in its environment."""
    name, _, value = TOKEN.partition("=")
    isolation.ENVIRONMENT[name] = value


@pytest.fixture(autouse=True)
def own_calibrations(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests neither read nor write the calibrations of the user."""
    folder = tmp_path_factory.mktemp("calibrations")
    monkeypatch.setattr(calibrate, "cache_folder", lambda name: folder / name)


@pytest.fixture
def alive() -> Callable[[Sandbox], list[int]]:
    """Ids of processes that were started in a sandbox and are alive, except its warm workers (and their bubblewrap)."""

    def find(sandbox: Sandbox) -> list[int]:
        warm = {worker._process.pid for worker in sandbox._idle}
        # their children: the first process (below bubblewrap, if there is one), examiner and zygote
        for _ in range(2 if isinstance(sandbox._backend, bubblewrap.Bubblewrap) else 1):
            warm |= {pid for pid in processes_with(TOKEN) if parent(pid) in warm}
        return [pid for pid in processes_with(TOKEN) if pid not in warm]

    return find


def parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return None


def processes_with(token: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue
            if token.encode() in environment.split(b"\0"):
                found.append(int(folder.name))
    return found


@pytest.fixture
def wait_for_count() -> Callable[[str, Callable[[int], bool]], None]:
    """Wait until `is_right` accepts the number of processes with this token in their environment."""

    def wait(token: str, is_right: Callable[[int], bool]) -> None:
        deadline_s = time.monotonic() + 120.0
        while not is_right(len(processes_with(token))):
            assert time.monotonic() < deadline_s, f"still {processes_with(token)}"
            time.sleep(0.05)

    return wait


@pytest.fixture(scope="session")
def benchmarks(shared_data: Callable[[str, str], Path]) -> Path:
    """The folder with the benchmarks' own files: where lakh downloads them to, or beside the checkout."""
    if (cache_folder("benchmarks") / "mbpp.jsonl").exists():
        return cache_folder("benchmarks")
    return shared_data("benchmarks", "benchmark files (lakh eval score --canonical --task mbpp also downloads them)")


@pytest.fixture
def toy_task() -> Task:
    """Three problems: add a number."""
    return Task(
        name="toy",
        problems=tuple(
            Problem(
                id=f"Toy/{i}",
                prompt=f"def add(x):\n    # adds {i}\n",
                canonical=f"    return x + {i}\n",
                test=f"def check(f):\n    assert f(1) == {1 + i}\n",
                entry_point="add",
            )
            for i in range(3)
        ),
        stops=("\ndef",),
        prompt_form="raw prompt",
        extraction="cut at the first stop string",
        data_sha256="0" * 64,
        build=lambda problem, completion: Program(
            problem.prompt + completion, f"{problem.test}\ncheck(add)\n", names=("add",)
        ),
    )


@pytest.fixture
def run_as_ordinary_user() -> Callable[..., list[str]]:
    """Runs a script as uid 54321, outside any virtual environment; gives the lines that it prints."""
    return _run_as_ordinary_user


def _run_as_ordinary_user(script: str, *, without_user_namespaces: bool = False) -> list[str]:
    """Lines that the script prints as uid 54321, with the system's Python, which lies outside root's home."""
    system = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if system is None:
        pytest.skip("no python3 outside root's home")
    forbid = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.prctl(4, 1, 0, 0, 0)\n"  # dumpable again after the change of uid: /proc/self is ours
        "assert libc.unshare(0x10000000) == 0\n"
        "open('/proc/self/setgroups', 'w').write('deny')\n"
        "open('/proc/self/gid_map', 'w').write('54321 54321 1')\n"
        "open('/proc/self/uid_map', 'w').write('54321 54321 1')\n"
        "open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"  # of this namespace only
    )
    done = subprocess.run(
        [system, "-B", "-c", (forbid if without_user_namespaces else "") + script],
        env={"PYTHONPATH": str(Path(lakh.__file__).parents[1]), "PATH": os.environ["PATH"]},
        cwd="/",
        user=54321,
        group=54321,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "SyntaxError" in done.stderr or "ModuleNotFoundError" in done.stderr:
        pytest.skip(f"the system's Python cannot run lakh: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
