"""The checkpoint catalog of a run: list, find and verify checkpoints without reading tensors.

A file whose size or hash differs from the manifest raises CorruptCheckpoint; `newest_usable` skips such checkpoints.
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
    """The checkpoint at `path`: a checkpoint's folder itself, or the newest complete checkpoint of a run."""
    if storage.is_complete(path):
        return str(path)
    complete = list_complete(path)
    if complete:
        return complete[-1][1]
    found = "holds no complete checkpoint" if storage.exists(path) else "no such folder"
    raise UserError(str(path), found, "give the folder of a run or checkpoint, or train first: lakh train")


def verify(folder: str) -> Manifest:
    """Check that every file exists and matches its size and hash; returns the manifest."""
    manifest = Manifest.read(folder)
    for name, entry in manifest.files.items():
        url = storage.join(folder, name)
        if not storage.exists(url):
            raise corrupt(url, "is missing")
        if storage.is_local(url):
            size = storage.local_path(url).stat().st_size
            if size != entry["bytes"]:
                raise corrupt(url, f"has {size:,} bytes instead of {entry['bytes']:,}")
        if storage.sha256(url) != entry["sha256"]:
            raise corrupt(url, "does not match its hash")
    return manifest


def newest_usable(run_dir: str | Path) -> tuple[str | None, list[DataError]]:
    """The newest undamaged checkpoint, and the errors of the damaged ones that were skipped."""
    skipped: list[DataError] = []
    for _, folder in reversed(list_complete(run_dir)):
        try:
            verify(folder)
        except DataError as error:
            skipped.append(error)
            continue
        return folder, skipped
    return None, skipped


def read_run(folder: str | Path) -> Run:
    """The settings of the run at the time of the checkpoint."""
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
