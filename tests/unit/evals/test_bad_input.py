"""Invalid input exits with code 2 and a message that says what to do; nothing runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lakh.evals.sandbox import Sandbox
from lakh.evals.sandbox.backends import landlock


def line(task_id: str, **keys: Any) -> str:
    return json.dumps({"task_id": task_id, "completion": "    pass\n", **keys}) + "\n"


WHOLE = "".join(line(f"HumanEval/{i}") for i in range(164))

FILES = {
    "malformed JSONL": (WHOLE + "{oops\n", [], "samples.jsonl:165: is not JSON"),
    "a completion that is no text": (line("HumanEval/0", completion=7), [], "completion is not a string"),
    "missing task ids": (line("HumanEval/0"), [], "has no sample for 163 of 164 problems (HumanEval/1, HumanEval/2"),
    "duplicate ids": (WHOLE + line("HumanEval/3"), [], "has 2 samples of HumanEval/3 and 1 of HumanEval/0"),
    "another number of samples": (
        WHOLE + line("HumanEval/3"),
        ["--n", "1"],
        "has 2 samples of HumanEval/3 and --n says 1",
    ),
    "samples of another benchmark": (line("Mbpp/11"), [], "'Mbpp/11' is not a problem of this task"),
    "an empty file": ("", [], "holds no samples"),
    "binary": ("\0\x01\x02", [], "is not JSON"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_bad_samples_file_is_refused(
    name: str, tmp_path: Path, lakh: Callable[..., tuple[int, str, str]], last_line: Callable[[str], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Sandbox, "choose", lambda **_: pytest.fail("a sandbox was started"))
    text, options, words = FILES[name]
    (tmp_path / "samples.jsonl").write_text(text)
    code, out, err = lakh("eval", "score", str(tmp_path / "samples.jsonl"), "--task", "humaneval", *options, "--json")
    assert code == 2
    assert words in err
    assert last_line(out)["error"]["exit_code"] == 2


def test_data_with_another_sha256_is_refused(tmp_path: Path, lakh: Callable[..., tuple[int, str, str]]) -> None:
    (tmp_path / "mbpp.jsonl").write_text("{}\n")
    code, _, err = lakh("eval", "score", "--canonical", "--task", "mbpp", "--data", str(tmp_path))
    assert code == 2
    assert "has sha256" in err
    assert "ccf64ceae9c5" in err


def test_without_any_sandbox_nothing_runs(
    lakh: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(landlock, "_syscall", lambda *words: -1)
    code, _, err = lakh("eval", "score", "--canonical", "--task", "humaneval", "--limit", "1")
    assert code == 2
    assert "apt-get install bubblewrap" in err
    assert "--unsafe" in err


def test_a_backend_that_does_not_exist_is_refused(lakh: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = lakh("eval", "score", "--canonical", "--task", "humaneval", "--sandbox", "chroot")
    assert code == 2
    assert "bubblewrap" in err


@pytest.mark.parametrize(
    "words", [["diff", "a"], ["diff", "/none", "/none"], ["reproduce", "/none"], ["watch", "/none"]]
)
def test_commands_on_missing_results_exit_with_2(words: list[str], lakh: Callable[..., tuple[int, str, str]]) -> None:
    extra = ["--task", "humaneval"] if words[0] == "watch" else []
    code, _, _ = lakh("eval", *words, *extra)
    assert code == 2
