"""A build on Beam or Spark that is killed resumes: the same bytes, and no committed task runs twice."""

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

TIMEOUT_S = 240  # a build takes some seconds; more than ten times that on a machine without time for it
pytestmark = pytest.mark.timeout(4 * TIMEOUT_S)
QUICK_JAVA = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("code") / "library"
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for name in ("asyncio", "email", "json"):
        shutil.copytree(stdlib / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(stdlib / "json", root / "again")
    return root


def start(code: Path, out: Path, engine: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lakh", "corpus", "build", f"own:{code}", "--out", str(out), "--json"]
    command += ["--set", "split_bytes=100000", "--workers", "1", "--engine", engine]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **QUICK_JAVA},
        start_new_session=True,  # so that the kill reaches its workers and Spark's JVM too
    )


def finish(process: subprocess.Popen[str]) -> dict[str, dict[str, int]]:
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    answer: dict[str, dict[str, int]] = json.loads(out.splitlines()[-1])
    return answer


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


def markers(out: Path) -> list[Path]:
    return [path for path in (out / ".work").glob("*/task-*.json") if not path.name.startswith(".")]


def kill_after(process: subprocess.Popen[str], out: Path, committed: int) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while len(markers(out)) < committed:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=TIMEOUT_S)


@pytest.mark.parametrize("engine", ["beam", pytest.param("spark", marks=pytest.mark.slow)])
def test_a_killed_build_continues_from_the_finished_tasks(code: Path, tmp_path: Path, engine: str) -> None:
    pytest.importorskip("apache_beam" if engine == "beam" else "pyspark", reason=f"pip install 'lakh[{engine}]'")
    if engine == "spark" and shutil.which("java") is None:
        pytest.skip("no java: apt-get install default-jre-headless")
    finish(start(code, tmp_path / "truth", "local"))
    out = tmp_path / "out"
    kill_after(start(code, out, engine), out, committed=3)
    assert not (out / "manifest.json").exists()
    before = len(markers(out))
    assert before >= 3
    answer = finish(start(code, out, engine))
    assert contents(out) == contents(tmp_path / "truth")
    assert answer["tasks"]["reused"] == before
    assert answer["tasks"]["run"] > 0
