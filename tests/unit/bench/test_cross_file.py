"""lakh bench completion: lines that use names of other files, scored with several contexts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from bench.decode import speed as decode
from bench.serve import cross_file
from bench.serve.cross_file import LineScore, LineScorer, context_of, measure, summary_rows
from bench.serve.cross_file_tasks import tasks_of
from click.testing import CliRunner

from lakh.errors import UserError
from lakh.server.prompts.extra_files import ExtraFile
from lakh.spec.model import Model

USER = "import os\nfrom pack.shapes import scaled\n" + "x = 1\n" * 12 + "def use(a):\n    return scaled(a, factor=3)\n"


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    for package in ("one", "two"):
        folder = tmp_path / package / "pack"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "shapes.py").write_text("def scaled(shape, factor=2): ...\n")
        (folder / "user.py").write_text(USER)
        (folder / "broken.py").write_text("def (")
        (folder / "other.py").write_text("import json\n" + "y = 2\n" * 14 + "z = json.dumps(y, indent=4)\n")
    return tmp_path


def test_a_task_is_a_line_that_uses_a_name_of_another_file(packages: Path) -> None:
    tasks = tasks_of(packages, 10, seed=0)
    assert sorted(task.package for task in tasks) == ["one", "two"]
    for task in tasks:
        assert task.before.endswith("    return ")
        assert task.answer == "scaled(a, factor=3)"
        assert task.before + task.answer + "\n" == USER
    assert tasks_of(packages, 1, seed=0) == tasks[:1]
    before, extra = context_of(tasks[0], "snippets", 400)
    assert (before, extra) == (tasks[0].before, [ExtraFile("pack/shapes.py", "def scaled(shape, factor=2): ...\n")])
    assert context_of(tasks[0], "line", 400) == ("    return ", [])
    assert len(context_of(tasks[0], "neighbours", 400)[1]) == 3


class FakeScorer:
    def __init__(self) -> None:
        self.calls = 0

    def score(self, before: str, answer: str, extra: Sequence[ExtraFile]) -> LineScore:
        self.calls += 1
        return LineScore(8.0 if extra else 16.0, 8, bool(extra), 1.0 if extra else 0.5, 10)


def test_scores_are_kept_and_paired_by_task(packages: Path, tmp_path: Path) -> None:
    tasks, scorer, kept = tasks_of(packages, 10, seed=0), FakeScorer(), tmp_path / "scores.jsonl"
    given = lambda: cast(LineScorer, scorer)  # noqa: E731
    found = measure(tasks[:1], ["file", "snippets"], given, 400, lambda text: None, kept)
    assert scorer.calls == 2
    found = measure(tasks, ["file", "snippets"], given, 400, lambda text: None, kept)
    assert scorer.calls == 4  # the first task was known
    baseline, row = summary_rows(found)
    assert (baseline["bits_per_byte"], row["bits_per_byte"], row["bits_change"]) == (2.0, 1.0, -1.0)
    assert (row["exact_change"], row["similarity_change"]) == (1.0, 0.5)
    assert row["bits_interval"] == "-1.0000 to -1.0000"
    kept.write_text("{}\n")
    with pytest.raises(UserError, match="is not a score"):
        measure(tasks, ["file"], given, 400, lambda text: None, kept)


def test_a_line_is_scored_by_the_network_that_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A uniform model needs log2(vocabulary) bits for each token."""
    spec = Model(layers=1, width=64, heads=2, kv_heads=1, ffn=128, vocab=512, context=256)
    monkeypatch.setitem(decode.SHAPES, "small", spec)
    folder = decode.random_model("small", tmp_path)
    scorer = LineScorer(str(folder), "f32", 128)
    forward = scorer._network.forward
    tokens: Any = scorer._tokenizer.encode(" scaled(a)\n")
    monkeypatch.setattr(scorer._network, "forward", lambda chunks, cache: forward(chunks, cache) * 0)
    found = scorer.score("x = 1\nreturn ", "scaled(a)", [ExtraFile("a.py", "def scaled(shape): ...\n")])
    assert found.bits == pytest.approx(len(tokens) * math.log2(scorer._tokenizer.vocab_size), rel=1e-3)
    assert found.num_bytes == len(" scaled(a)\n")
    assert not found.is_exact
    alone = scorer.score("x = 1\nreturn ", "scaled(a)", [])
    assert alone.prompt_tokens < found.prompt_tokens <= 128


def test_unknown_contexts_and_folders_without_tasks_are_refused(packages: Path) -> None:
    for words, message in (
        ([str(packages), "--contexts", "file,nothing"], "no such context"),
        ([str(packages / "one" / "pack")], "fewer than two lines"),
    ):
        done = CliRunner().invoke(cross_file.completion, ["--model", "m", *words], standalone_mode=False)
        assert isinstance(done.exception, UserError)
        assert message in str(done.exception)
