"""Runs in an object store: the dashboard shows a copy of their events, which follows them."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakh import storage
from lakh.cli.dashboard import dashboard
from lakh.dashboard import mirror as mirror_module
from lakh.dashboard.mirror import RunMirror
from lakh.dashboard.runs import RunCollection
from lakh.errors import UserError
from lakh.storage import ObjectInfo

TIMEOUT_S = 60.0


@pytest.fixture
def stored(s3: Any, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    return f"bucket/{request.node.name}"


def upload(s3: Any, folder: Path, to: str) -> None:
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        s3.pipe_file(f"{to}/{file.relative_to(folder).as_posix()}", file.read_bytes())


def test_the_page_of_a_stored_run_is_that_of_the_run(s3: Any, faulty_run: Any, stored: str) -> None:
    upload(s3, faulty_run.run_dir, f"{stored}/runs/first")
    s3.pipe_file(f"{stored}/runs/first/checkpoints/step-1/weights", b"x" * 100)
    url = f"s3://{stored}/runs"
    command = ["--json", url]
    told = json.loads(CliRunner().invoke(dashboard, command, standalone_mode=False, catch_exceptions=False).output)
    runs = RunCollection(str(faulty_run.run_dir))
    runs.read_all()
    [here], [there] = runs.data()["runs"], told["runs"]
    assert told["folder"] == url
    assert (there["name"], there["step"], there["loss"]) == ("first", here["step"], here["loss"])


def test_new_events_are_appended_and_a_new_run_replaces_the_old(s3: Any, fake_run: Any, stored: str) -> None:
    fake_run.begin()
    fake_run.steps(1, 5)
    upload(s3, fake_run.run_dir, f"{stored}/run")
    with RunMirror(f"s3://{stored}/run") as mirror:
        assert not list(mirror.folder.rglob("weights"))
        runs = RunCollection(str(mirror.folder), label=mirror.url)
        runs.read_all()
        assert runs.data()["runs"][0]["step"] == 5
        fake_run.steps(6, 9)
        upload(s3, fake_run.run_dir, f"{stored}/run")
        assert mirror.refresh() == 1
        runs.read_all()
        assert runs.data()["runs"][0]["step"] == 9
        [events] = (fake_run.run_dir / "events").glob("*.jsonl")
        [copy] = (mirror.folder / "events").glob("*.jsonl")
        assert copy.read_bytes() == events.read_bytes()
        other = events.read_bytes()[::-1] + b"longer than before\n"
        s3.pipe_file(f"{stored}/run/events/{events.name}", other)
        mirror.refresh()
        assert copy.read_bytes() == other, "only a copy that is the beginning of the object is extended"
        s3.rm_file(f"{stored}/run/run.toml")
        mirror.refresh()
        assert not (mirror.folder / "run.toml").exists()
    assert not mirror.folder.exists()


def test_a_url_without_runs_is_an_error(s3: Any) -> None:
    for url in ("s3://bucket/nothing/here", "s3://no-such-bucket/runs"):
        with pytest.raises(UserError, match=r"holds no events|no such"), RunMirror(url):
            pass


def test_names_from_a_store_stay_inside_the_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = [
        "../../out",
        "/etc/x",
        "a/../../x",
        "run/.hidden/x",
        "run/checkpoints/x",
        "run\\..\\x",
        "run/large",
        "run/run.toml",
    ]
    found = {name: ObjectInfo((1 << 30) if name == "run/large" else 3, "1") for name in names}
    monkeypatch.setattr(storage, "find_files", lambda url: found)
    monkeypatch.setattr(storage, "read_range", lambda url, start, size_bytes: b"abc")
    with RunMirror("s3://bucket/runs") as mirror:
        assert [path.name for path in mirror.folder.rglob("*") if path.is_file()] == ["run.toml"]


def test_a_store_that_fails_later_is_reported_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first, later = {"run/run.toml": ObjectInfo(3, "1")}, {"run/run.toml": ObjectInfo(4, "2")}
    answers = itertools.chain([first, {}], itertools.repeat(later))
    monkeypatch.setattr(storage, "find_files", lambda url: next(answers))
    monkeypatch.setattr(storage, "read_range", lambda url, start, size_bytes: b"x" * size_bytes)
    monkeypatch.setattr(mirror_module, "REFRESH_S", 0.01)
    errors: list[str] = []
    with RunMirror("s3://bucket/runs", on_error=lambda error: errors.append(str(error))) as mirror:
        copy, deadline_s = mirror.folder / "run" / "run.toml", time.monotonic() + TIMEOUT_S
        while copy.read_bytes() != b"xxxx":
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    assert len(errors) == 1
    assert "holds no events" in errors[0]
