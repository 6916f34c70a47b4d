"""A local copy of runs in an object store, for the dashboard: events, settings, tags and scores, but no checkpoints.

    with RunMirror("s3://bucket/runs") as mirror:
        RunCollection(str(mirror.folder), label=mirror.url)

Objects are listed again every REFRESH_S seconds. Of events that grew only the new part is read.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from types import TracebackType

from lakh import storage
from lakh.errors import LakhError, UserError
from lakh.events.log import FOLDER
from lakh.storage import ObjectInfo

__all__ = ["RunMirror"]

REFRESH_S = 10.0
STOP_TIMEOUT_S = 30.0
MAX_FILES = 20_000
MAX_FILE_BYTES = 64 << 20  # of files that are not events
COMPARED_BYTES = 256  # at the end of the copy: a run that was started again has other events
SKIPPED_NAMES = frozenset({"checkpoints", "logs", "tensorboard", "wandb", "mlflow"})


class RunMirror:
    def __init__(self, url: str, *, on_error: Callable[[LakhError], None] = lambda error: None) -> None:
        """`on_error` is told of a refresh that failed; the next one tries again."""
        self.url = url.rstrip("/")
        self._on_error = on_error
        self._temporary = tempfile.TemporaryDirectory(prefix="lakh-runs-")
        self.folder = Path(self._temporary.name) / (PurePosixPath(self.url).name or "runs")
        self._copied: dict[str, ObjectInfo] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._refresh_until_ended, name="lakh-run-mirror", daemon=True)

    def __enter__(self) -> RunMirror:
        """Copy everything once, then keep it up to date in a thread."""
        try:
            self.refresh()
        except BaseException:
            self._temporary.cleanup()
            raise
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(STOP_TIMEOUT_S)
        self._temporary.cleanup()

    def refresh(self) -> int:
        """Copy what is new or changed, remove what is gone; the number of files that were copied."""
        found = {name: file for name, file in storage.find_files(self.url).items() if _is_wanted(name, file)}
        if not found:
            todo = "give the URL of a run's folder, or of one that holds runs; checkpoints alone are no run"
            raise UserError(self.url, "holds no events of runs", todo)
        if len(found) > MAX_FILES:
            raise UserError(
                self.url, f"holds {len(found):,} files of runs", f"give a folder with at most {MAX_FILES:,}"
            )
        changed = [name for name, file in found.items() if self._copied.get(name) != file]
        with ThreadPoolExecutor(storage.RANGE_THREADS, thread_name_prefix="lakh-mirror") as threads:
            list(threads.map(lambda name: self._copy(name, found[name]), changed))
        for name in self._copied.keys() - found.keys():
            (self.folder / name).unlink(missing_ok=True)
        self._copied = found
        return len(changed)

    def _copy(self, name: str, file: ObjectInfo) -> None:
        here, there = self.folder / name, storage.join(self.url, name)
        here.parent.mkdir(parents=True, exist_ok=True)
        have = here.stat().st_size if here.exists() else 0
        if _is_events(name) and 0 < have < file.size_bytes:
            start = max(0, have - COMPARED_BYTES)
            new = storage.read_range(there, start, file.size_bytes - start)
            with here.open("rb+") as copy:
                copy.seek(start)
                if copy.read() == new[: have - start]:
                    copy.write(new[have - start :])
                    return
        storage.write_bytes(here, storage.read_range(there, 0, file.size_bytes) if file.size_bytes else b"")

    def _refresh_until_ended(self) -> None:
        while not self._ended.wait(REFRESH_S):
            try:
                self.refresh()
            except LakhError as error:
                self._on_error(error)


def _is_events(name: str) -> bool:
    return FOLDER in PurePosixPath(name).parts[:-1]


def _is_wanted(name: str, file: ObjectInfo) -> bool:
    """Names come from the store: none may lead out of the folder of the copy."""
    parts = PurePosixPath(name).parts
    is_safe = bool(parts) and not name.startswith("/") and ".." not in parts and "\\" not in name and "\0" not in name
    is_skipped = bool(SKIPPED_NAMES & set(parts[:-1])) or any(part.startswith(".") for part in parts)
    return is_safe and not is_skipped and (_is_events(name) or file.size_bytes <= MAX_FILE_BYTES)
