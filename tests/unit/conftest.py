"""What several rooms' tests need: the command in this process, and a disk that fills up."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import Any

import pytest

from lakh import storage
from lakh.cli import main


@pytest.fixture
def lakh(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command here: (exit code, stdout, stderr)."""

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(list(words))
        done = capsys.readouterr()
        return int(left.value.code or 0), done.out, done.err

    return run


@pytest.fixture
def last_line() -> Callable[[str], dict[str, Any]]:
    """The JSON document that ends an output."""
    return lambda out: json.loads(out.splitlines()[-1])


@pytest.fixture
def fill_disk_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Call it with a number: after so many writes to data files there is no space left."""

    def fill(writes: int) -> None:
        left, real = [writes], storage.HashingFile.write

        def write(self: storage.HashingFile, data: Any) -> int:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(self, data)

        monkeypatch.setattr(storage.HashingFile, "write", write)

    return fill
