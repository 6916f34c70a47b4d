"""The folder of a run: its lock and its settings file.

    RUN/lock        locked while any process of the run is alive; names its owner (tune.lock: the same of lakh tune)
    RUN/run.toml    the settings that the run last started with
    RUN/id          a random name of this run, which its copies in memory carry
    RUN/rendezvous  where its ranks on this machine meet, for replicas that join it (`lakh join`)
    RUN/logs ...    what else its ranks write before the first checkpoint (WRITTEN)

The launcher holds the lock and passes the open file on to its ranks, so that the folder stays locked until the last of
them has ended; under other launchers rank 0 takes the lock. Rank 0 writes the settings after everything was built and
the checkpoint was loaded, so that rejected settings are not recorded.

Independent of torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from lakh import config, storage
from lakh.errors import LakhError, PeerTimeout, UserError
from lakh.spec import Run
from lakh.spec.embedding import SYNTHETIC

__all__ = [
    "RUN_FILE",
    "find_rendezvous",
    "has_checkpoints",
    "lock_run_folder",
    "publish_rendezvous",
    "read_run_id",
    "refuse_other_files",
    "require_run",
    "with_absolute_paths",
    "write_settings",
]

RUN_FILE = "run.toml"
LOCK_FILE = "lock"
RENDEZVOUS_FILE = "rendezvous"
ID_FILE = "id"
CHECKPOINTS = "checkpoints"
WRITTEN = frozenset(
    f"{RUN_FILE} {LOCK_FILE} {RENDEZVOUS_FILE} {ID_FILE} {CHECKPOINTS} logs events tensorboard wandb mlflow "
    "prometheus.json tags.json evals".split()
)
"""What lakh may have written in the folder of a run that has no checkpoint yet."""
HARMLESS = frozenset(("lost+found", ".DS_Store", ".gitkeep"))  # an empty disk; an empty folder
MAX_NAMED = 3
LOCK_TIMEOUT_S = 5.0  # ranks of a killed launcher still write their checkpoint
LOCK_POLL_S = 0.1
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems without locks


@contextlib.contextmanager
def lock_run_folder(run_dir: str | Path, *, file: str = LOCK_FILE, timeout_s: float | None = None) -> Iterator[int]:
    """Hold the exclusive lock of a run's folder; yields the descriptor, which child processes can inherit."""
    folder = storage.local_path(run_dir)
    storage.make_dir(folder)
    try:
        descriptor = os.open(folder / file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise storage.explain(error, folder / file) or error from None
    try:
        deadline_s = time.monotonic() + (LOCK_TIMEOUT_S if timeout_s is None else timeout_s)
        while not _lock(descriptor):
            if time.monotonic() > deadline_s:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
                todo = "wait until it ends, or choose another folder"
                raise PeerTimeout(str(run_dir), f"{holder} is using it", todo)
            time.sleep(LOCK_POLL_S)
        os.ftruncate(descriptor, 0)
        with contextlib.suppress(OSError):  # a full disk: the lock works without the name
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


def read_run_id(run_dir: str | Path) -> str:
    """The name of the run; made on the first call."""
    url = storage.join(run_dir, ID_FILE)
    if not storage.exists(url):
        storage.write_bytes(url, secrets.token_hex(16).encode())
    return storage.read_bytes(url).decode(errors="replace")


def publish_rendezvous(run_dir: str | Path, path: Path, ranks: int) -> None:
    """Write where the ranks of the run meet. `path` disappears with the launcher."""
    document = {"path": str(path), "ranks": ranks, "host": socket.gethostname()}
    storage.write_bytes(storage.join(run_dir, RENDEZVOUS_FILE), json.dumps(document).encode())


def find_rendezvous(run_dir: str | Path) -> tuple[Path, int]:
    """(where the ranks of a run on this machine meet, how many it started with). Raises UserError if it does not
    train."""
    not_running = UserError(str(run_dir), "does not train on this machine", f"start it with: lakh resume {run_dir}")
    try:
        found = json.loads(storage.read_bytes(storage.join(run_dir, RENDEZVOUS_FILE)))
        path, ranks, host = Path(found["path"]), int(found["ranks"]), found["host"]
    except (LakhError, OSError, ValueError, KeyError, TypeError):
        raise not_running from None
    if host != socket.gethostname() or not path.parent.is_dir():
        raise not_running
    return path, ranks


def require_run(run_dir: str | Path) -> None:
    """Raise UserError unless `run_dir` is the folder of a run."""
    storage.require_folder(storage.local_path(run_dir), "give the folder of a run")
    if not (storage.local_path(run_dir) / RUN_FILE).is_file():
        raise UserError(
            str(run_dir), f"has no {RUN_FILE}", "give the folder of a run, or start one: lakh train RUN --out DIR"
        )


def has_checkpoints(run_dir: str | Path) -> bool:
    """Whether a run in this folder has saved something."""
    return bool(storage.list_dir(storage.join(run_dir, CHECKPOINTS)))


def refuse_other_files(run_dir: str | Path, *, also_written: Collection[str] = ()) -> None:
    """Raise UserError if a new run would write among files that are not of a run, or replace a settings file.

    A folder with what lakh itself wrote (WRITTEN, `also_written`) for a run without a checkpoint is taken again.
    """
    if has_checkpoints(run_dir):
        return
    names = set(storage.list_dir(run_dir))
    if RUN_FILE in names and names.isdisjoint((LOCK_FILE, CHECKPOINTS, *also_written)):
        found = "is not of a run, and a run in this folder would replace it"
        raise UserError(str(storage.join(run_dir, RUN_FILE)), found, "move it, or choose another --out")
    others = sorted(name for name in names - WRITTEN - HARMLESS - set(also_written) if not name.endswith(storage.PART))
    if others:
        more = f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
        found = f"holds other files ({', '.join(others[:MAX_NAMED])}{more})"
        raise UserError(str(run_dir), found, "choose another --out: a run needs a folder of its own")


def write_settings(run: Run, run_dir: str | Path) -> None:
    """Write the complete settings, if they changed."""
    url, text = storage.join(run_dir, RUN_FILE), config.to_toml(run).encode()
    if not storage.exists(url) or storage.read_bytes(url) != text:
        storage.write_bytes(url, text)


def with_absolute_paths(run: Run) -> Run:
    """The run with absolute paths, so that it can be resumed from any folder."""
    data = dataclasses.replace(
        run.data,
        tokens=_absolute(run.data.tokens),
        mixture=tuple(dataclasses.replace(it, tokens=_absolute(it.tokens)) for it in run.data.mixture),
    )
    dlrm = run.dlrm
    if dlrm.dataset != SYNTHETIC:
        dlrm = dataclasses.replace(dlrm, dataset=_absolute(dlrm.dataset))
    if folder := dlrm.memory.folder:
        dlrm = dataclasses.replace(dlrm, memory=dataclasses.replace(dlrm.memory, folder=_absolute(folder)))
    init_from = _absolute(run.init_from) if run.init_from else ""
    return dataclasses.replace(run, data=data, dlrm=dlrm, init_from=init_from)


def _absolute(url: str) -> str:
    # Removes ".." and keeps symbolic links, which may change their target.
    return os.path.abspath(storage.local_path(url)) if storage.is_local(url) else url  # noqa: PTH100
