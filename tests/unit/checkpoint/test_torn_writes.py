"""A writer that stops after any number of file operations leaves the newest complete checkpoint loadable."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lakh import checkpoint

CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}


class WriterStopped(BaseException):
    """Nothing in lakh catches it, as nothing catches SIGKILL."""


class FileOperations:
    """Counts the operations that change files under a folder; from number `limit` on, each of them fails.

    The writer's own clean-up fails too, as it would not run in a killed process.
    """

    def __init__(self) -> None:
        self.folder, self.done, self.limit = "", 0, 0
        sys.addaudithook(self._audit)  # cannot be removed: it does nothing while `folder` is empty

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.folder or event not in CHANGES:
            return
        if event == "open" and not (isinstance(arguments[1], str) and set(arguments[1]) & set("wxa+")):
            return
        if event != "open" or str(arguments[0]).startswith(self.folder):
            self.done += 1
            if self.done > self.limit:
                raise WriterStopped

    def stop_after(self, limit: int, folder: Path, call: Callable[[], object]) -> bool:
        """Whether the call was stopped."""
        self.folder, self.done, self.limit = str(folder), 0, limit
        try:
            call()
        except WriterStopped:
            return True
        finally:
            self.folder = ""
        return False


@pytest.fixture(scope="module")
def operations() -> Iterator[FileOperations]:
    return FileOperations()


@pytest.mark.slow
def test_a_writer_stopped_after_any_operation_leaves_a_usable_checkpoint(
    tmp_path: Path, save_small: Callable[[int], Path], operations: FileOperations
) -> None:
    old, new = save_small(5), tmp_path / "checkpoints" / checkpoint.folder_name(10)
    first = tmp_path.with_name("first")
    shutil.copytree(tmp_path, first)

    def save_and_prune() -> None:
        save_small(10)
        checkpoint.prune(tmp_path, keep=1, known_good={str(new)})

    found = []
    for limit in range(100):
        shutil.rmtree(tmp_path)
        shutil.copytree(first, tmp_path)
        stopped = operations.stop_after(limit, tmp_path, save_and_prune)
        usable, skipped = checkpoint.newest_usable(tmp_path)
        assert usable in (str(old), str(new)), f"after {limit} operations"
        assert skipped == []
        found.append(usable == str(new))
        save_small(10)  # the next attempt completes the same step
        assert checkpoint.newest_usable(tmp_path) == (str(new), [])
        if not stopped:
            break
    assert not stopped
    assert len(found) > 8, "the operations were seen"
    assert found == sorted(found), "once complete, the new checkpoint stays"
    assert found[0] is False
    assert found[-1] is True
