from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ANSWER_TIMEOUT_S = 300


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_programs_of_a_served_model_are_judged(
    served_model: Path, run_lakh: Callable[..., Any], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "lakh", "serve", str(served_model), "--http", "127.0.0.1:0", "--json"]
    server = subprocess.Popen(
        [*command, "--threads", "1"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        out = tmp_path / "made"
        made = run_lakh(
            *("corpus", "synthesize", url, "--out", str(out), "--attempts", "3", "--max-tokens", "24", "--unsafe"),
            timeout_s=ANSWER_TIMEOUT_S,
        )
    finally:
        server.terminate()
        server.wait(timeout=60)
    # The model is random: nothing that it writes passes, and every answer has a reason.
    assert made["attempts"] == sum(made["verdicts"].values()) == 3
    assert "passed" not in made["verdicts"]
    assert made["kept"] == 0
    attempts = [json.loads(line) for line in (out / "attempts.jsonl").read_text().splitlines()[1:]]
    assert [row["number"] for row in attempts] == [0, 1, 2]
    assert all(row["answer"] for row in attempts)
