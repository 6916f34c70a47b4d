"""A folder has one run at a time, and its run.toml resumes from any working directory."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lakh.errors import PeerTimeout, UserError
from lakh.spec import Data, Run, Source, load_run
from lakh.trainer.run_folder import (
    has_checkpoints,
    lock_run_folder,
    refuse_other_files,
    require_run,
    with_absolute_paths,
    write_settings,
)


def test_a_second_run_in_a_folder_is_refused_with_the_owner_of_the_lock(tmp_path: Path) -> None:
    with (
        lock_run_folder(tmp_path / "run"),
        pytest.raises(PeerTimeout, match=f"process {os.getpid()} on .* is using it"),
        lock_run_folder(tmp_path / "run", timeout_s=0),
    ):
        pass
    with lock_run_folder(tmp_path / "run", timeout_s=0):
        pass  # free again


def test_ranks_keep_the_lock_after_their_launcher_has_ended(tmp_path: Path) -> None:
    with lock_run_folder(tmp_path) as lock:
        rank = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, pass_fds=[lock]
        )
    with pytest.raises(PeerTimeout), lock_run_folder(tmp_path, timeout_s=0):
        pass
    rank.communicate(b"", timeout=60)
    with lock_run_folder(tmp_path, timeout_s=0):
        pass


def test_only_local_folders_are_accepted(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a local path"), lock_run_folder("s3://bucket/run"):
        pass
    for path, message in (
        ("s3://bucket/run", "not a local path"),
        (tmp_path, "has no run.toml"),
        (__file__, "is a file"),
    ):
        with pytest.raises(UserError, match=message):
            require_run(path)
    write_settings(Run(name="x"), tmp_path)
    require_run(tmp_path)
    (tmp_path / "lock").mkdir()
    with pytest.raises(UserError, match="lock: is a directory"), lock_run_folder(tmp_path):
        pass


def test_settings_are_written_only_when_they_changed(tmp_path: Path) -> None:
    write_settings(Run(name="x"), tmp_path)
    written = (tmp_path / "run.toml").stat().st_ino
    write_settings(Run(name="x"), tmp_path)
    assert (tmp_path / "run.toml").stat().st_ino == written
    write_settings(Run(name="x", seed=2), tmp_path)
    assert load_run(tmp_path).seed == 2


def test_a_settings_file_of_the_user_is_not_replaced(tmp_path: Path) -> None:
    refuse_other_files(tmp_path / "missing")
    (tmp_path / "run.toml").write_text("# lr after the sweep of May")
    with pytest.raises(UserError, match=r"run\.toml: is not of a run, .* move it, or choose another --out"):
        refuse_other_files(tmp_path)
    with lock_run_folder(tmp_path):  # a run that failed before its first checkpoint starts again
        refuse_other_files(tmp_path)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["notes.txt"], r"holds other files \(notes\.txt\)"),
        (["corpus", "tokens"], r"\(corpus, tokens\)"),
        (["a", "b", "c", "d", "e"], r"\(a, b, c and 2 more\)"),
        (["lock", "run.toml", "logs", "events", "src"], r"\(src\)"),
        (["run.toml", "checkpoints", "src"], r"\(src\)"),
    ],
)
def test_a_run_does_not_write_among_other_files(names: list[str], shown: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=shown + "; choose another --out: a run needs a folder of its own"):
        refuse_other_files(tmp_path)


def test_a_folder_with_files_of_a_run_without_a_checkpoint_is_taken_again(tmp_path: Path) -> None:
    assert not has_checkpoints(tmp_path)
    (tmp_path / "lost+found").mkdir()
    for name in ("lock", "run.toml", "id", "rendezvous", ".run.toml.12345678.part"):
        (tmp_path / name).write_text("")
    for name in ("logs", "events", "checkpoints", "sources"):
        (tmp_path / name).mkdir()
    refuse_other_files(tmp_path, also_written=["sources"])
    (tmp_path / "checkpoints" / "step-00000001").mkdir()  # a run: the caller decides
    (tmp_path / "notes.txt").write_text("")
    refuse_other_files(tmp_path)
    assert has_checkpoints(tmp_path)


GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "tokens-1"
TRAIN = ("train", "laptop", "--set", f"data.tokens={GOLDEN}", "--set", "data.sequence=16")


def test_train_refuses_a_folder_of_other_files_and_writes_nothing(lakh, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "main.py").write_text("print(1)")
    code, _, err = lakh(*TRAIN, "--out", str(tmp_path / "work"))
    assert code == 2
    assert "work: holds other files (main.py); choose another --out" in err
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["main.py"]


def test_train_in_the_folder_of_a_run_that_goes_on_is_refused_at_once(
    lakh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakh.trainer.run_folder.LOCK_TIMEOUT_S", 1e9)  # what resume would wait
    with lock_run_folder(tmp_path / "run"):
        code, _, err = lakh(*TRAIN, "--out", str(tmp_path / "run"))
    assert code == 75
    assert "starting" not in err  # no progress of the other run
    assert f"run: process {os.getpid()} on" in err


def test_a_run_can_be_resumed_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = Data(tokens="below/../tokens", mixture=(Source(tokens="near"), Source(tokens="s3://far/tokens")))
    run = with_absolute_paths(Run(name="x", data=data, init_from="model"))
    assert run.data.tokens == str(tmp_path / "tokens")
    assert [source.tokens for source in run.data.mixture] == [str(tmp_path / "near"), "s3://far/tokens"]
    assert run.init_from == str(tmp_path / "model")
    assert with_absolute_paths(run) == run
    assert with_absolute_paths(dataclasses.replace(run, init_from="")).init_from == ""
