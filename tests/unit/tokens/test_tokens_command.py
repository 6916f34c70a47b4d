from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lakh.cli.main import COMMANDS
from lakh.cli.tokens import tokens


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


def test_the_help_is_the_one_in_the_table() -> None:
    assert (tokens.help or "").splitlines()[0] == COMMANDS["tokens"][1]
