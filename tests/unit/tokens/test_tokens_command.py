from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lakh.child_process import ChildProcess
from lakh.cli.main import COMMANDS
from lakh.cli.tokens import SAMPLE_BYTES, tokens
from lakh.errors import PeerLost
from lakh.tokens.tokenizer import training
from lakh.tokens.training_process import train_in_child


def test_train_and_pack_from_the_command_line(
    lakh: Callable[..., Any], last_line: Callable[..., Any], corpus: Path, tmp_path: Path
) -> None:
    words, out = str(tmp_path / "words"), str(tmp_path / "packed")
    code, stdout, _ = lakh("tokens", "train", str(corpus), "--out", words, "--vocab", "300", "--json")
    assert (code, last_line(stdout)["vocab"]) == (0, 300)
    command = ("tokens", "pack", str(corpus), "--tokenizer", words, "--out", out, "--heldout", "0.2")
    first = last_line(lakh(*command, "--json")[1])
    assert first["splits"]["train"]["documents"] + first["splits"]["heldout"]["documents"] == 121
    code, stdout, _ = lakh(*command)
    assert code == 0
    assert "reused" in stdout


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_training(pid: int) -> bool:
    """Whether the process has become another program: before that, the one that starts it waits for it."""
    try:
        return b"_child_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_an_interrupt_ends_training_at_once_and_keeps_nothing(corpus: Path, tmp_path: Path) -> None:
    """The training does not go on by itself here: its process is stopped, as one is deaf that merges pairs."""
    (tmp_path / "words").mkdir()
    unfinished = tmp_path / "words" / ".tokenizer.json.12345678.part"
    unfinished.write_text("{")
    command = [sys.executable, "-m", "lakh", "tokens", "train", str(corpus), "--out", str(tmp_path / "words")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until_s = time.monotonic() + 60
    while not (children := [pid for pid in children_of(process.pid) if is_training(pid)]):
        assert process.poll() is None
        assert time.monotonic() < until_s
        time.sleep(0.002)
    os.kill(children[0], signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, "interrupted" in err, "Traceback" in err) == (75, True, False), err
    assert not Path(f"/proc/{children[0]}").exists()
    assert list((tmp_path / "words").iterdir()) == []


def test_a_training_process_that_is_killed_is_an_error(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ChildProcess.start

    def start_and_kill(*arguments: object) -> ChildProcess:
        child = start(*arguments)
        os.kill(child.pid, signal.SIGKILL)
        return child

    monkeypatch.setattr(ChildProcess, "start", start_and_kill)
    with pytest.raises(PeerLost, match=r"the process that trains it ended \(killed by SIGKILL\)"):
        train_in_child(corpus, tmp_path / "words", vocab=300)


def test_errors_have_an_exit_code_and_a_remedy(lakh: Callable[..., Any], corpus: Path, tmp_path: Path) -> None:
    code, _, stderr = lakh("tokens", "train", str(tmp_path / "nowhere"), "--out", str(tmp_path / "words"))
    assert code == 2
    assert "lakh corpus build" in stderr
    code, _, stderr = lakh("tokens", "train", str(corpus), "--out", str(tmp_path / "words"), "--vocab", "100")
    assert code == 2
    assert "272" in stderr
    code, _, stderr = lakh(
        "tokens", "pack", str(corpus), "--tokenizer", str(tmp_path), "--out", str(tmp_path / "packed")
    )
    assert code == 2
    assert "lakh tokens train" in stderr


def test_the_stream_of_a_run_can_be_inspected(lakh: Callable[..., Any], last_line: Callable[..., Any]) -> None:
    golden = str(Path(__file__).resolve().parents[2] / "golden" / "tokens-1")
    command = ("tokens", "stream", "laptop", "--set", f"data.tokens={golden}", "--set", "data.sequence=16")
    first, again, other = (last_line(lakh(*command, "--steps", steps, "--json")[1]) for steps in ("2", "2", "3"))
    assert first == again
    assert first["stream_sha256"] != other["stream_sha256"]
    assert first["sequences"] == 16
    code, text, _ = lakh(*command, "--show", "5")
    assert code == 0
    assert len(text) > 16
    code, _, stderr = lakh(*command, "--set", "data.tokens=/nowhere")
    assert code == 2
    assert "lakh tokens pack" in stderr


def test_the_help_equals_the_command_table() -> None:
    assert (tokens.help or "").splitlines()[0] == COMMANDS["tokens"][1]


def test_the_default_sample_size_equals_that_of_training() -> None:
    assert training.SAMPLE_BYTES == SAMPLE_BYTES
