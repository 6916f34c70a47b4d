"""The folder of a fine-tuning: its lock, what it was made from, and its state after a failure.

    OUT/tune.lock      locked while the data is written, the model measured and the run trained
    OUT/sources.json   what the data was made from

A call that is refused removes what it wrote, so that the next one starts as if it had not been made. After an
interruption, and once the data is complete, the data stays for the next call; a run without a checkpoint never does.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence

from lakh import storage
from lakh.errors import DataError, Interrupted, UserError
from lakh.trainer import run_folder
from lakh.trainer.run_folder import has_checkpoints, lock_run_folder, refuse_other_files

__all__ = ["LOCK_FILE", "WRITTEN", "TuningFolder"]

LOCK_FILE = "tune.lock"
SOURCES = "sources.json"
WRITTEN = frozenset((LOCK_FILE, SOURCES, "corpus", "tokens", "reference.npz", "adapter", "report.json"))
"""What is in the folder beside the files of its run."""


class TuningFolder:
    def __init__(self, out: str) -> None:
        self.out = out
        self._kept = set(storage.list_dir(out))

    @staticmethod
    @contextlib.contextmanager
    def open(out: str, sources: Sequence[str]) -> Iterator[TuningFolder]:
        """Hold the lock inside the block. Raises UserError for a folder of other files, or of a run on other data."""
        is_ours = storage.exists(storage.join(out, LOCK_FILE))
        refuse_other_files(out, also_written=WRITTEN if is_ours else ())
        was_there = storage.exists(out)
        folder = TuningFolder(out)
        try:
            with lock_run_folder(out, file=LOCK_FILE):
                try:
                    _require_same(out, sources)
                    yield folder
                except (UserError, DataError):
                    folder._remove_new()
                    raise
                except (Interrupted, KeyboardInterrupt):
                    folder.keep_data()
                    folder._remove_new()
                    raise
        finally:
            if not was_there:
                with contextlib.suppress(OSError):  # it is not empty
                    storage.local_path(out).rmdir()

    def keep_data(self) -> None:
        """From here on only the files of the run are removed."""
        self._kept |= WRITTEN

    def _remove_new(self) -> None:
        """Remove what this call wrote, unless it is a run that can be continued."""
        if has_checkpoints(self.out):
            return
        for name in (WRITTEN | run_folder.WRITTEN) - self._kept:
            storage.remove_tree(storage.join(self.out, name))


def _require_same(out: str, sources: Sequence[str]) -> None:
    """A run has to be of the same sources: writing others would leave it without its data."""
    file = storage.join(out, SOURCES)
    wanted = [str(storage.real_path(one)) if storage.is_local(one) else one for one in sources]
    if has_checkpoints(out) and storage.exists(file):
        before = json.loads(storage.read_bytes(file))
        if before != wanted:
            found = f"holds a run on {', '.join(before)}, and this command has {', '.join(wanted)}"
            raise UserError(out, found, "continue it with its own data, or choose another --out")
    storage.write_bytes(file, json.dumps(wanted).encode())
