"""The folder of a run, seen from outside: who is at work in it, and which settings it goes on with.

    RUN/lock        locked while anybody of the run lives; it says who took it
    RUN/run.toml    the settings that the run last started with

Whoever starts a run holds the lock and hands the open file on to the ranks that it starts, so that the folder stays
taken until the last of them has ended, however their launcher went; under other launchers rank 0 takes it. Settings are
written by rank 0 when everything was built from them and the checkpoint loaded: what was refused leaves no trace.

No torch here. Fails with UserError where the folder is on no disk of this machine, and with PeerTimeout where somebody
else is still at work there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from lakh import config, storage
from lakh.errors import PeerTimeout, UserError
from lakh.spec import Run

__all__ = ["RUN_FILE", "lock_run_folder", "record", "require_run", "with_absolute_paths"]

RUN_FILE = "run.toml"
LOCK_FILE = "lock"
LOCK_TIMEOUT_S = 5.0  # ranks whose launcher was killed still write their checkpoint
LOCK_POLL_S = 0.1
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what file systems without locks answer


@contextlib.contextmanager
def lock_run_folder(run_dir: str | Path, *, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[int]:
    """Be the only one at work in a run's folder; gives the descriptor that keeps it so in whoever inherits it."""
    folder = storage.local_path(run_dir)
    storage.make_dir(folder)
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise storage.explain(error, folder / LOCK_FILE) or error from None
    try:
        deadline_s = time.monotonic() + timeout_s
        while not _lock(descriptor):
            if time.monotonic() > deadline_s:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "somebody"
                todo = "wait until it has ended, or choose another folder"
                raise PeerTimeout(str(run_dir), f"{holder} is at work in it", todo)
            time.sleep(LOCK_POLL_S)
        os.ftruncate(descriptor, 0)
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name on it
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def require_run(run_dir: str | Path) -> None:
    """Refuse what is no folder of a run."""
    storage.require_folder(storage.local_path(run_dir), "give a run's folder")
    if not (storage.local_path(run_dir) / RUN_FILE).is_file():
        raise UserError(
            str(run_dir), f"has no {RUN_FILE}", "give a run's folder, or start one: lakh train RUN --out DIR"
        )


def record(run: Run, run_dir: str | Path) -> None:
    """Write the complete settings, where they are not what stands there."""
    url, text = storage.join(run_dir, RUN_FILE), config.to_toml(run).encode()
    if not storage.exists(url) or storage.read_bytes(url) != text:
        storage.write_bytes(url, text)


def with_absolute_paths(run: Run) -> Run:
    """A run must not depend on where it is resumed."""
    data = dataclasses.replace(
        run.data,
        tokens=_absolute(run.data.tokens),
        mixture=tuple(dataclasses.replace(it, tokens=_absolute(it.tokens)) for it in run.data.mixture),
    )
    return dataclasses.replace(run, data=data, init_from=_absolute(run.init_from) if run.init_from else "")


def _absolute(url: str) -> str:
    # Without "..", which ends with the folder it leads through; a link stays one, it may lead elsewhere tomorrow.
    return os.path.abspath(storage.local_path(url)) if storage.is_local(url) else url  # noqa: PTH100
