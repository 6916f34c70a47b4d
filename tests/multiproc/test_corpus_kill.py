"""A build killed at any moment resumes: the same bytes, and no committed task runs twice."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

SETS = ["--set", "split_bytes=150000"]  # many tasks, so that a kill hits a running build
TIMEOUT_S = 200  # a build takes some seconds; ten times that beside two processes that spin
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("code") / "library"
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for name in ("asyncio", "email", "json", "xml", "unittest", "http", "urllib"):
        shutil.copytree(stdlib / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(stdlib / "json", root / "again")
    return root


def start(code: Path, out: Path, workers: int = 2) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lakh", "corpus", "build", f"own:{code}", "--out", str(out), *SETS]
    command += ["--workers", str(workers), "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, object]:
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    answer: dict[str, object] = json.loads(out.splitlines()[-1])
    return answer


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


def markers(out: Path) -> dict[str, int]:
    """Every committed task, and when it was committed."""
    found = (out / ".work").glob("*/task-*.json")
    return {
        f"{path.parent.name}/{path.name}": path.stat().st_mtime_ns for path in found if not path.name.startswith(".")
    }


def wait_until(condition, process: subprocess.Popen[str]) -> None:  # type: ignore[no-untyped-def]
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        if process.poll() is not None:
            return
        time.sleep(0.01)


def held(code: Path, out: Path, committed: int) -> subprocess.Popen[str]:
    """A build whose driver is stopped after a number of tasks; its workers finish theirs and wait."""
    for _ in range(5):
        process = start(code, out)
        wait_until(lambda: len(markers(out)) >= committed, process)
        process.send_signal(signal.SIGSTOP)
        if process.poll() is None and not (out / "manifest.json").exists():
            return process
        process.kill()  # it was over before we looked, on a machine that had no time for us: once more
        process.communicate(timeout=TIMEOUT_S)
        shutil.rmtree(out)
    raise AssertionError("five builds were over before they could be stopped")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(folder.name))
    return found


@pytest.fixture(scope="module")
def truth(code: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("truth") / "corpus"
    assert finish(start(code, out))["kept"]
    return contents(out)


@pytest.mark.parametrize("committed", [2, 12])
def test_a_killed_build_resumes_with_the_remaining_tasks(
    code: Path, truth: dict[str, bytes], tmp_path: Path, committed: int
) -> None:
    out = tmp_path / "out"
    process = held(code, out, committed)
    workers = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=TIMEOUT_S)
    deadline_s = time.monotonic() + TIMEOUT_S
    while any(map(is_alive, workers)):  # they notice that it is gone
        assert time.monotonic() < deadline_s, workers
        time.sleep(0.01)
    assert not (out / "manifest.json").exists()
    before = markers(out)
    assert len(before) >= committed
    answer = finish(start(code, out))
    assert contents(out) == truth
    assert answer["tasks"]["reused"] >= len(before)  # type: ignore[index]
    assert not (out / ".work").exists()


def test_a_worker_that_is_killed_is_replaced(code: Path, truth: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(code, out)
    for committed in (1, 8):
        wait_until(lambda enough=committed: len(markers(out)) >= enough, process)
        victims = children(process.pid)
        if victims:
            os.kill(victims[0], signal.SIGKILL)
    finish(process)
    assert contents(out) == truth


def test_ctrl_c_prints_how_to_resume(code: Path, truth: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = held(code, out, committed=2)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 75
    assert "run the same command again" in err
    assert "Traceback" not in err
    before = markers(out)
    assert before
    answer = finish(start(code, out, workers=1))  # another number of workers makes no difference
    assert contents(out) == truth
    assert answer["tasks"]["reused"] == len(before)  # type: ignore[index]


def test_a_second_build_in_the_same_folder_is_rejected(code: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = held(code, out, committed=1)
    second = start(code, out)
    _, err = second.communicate(timeout=TIMEOUT_S)
    process.kill()
    process.communicate(timeout=TIMEOUT_S)
    assert second.returncode == 75
    assert "another build is running here" in err
