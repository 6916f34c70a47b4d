"""Tags of runs: `lakh tag` writes them, the dashboard shows them, and a folder of anybody cannot break it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lakh.cli.tag import tag
from lakh.dashboard.run_files.tags import read_tags
from lakh.dashboard.runs import RunCollection
from lakh.errors import UserError


def lakh_tag(*words: str) -> dict[str, object]:
    done = CliRunner().invoke(tag, ["--json", *words], standalone_mode=False, catch_exceptions=False)
    found: dict[str, object] = json.loads(done.output)
    return found


def test_tags_are_added_removed_and_shown(faulty_run, tmp_path: Path) -> None:
    run_dir = str(faulty_run.run_dir)
    assert lakh_tag(run_dir)["tags"] == []
    assert not (faulty_run.run_dir / "tags.json").exists(), "asking writes nothing"
    assert lakh_tag(run_dir, "lr=3e-4", "baseline")["tags"] == ["baseline", "lr=3e-4"]
    runs = RunCollection(str(tmp_path))
    runs.read_all()
    assert runs.data()["runs"][0]["tags"] == ["baseline", "lr=3e-4"]
    assert lakh_tag(run_dir, "best", "--remove", "baseline")["tags"] == ["best", "lr=3e-4"]
    assert read_tags(faulty_run.run_dir) == ["best", "lr=3e-4"]


def test_a_tag_must_be_short_and_plain(faulty_run, tmp_path: Path) -> None:
    run_dir = str(faulty_run.run_dir)
    for name in ("two words", "<b>", "x" * 41, "-x"):
        with pytest.raises(UserError, match="is not usable"):
            lakh_tag(run_dir, "--", name) if name.startswith("-") else lakh_tag(run_dir, name)
    with pytest.raises(UserError, match="keep at most 32"):
        lakh_tag(run_dir, *(f"tag{number}" for number in range(33)))
    with pytest.raises(UserError, match="is not the folder of a run"):
        lakh_tag(str(tmp_path / "elsewhere"), "x")


@pytest.mark.parametrize(
    "text", ['{"tags": "x"}', "[1]", '{"tags": [', '{"tags": [3, "<script>", null]}', "[" * 100_000, "\xff"]
)
def test_a_malformed_file_has_no_tags(tmp_path: Path, text: str) -> None:
    (tmp_path / "tags.json").write_text(text, encoding="latin-1")
    assert read_tags(tmp_path) == []


def test_a_link_to_another_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.json").write_text('{"tags": ["x"]}')
    (tmp_path / "tags.json").symlink_to(tmp_path / "elsewhere.json")
    assert read_tags(tmp_path) == []
