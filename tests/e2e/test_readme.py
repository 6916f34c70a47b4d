"""The README's commands do what it says, in its order."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
PACKAGES = ("planner", "server")  # of src/lakh: enough text for the vocabulary and the steps of the README

pytestmark = pytest.mark.timeout(600)


def blocks() -> list[list[str]]:
    """The commands of each ```sh block, without comments."""
    found = re.findall(r"```sh\n(.*?)```", README, re.S)
    return [[re.sub(r"\s+#\s.*$", "", line) for line in block.splitlines() if line.strip()] for block in found]


def run(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    return subprocess.run(
        command, shell=True, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    assert blocks()[0] == ["make demo", "make test"]
    for word, does in (("demo", "lakh demo"), ("test", "pytest")):
        planned = subprocess.run(
            ["make", "--dry-run", word], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        )
        assert does in planned.stdout


@pytest.mark.slow
def test_the_own_code_section_runs_from_top_to_bottom(tmp_path: Path) -> None:
    _, own, ask, _, _ = blocks()
    for package in PACKAGES:
        shutil.copytree(ROOT / "src/lakh" / package, tmp_path / "src/lakh" / package)
    *commands, serve = own
    assert commands[0] == ". .venv/bin/activate"  # `run` puts the environment's programs on the path instead
    for command in commands[1:]:
        done = run(command, tmp_path)
        no_sandbox = "bubblewrap" in done.stderr and "lakh eval" in command
        assert done.returncode == 0 or no_sandbox, f"{command}\n{done.stdout}\n{done.stderr}"
    words = [word.replace(":8000", ":0") for word in shlex.split(serve)]
    server = subprocess.Popen(
        [sys.executable, "-m", *words, "--json"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        assert shutil.which("curl"), "the README uses curl: apt-get install curl"
        (curl,) = ask
        answer = run(curl.replace("http://127.0.0.1:8000", url), tmp_path)
        choice = json.loads(answer.stdout)["choices"][0]
        assert choice["finish_reason"] in ("stop", "length")
        compile("def reverse(text):" + choice["text"], "README", "exec")
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("block", [3, 4], ids=["on a machine with GPUs", "before money is spent"])
def test_blocks_that_need_no_gpu_run_as_written(block: int, tmp_path: Path) -> None:
    for command in blocks()[block]:
        done = run(command, tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
