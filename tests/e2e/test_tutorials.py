"""The commands of the tutorial on fine-tuning, as the page has them, with few steps."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from lakh.errors import PeerError
from lakh.workloads.code import pretrained

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorials" / "fine-tune.md").read_text(encoding="utf-8")
COMMAND_TIMEOUT_S = 900
ANSWER_TIMEOUT_S = 120

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def few_steps(command: str) -> str:
    """The same command with less work."""
    for pattern, less in (
        ("--steps 20", "--steps 2"),
        ("data.sequence=256", "data.sequence=64"),
        ("batch=4", "batch=2"),
    ):
        command = command.replace(pattern, less)
    return command


def write_project(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(12):
        lines = [f"def area_{number}_{side}(width, height):\n    return width * height + {side}" for side in range(3)]
        (folder / f"shapes_{number}.py").write_text("\n\n\n".join(lines) + "\n")


def test_smollm2_is_tuned_exported_and_served(tmp_path: Path) -> None:
    try:
        pretrained.download(pretrained.find("smollm2"), tmp_path / "smollm2.gguf", timeout_s=120.0)
    except PeerError as error:
        pytest.skip(f"SmolLM2 cannot be downloaded: {error}")
    first, ask = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
    *commands, serve = [few_steps(line) for line in first.splitlines()]
    assert "--steps 2 " in commands[1]
    write_project(tmp_path / "path" / "to" / "project")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    for command in commands:
        words = [sys.executable, "-m", *shlex.split(command)]
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    report = json.loads((tmp_path / "runs" / "project" / "report.json").read_text())
    assert report["steps"] == 2
    assert 0 < report["after"]["bits_per_byte"] < report["before"]["bits_per_byte"]

    words = [word.replace(":8000", ":0") for word in shlex.split(serve)]
    server = subprocess.Popen(
        [sys.executable, "-m", *words, "--json"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        body = re.search(r"-d '(.*?)'", ask)
        assert body is not None
        request = urllib.request.Request(
            f"{url}/v1/completions", data=body[1].encode(), headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            assert json.load(answer)["choices"][0]["text"]
    finally:
        server.kill()
        server.wait()
    shutil.rmtree(tmp_path / "merged")  # half a gigabyte
