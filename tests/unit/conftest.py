"""Fixtures of several packages: the command line in this process, a disk that fills up, and a pretrained model."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lakh import storage
from lakh.cli import main
from lakh.errors import PeerError
from lakh.workloads.code import pretrained

Files = dict[str, str | bytes]


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
    """Call it with a number: after that many writes to data files the disk is full."""

    def fill(writes: int) -> None:
        left, real = [writes], storage.HashingFile.write

        def write(self: storage.HashingFile, data: Any) -> int:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(self, data)

        monkeypatch.setattr(storage.HashingFile, "write", write)

    return fill


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[str, Files], Path]:
    """Write a folder of files: tree("proj", {"a/b.py": "x = 1\\n"})."""

    def write(name: str, files: Files) -> Path:
        root = tmp_path / name
        for path, content in files.items():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.encode() if isinstance(content, str) else content)
        return root

    return write


@pytest.fixture(scope="session")
def smollm2_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pretrained SmolLM2-135M-Instruct that `lakh models get smollm2` downloads (Apache-2.0)."""
    file = tmp_path_factory.mktemp("smollm2") / "smollm2.gguf"
    try:
        pretrained.download(pretrained.find("smollm2"), file, timeout_s=120.0)
    except PeerError as error:
        pytest.skip(f"SmolLM2 cannot be downloaded: {error}")
    return file


@pytest.fixture(scope="module")
def s3():
    """A real S3 server (moto) on a port of its own."""
    moto = pytest.importorskip("moto.server", reason="S3 tests need moto and s3fs: pip install 'moto[server]' s3fs")
    pytest.importorskip("s3fs", reason="S3 tests need s3fs: pip install s3fs")
    import fsspec

    # fsspec keeps one instance per process, which knows the address of the server before this one.
    forget = fsspec.get_filesystem_class("s3").clear_instance_cache
    forget()
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    patch = pytest.MonkeyPatch()
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        patch.setenv(name, value)
    patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    fs = fsspec.filesystem("s3", skip_instance_cache=True)
    with contextlib.suppress(FileExistsError):  # the servers of one process share their buckets
        fs.mkdir("bucket")
    yield fs
    server.stop()
    patch.undo()
    forget()
