"""The checkpoint catalog of a run: list, find and verify checkpoints without reading tensors.

A file whose size or hash differs from the manifest raises CorruptCheckpoint; `newest_usable` skips such checkpoints.
All ranks of a run verify a checkpoint together: each reads an equal share of its chunks.
"""

from __future__ import annotations

import contextlib
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lakh import storage
from lakh.checkpoint.chunk_hashes import chunks_of, find_damage
from lakh.checkpoint.format import RESUME_EARLIER, Manifest, step_of
from lakh.errors import CorruptCheckpoint, DataError, LakhError, UserError
from lakh.spec import Run, load_run

__all__ = [
    "CHECKPOINTS",
    "base_folder",
    "check_sizes",
    "checkpoints_of",
    "corrupt",
    "find",
    "list_complete",
    "local_copy",
    "newest_usable",
    "read_run",
    "verify",
    "verify_chain",
]

CHECKPOINTS = "checkpoints"


def checkpoints_of(run_dir: str | Path) -> str:
    """The folder that holds the checkpoints of a run: its own, or the one that its checkpoint.url names."""
    settings = storage.join(run_dir, "run.toml")
    if storage.is_local(run_dir) and storage.exists(settings):
        with contextlib.suppress(ValueError, AttributeError):  # damaged settings are reported by those who need them
            url = tomllib.loads(storage.read_bytes(settings).decode()).get("checkpoint", {}).get("url")
            run_dir = url or run_dir
    return storage.join(run_dir, CHECKPOINTS)


def list_complete(run_dir: str | Path) -> list[tuple[int, str]]:
    """(step, folder) of every complete checkpoint of a run, oldest first."""
    base = checkpoints_of(run_dir)
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


def check_sizes(folder: str) -> Manifest:
    """Check the manifest, and that every file exists and has its size; returns the manifest."""
    manifest = Manifest.read(folder)
    for name in manifest.files:
        _check_size(folder, manifest, name)
    return manifest


def verify(folder: str, *, rank: int = 0, world: int = 1) -> Manifest:
    """Check that every file exists and matches its size and hashes; returns the manifest.

    Of `world` ranks, each reads its share of the chunks.
    """
    manifest = Manifest.read(folder)
    chunks = [chunk for name, file in sorted(manifest.files.items()) for chunk in chunks_of(name, file)]
    share = chunks[rank * len(chunks) // world : (rank + 1) * len(chunks) // world]
    for name in sorted({name for name, *_ in share}):
        _check_size(folder, manifest, name)
    damaged = find_damage(folder, share)
    if damaged is not None:
        name, start, size, _ = damaged
        raise corrupt(storage.join(folder, name), f"does not match its hash (bytes {start:,} to {start + size - 1:,})")
    return manifest


def verify_chain(folder: str, *, rank: int = 0, world: int = 1) -> Manifest:
    """Verify a checkpoint and those that it is relative to."""
    manifest = verify(folder, rank=rank, world=world)
    base = base_folder(folder, manifest)
    if base is not None:
        verify_chain(base, rank=rank, world=world)
    return manifest


def base_folder(folder: str, manifest: Manifest) -> str | None:
    """The folder of the checkpoint that `folder` is relative to. Raises CorruptCheckpoint if it was replaced."""
    if manifest.base is None:
        return None
    base = storage.join(folder.rstrip("/").rpartition("/")[0], manifest.base.folder)
    if not storage.is_complete(base) or Manifest.read(base).sha256 != manifest.base.sha256:
        raise corrupt(folder, f"its base {manifest.base.folder} is missing or was written again")
    return base


def _check_size(folder: str, manifest: Manifest, name: str) -> None:
    url, expected = storage.join(folder, name), manifest.files[name].bytes
    if not storage.exists(url):
        raise corrupt(url, "is missing")
    size = storage.size_of(url)
    if size != expected:
        raise corrupt(url, f"has {size:,} bytes instead of {expected:,}")


def newest_usable(
    run_dir: str | Path,
    *,
    rank: int = 0,
    world: int = 1,
    gather: Callable[[Any], list[Any] | None] = lambda value: [value],
    broadcast: Callable[[Any], Any] = lambda value: value,
) -> tuple[str | None, list[DataError]]:
    """The newest undamaged checkpoint that can resume, and the errors of the damaged ones that were skipped.

    With several ranks a collective: every rank verifies its share, and all get the same answer.
    """
    listed: list[tuple[int, str]] | LakhError | None = None
    if rank == 0:
        try:
            listed = list_complete(run_dir)
        except LakhError as error:  # every rank raises it, instead of waiting for this one
            listed = error
    listed = broadcast(listed)
    if isinstance(listed, LakhError):
        raise listed
    skipped: list[DataError] = []
    for _, folder in reversed(listed or []):
        failure: LakhError | None = None
        can_resume = True
        try:
            can_resume = Manifest.read(folder).can_resume
            if can_resume:
                verify_chain(folder, rank=rank, world=world)
        except LakhError as error:
            failure = error
        errors = [found for found in broadcast(gather(failure)) if found is not None]
        if not errors and can_resume:
            return folder, skipped
        if not errors:
            continue
        for found in errors:
            if not isinstance(found, DataError):
                raise found
        skipped.append(errors[0])
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
    return CorruptCheckpoint(where, found, RESUME_EARLIER)
