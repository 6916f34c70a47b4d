"""The checkpoints of a run: which there are, which are whole, and what they were made with. Reads no tensor.

A file whose size or hash is not that of the manifest is a CorruptCheckpoint; `newest_usable` then passes on to the one
before and says why.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lakh import storage
from lakh.checkpoint.format import Manifest, step_of
from lakh.errors import CorruptCheckpoint, DataError, LakhError, UserError
from lakh.spec import Run, load_run

__all__ = ["CHECKPOINTS", "corrupt", "find", "list_complete", "local_copy", "newest_usable", "read_run", "verify"]

CHECKPOINTS = "checkpoints"


def list_complete(run_dir: str | Path) -> list[tuple[int, str]]:
    """(step, folder) of every complete checkpoint of a run, oldest first."""
    base = storage.join(run_dir, CHECKPOINTS)
    found = [(step_of(name), storage.join(base, name)) for name in storage.list_dir(base)]
    return sorted((step, url) for step, url in found if step is not None and storage.is_complete(url))


def find(path: str | Path) -> str:
    """The checkpoint that a person means: a checkpoint's own folder, or the newest complete one of a run."""
    if storage.is_complete(path):
        return str(path)
    complete = list_complete(path)
    if complete:
        return complete[-1][1]
    found = "holds no complete checkpoint" if storage.exists(path) else "no such folder"
    raise UserError(str(path), found, "give a run's folder or a checkpoint's, or train first: lakh train")


def verify(folder: str, *, hashes: bool = True) -> Manifest:
    """Check that every file is there, whole and unchanged; returns the manifest."""
    manifest = Manifest.read(folder)
    for name, entry in manifest.files.items():
        url = storage.join(folder, name)
        if not storage.exists(url):
            raise corrupt(url, "is missing")
        if storage.is_local(url):
            size = storage.local_path(url).stat().st_size
            if size != entry["bytes"]:
                raise corrupt(url, f"has {size:,} bytes and should have {entry['bytes']:,}")
        if hashes and storage.sha256(url) != entry["sha256"]:
            raise corrupt(url, "does not match its hash")
    return manifest


def newest_usable(run_dir: str | Path) -> tuple[str | None, list[DataError]]:
    """The newest checkpoint that is whole, and the damaged ones that were passed over on the way."""
    passed: list[DataError] = []
    for _, folder in reversed(list_complete(run_dir)):
        try:
            verify(folder)
        except DataError as error:
            passed.append(error)
            continue
        return folder, passed
    return None, passed


def read_run(folder: str | Path) -> Run:
    """The settings that a checkpoint was saved with."""
    with local_copy(storage.join(folder, "run.toml")) as path:
        return load_run(path)


@contextlib.contextmanager
def local_copy(url: str) -> Iterator[str]:
    if storage.is_local(url):
        yield str(storage.local_path(url))
        return
    with tempfile.TemporaryDirectory(prefix="lakh-checkpoint-") as folder:
        path = Path(folder) / url.rpartition("/")[2]
        path.write_bytes(storage.read_bytes(url))
        yield str(path)


def corrupt(where: str, found: str) -> LakhError:
    return CorruptCheckpoint(where, found, "resume from an earlier checkpoint (lakh checkpoint list shows them)")
