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
    lock_run_folder,
    refuse_other_settings,
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
    refuse_other_settings(tmp_path / "missing")
    (tmp_path / "run.toml").write_text("# lr after the sweep of May")
    with pytest.raises(UserError, match=r"run\.toml: is not of a run, .* move it, or choose another --out"):
        refuse_other_settings(tmp_path)
    with lock_run_folder(tmp_path):  # a run that failed before its first checkpoint starts again
        refuse_other_settings(tmp_path)


def test_a_run_can_be_resumed_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = Data(tokens="below/../tokens", mixture=(Source(tokens="near"), Source(tokens="s3://far/tokens")))
    run = with_absolute_paths(Run(name="x", data=data, init_from="model"))
    assert run.data.tokens == str(tmp_path / "tokens")
    assert [source.tokens for source in run.data.mixture] == [str(tmp_path / "near"), "s3://far/tokens"]
    assert run.init_from == str(tmp_path / "model")
    assert with_absolute_paths(run) == run
    assert with_absolute_paths(dataclasses.replace(run, init_from="")).init_from == ""
