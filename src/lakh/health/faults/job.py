"""A training job under test: `lakh train` as a process, its ranks, and the faults that are injected from outside.

kill           SIGKILL of one rank              kill-ranks    of all ranks and the process that forks them
stop           SIGSTOP of one rank for a while  kill-all      of everything; the job is then resumed
link-cut       all TCP connections of one rank are shut down
disk-full      the ranks cannot write files of the size of a checkpoint until one has failed
corrupt-chunk  one bit of the newest checkpoint flips, the copies in memory are removed, and all ranks are killed
s3-503, s3-slow, s3-reset    the object store fails or delays all requests until the run has reported it
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lakh import events, storage
from lakh.child_process import die_with_parent
from lakh.errors import DataError, LakhError, PeerTimeout, UserError, from_dict
from lakh.events import CheckpointFailed, StepDone, StorageDelayed
from lakh.health.faults.files import flip_bit
from lakh.health.faults.object_store import SLOW_DOWN, FaultyObjectStore, StoreFault
from lakh.health.faults.processes import cut_links, descendants, kill_all, limit_file_size
from lakh.spec import load_run

__all__ = ["JOB_FAULTS", "RUN_TIMEOUT_S", "STORE_FAULTS", "TrainingJob", "lakh_command", "object_store_of", "run_lakh"]

RUN_TIMEOUT_S = 1800.0
STOPPED_CODE = 75  # of a run that was asked to stop and has saved
FIRST_CHECKPOINT_TIMEOUT_S = 60.0
POLL_S = 0.05
STOPPED_S = 5.0
OUTAGE_S = 5.0  # of an object store, at least
LONGEST_OUTAGE_S = 60.0
DISK_FULL_S = 30.0  # at most
FILE_LIMIT_BYTES = 16 << 10  # less than any checkpoint has
STORE_FAULTS: Mapping[str, StoreFault] = {"s3-503": SLOW_DOWN, "s3-slow": "slow", "s3-reset": "reset"}
JOB_FAULTS = ("kill", "stop", "kill-ranks", "kill-all", "link-cut", "disk-full", "corrupt-chunk", *STORE_FAULTS)


class TrainingJob:
    """`with TrainingJob(["train", ...], run_dir, nproc=2) as job:` trains in a process of its own."""

    def __init__(
        self,
        arguments: Sequence[str],
        run_dir: Path,
        *,
        nproc: int,
        store: FaultyObjectStore | None = None,
        memory_dir: Path | None = None,
        environment: Mapping[str, str] | None = None,
        max_restarts: int = 1000,
    ) -> None:
        """`memory_dir`: where the run keeps its copies in memory; `environment`: more variables of the run."""
        self.run_dir, self.store, self._memory_dir = run_dir, store, memory_dir
        self._environment = {**os.environ, **(environment or {})}
        if memory_dir:
            self._environment["LAKH_MEMORY_DIR"] = str(memory_dir)
        if store:
            self._environment["AWS_ENDPOINT_URL"] = store.url
        self._options = ["--nproc", str(nproc), "--max-restarts", str(max_restarts)]
        self._process = self._start([*arguments, "--out", str(run_dir)])

    def __enter__(self) -> TrainingJob:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            kill_all(self._process.pid)
        self._process.wait()

    def _start(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            lakh_command([*arguments, *self._options]),
            stdout=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),  # a drill that is killed leaves no job behind
        )

    # --- state ---

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ranks(self) -> list[int]:
        """The process ids of the ranks: the launcher's grandchildren."""
        below = descendants(self._process.pid)
        servers = [pid for pid in below if _parent(pid) == self._process.pid]
        return [pid for pid in below if _parent(pid) in servers]

    def steps(self) -> list[StepDone]:
        return [event for event in events.read(self.run_dir, rank=0) if isinstance(event, StepDone)]

    def wait_for_step(self, step: int, *, after_s: float = 0.0) -> float:
        """When a step at least `step` was done after the time `after_s`; waits for it."""
        deadline_s = time.monotonic() + RUN_TIMEOUT_S
        while time.monotonic() < deadline_s:
            ended = self.has_ended
            done = [event.time_s for event in self.steps() if event.step >= step and event.time_s > after_s]
            if done:
                return min(done)
            if ended:
                where = f"the run in {self.run_dir}"
                raise UserError(where, f"ended before step {step}", "give it more steps (train.steps)")
            time.sleep(POLL_S)
        raise PeerTimeout(
            str(self.run_dir), f"step {step} was not done within {RUN_TIMEOUT_S:g} s", "use a smaller run"
        )

    def result(self) -> dict[str, Any]:
        """What the run reports at its end; waits for it. Raises the error that it reports."""
        return _read_result("train", *self._wait_for_end())

    def stop(self) -> None:
        """Ask the run to save a checkpoint and end, and wait for it. Raises the error of a run that failed."""
        self._process.send_signal(signal.SIGTERM)
        code, output = self._wait_for_end()
        if code != STOPPED_CODE:
            _read_result("train", code, output)

    def resume(self, arguments: Sequence[str] = ()) -> None:
        """Continue a run that has ended."""
        self._process = self._start(["resume", str(self.run_dir), *arguments])

    def _wait_for_end(self) -> tuple[int, bytes]:
        try:
            output, _ = self._process.communicate(timeout=RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            found = f"did not end within {RUN_TIMEOUT_S:g} s"
            raise PeerTimeout(str(self.run_dir), found, "use a run with fewer steps") from None
        return self._process.returncode, output

    # --- faults ---

    def inject(self, fault: str, dice: random.Random) -> float:
        """Inject a fault and return when. Faults that last are over when this returns."""
        faults: dict[str, Callable[[random.Random], None]] = {
            "kill": self._kill_rank,
            "stop": self._stop_rank,
            "kill-ranks": self._kill_ranks,
            "kill-all": self._kill_everything,
            "link-cut": self._cut_link,
            "disk-full": self._fill_disk,
            "corrupt-chunk": self._kill_ranks,
        }
        if fault in STORE_FAULTS:
            faults[fault] = lambda _: self._fail_store(STORE_FAULTS[fault])
        if fault not in faults:
            raise UserError(f"--fault {fault}", "no such fault", f"choose from: {', '.join(JOB_FAULTS)}")
        if fault == "corrupt-chunk":  # unnoticed until the ranks that are killed now restore it
            self._wait_for_checkpoint()
            self._signal_ranks(signal.SIGSTOP)  # so that no newer checkpoint is completed
            try:
                self._damage_newest_checkpoint(dice)
            except BaseException:
                self._signal_ranks(signal.SIGCONT)
                raise
        injected_s = time.time()
        faults[fault](dice)
        return injected_s

    def _kill_rank(self, dice: random.Random) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(dice.choice(self._require_ranks()), signal.SIGKILL)

    def _stop_rank(self, dice: random.Random) -> None:
        pid = dice.choice(self._require_ranks())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)

    def _signal_ranks(self, number: int) -> None:
        for pid in self.ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _kill_ranks(self, dice: random.Random) -> None:
        for pid in descendants(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _kill_everything(self, dice: random.Random) -> None:
        kill_all(self._process.pid)
        self._process.wait()
        self.resume()

    def _cut_link(self, dice: random.Random) -> None:
        if not cut_links(dice.choice(self._require_ranks())):
            found = "this rank has no TCP connection: the ranks of one machine share memory over c3"
            todo = "set LAKH_C3_HOST='host-{pid}', so that they connect over TCP, or train.backend = gloo"
            raise UserError("--fault link-cut", found, todo)

    def _fill_disk(self, dice: random.Random) -> None:
        """Ends as soon as a checkpoint has failed, so that the disk is full no longer than it takes to notice it."""
        began_s = time.time()
        deadline_s = time.monotonic() + DISK_FULL_S
        with limit_file_size(self._require_ranks(), self._file_limit()):
            while time.monotonic() < deadline_s and not self.has_ended and not self._has_failed_to_save(began_s):
                time.sleep(POLL_S)

    def _has_failed_to_save(self, after_s: float) -> bool:
        return self._has_reported(after_s, CheckpointFailed)

    def _has_reported(self, after_s: float, *kinds: type[events.Event]) -> bool:
        return any(isinstance(event, kinds) and event.time_s > after_s for event in events.read(self.run_dir))

    def _file_limit(self) -> int:
        """Enough for the events, which only grow by lines, and not for a checkpoint."""
        logs = [path.stat().st_size for path in self.run_dir.glob("events/*")]
        return max(logs, default=0) + FILE_LIMIT_BYTES

    def _checkpoints(self) -> list[str]:
        """The folders of the complete checkpoints, the newest one last."""
        folder = storage.join(load_run(self.run_dir).checkpoint.url or self.run_dir, "checkpoints")
        folders = [storage.join(folder, name) for name in storage.list_dir(folder)]
        return [one for one in folders if storage.is_complete(one)]

    def _wait_for_checkpoint(self) -> None:
        is_saving = load_run(self.run_dir).checkpoint.every > 0
        deadline_s = time.monotonic() + (FIRST_CHECKPOINT_TIMEOUT_S if is_saving else 0.0)
        while len(self._checkpoints()) < 2:  # one stays undamaged
            if time.monotonic() >= deadline_s or self.has_ended:
                raise UserError(
                    "--fault corrupt-chunk", "there are not two checkpoints, one of which stays", "set checkpoint.every"
                )
            time.sleep(POLL_S)

    def _damage_newest_checkpoint(self, dice: random.Random) -> None:
        newest = self._checkpoints()[-1]
        if self._memory_dir is not None:
            for copies in self._memory_dir.iterdir():
                shutil.rmtree(copies)
        chunks = [name for name in storage.list_dir(newest) if name.startswith("rank-")]
        flip_bit(storage.join(newest, dice.choice(chunks)), -1)

    def _fail_store(self, fault: StoreFault) -> None:
        if self.store is None:
            found = "the run does not write to an object store"
            raise UserError("--fault s3", found, "set checkpoint.url and AWS_ENDPOINT_URL")
        began_s, first_s = time.time(), time.monotonic()
        self.store.fault = lambda method, path: fault
        try:
            while time.monotonic() < first_s + LONGEST_OUTAGE_S and not self.has_ended:
                is_noticed = self._has_reported(began_s, StorageDelayed, CheckpointFailed)
                if is_noticed and time.monotonic() >= first_s + OUTAGE_S:
                    break
                time.sleep(POLL_S)
        finally:
            self.store.fault = lambda method, path: "pass"

    def _require_ranks(self) -> list[int]:
        found = self.ranks()
        if not found:
            raise DataError(str(self.run_dir), "no rank is running", "inject the fault after the first step")
        return found


@contextlib.contextmanager
def object_store_of(url: str) -> Iterator[FaultyObjectStore | None]:
    """A proxy in front of the object store that `url` and AWS_ENDPOINT_URL name; None for other storage."""
    target = os.environ.get("AWS_ENDPOINT_URL", "")
    if not url.startswith("s3://") or not target:
        yield None
        return
    store = FaultyObjectStore(target)
    try:
        yield store
    finally:
        store.close()


def lakh_command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "lakh", *arguments, "--json"]


def run_lakh(arguments: Sequence[str]) -> dict[str, Any]:
    """The JSON document that a command prints; raises the error that it reports."""
    try:
        done = subprocess.run(lakh_command(arguments), stdout=subprocess.PIPE, timeout=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        where = f"lakh {arguments[0]}"
        raise PeerTimeout(where, f"did not end within {RUN_TIMEOUT_S:g} s", "use a run with fewer steps") from None
    return _read_result(arguments[0], done.returncode, done.stdout)


def _read_result(command: str, code: int, output: bytes) -> dict[str, Any]:
    lines = output.decode(errors="replace").splitlines()
    document: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if code != 0:
        error = document.get("error")
        raise from_dict(error) if error else LakhError(f"lakh {command}", "failed", "see what it printed")
    return document


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
