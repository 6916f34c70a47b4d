from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lakh.cli.main import COMMANDS
from lakh.cli.tokens import SAMPLE_BYTES, tokens
from lakh.tokens.tokenizer import training


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
