"""Chaos test: ranks that reduce together are killed, stopped and disconnected at random, and every sum is checked.

    lakh bench comm --chaos 200 --seed 0

Each run has 3 to 5 members of a ResilientGroup, on one host (shared memory) or, with root, on separate hosts (network
namespaces, TCP). Member m adds (m + 1) * step to every bucket, so the correct average over any set of members is known.
Problems are: a result that is not the average over the members of one epoch, two different results of one step among
members that continue, a member that neither continues nor ends in time, one that is declared dead although it was only
stopped, and leftover processes or files in /dev/shm. A problem is reported with the seed that reproduces it.

Members are forked from this process, which has imported torch and run nothing, so a member starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.comm.network_namespaces import NetworkNamespaces, unavailable_reason
from lakh.c3.directory_store import DirectoryStore
from lakh.c3.topology import Topology
from lakh.child_process import die_with_parent
from lakh.errors import LakhError, PeerError, PeerTimeout, UserError

__all__ = ["ChaosReport", "enter_namespace", "find_wrong_sums", "read_records", "run_chaos", "run_member"]

BUCKETS = (10, 20_000, 150_000)
SETTLE_S = 8.0
"""Longer than a loaded machine delays the registration of a live member; known dead members are not waited for."""
TIMEOUT_S = 60.0
"""Longer than any step of the test takes on a loaded machine."""
COMPUTE_S = 0.01
MAX_PROBLEMS = 5
CLONE_NEWNET = 0x40000000


@dataclass
class ChaosReport:
    faults: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    runs_over_tcp: int = 0
    steps: int = 0
    epochs: int = 0
    rejoined: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.faults.values())


def run_chaos(
    faults: int,
    seed: int = 0,
    *,
    namespaces: bool | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> ChaosReport:
    """Run with random faults until `faults` were injected. `namespaces`: separate hosts; None: if permitted."""
    import torch

    torch.set_num_threads(1)
    places = Topology(tuple((f"h{rank}", "", "") for rank in range(5)))
    permitted = not unavailable_reason(places) if namespaces is None else namespaces
    report, began_s, files_before = ChaosReport(), time.monotonic(), _shared_files()
    while report.total < faults and len(report.problems) < MAX_PROBLEMS:
        rng, before = random.Random(f"{seed}/{report.runs}"), len(report.problems)
        over_tcp = permitted and rng.random() < 0.5
        with tempfile.TemporaryDirectory(prefix="lakh-chaos-") as folder:
            run = _ChaosRun(rng, Path(folder), over_tcp)
            try:
                with run:
                    run.inject_faults(min(faults - report.total, rng.randint(2, 4)))
            except (LakhError, AssertionError) as error:
                report.problems.append(f"seed {seed}, run {report.runs}: {error}")
            wrong = find_wrong_sums(run.records(), run.size)
            report.problems += [f"seed {seed}, run {report.runs}: {what}" for what in wrong]
            for problem in report.problems[before:]:
                log(problem)
            report.faults += run.faults
            report.rejoined += run.rejoined
            report.steps += len(run.records("step"))
            report.epochs += len({record["number"] for record in run.records("epoch")})
        report.runs += 1
        report.runs_over_tcp += over_tcp
        log(f"run {report.runs}: {report.total} of {faults} faults, {len(report.problems)} problems")
    leftover = _shared_files() - files_before
    report.problems += [f"left in /dev/shm: {name}" for name in sorted(leftover) if "lakh" in name]
    report.seconds = time.monotonic() - began_s
    return report


def _shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def find_wrong_sums(records: list[dict[str, Any]], size: int) -> list[str]:
    """Errors in the results that the members recorded; each writes "done" when it ends normally.

    A lost member may have been the only one to pass a commit, if its last messages reached no other member; the others
    then repeat that step without it. So the last record of a lost member must be the average of an epoch, but need not
    equal the others' result.
    """
    last_record = {record["pid"]: record for record in records}
    by_step: dict[int, set[tuple[float, ...]]] = {}
    results: dict[tuple[int, tuple[float, ...]], None] = {}
    for record in records:
        if record["kind"] == "step":
            results[record["step"], tuple(record["values"])] = None
            if record is not last_record[record["pid"]]:
                by_step.setdefault(record["step"], set()).add(tuple(record["values"]))
    epochs = [tuple(range(size)), *(tuple(record["members"]) for record in records if record["kind"] == "epoch")]
    problems = [f"step {step}: members saw {sorted(seen)}" for step, seen in by_step.items() if len(seen) != 1]
    for step, values in results:
        possible = {sum(m + 1 for m in members) * step / len(members) for members in epochs}
        # sums of small integers are exact; the division rounds once
        if len(values) != 1 or not any(abs(values[0] - right) <= 1e-6 * abs(right) for right in possible):
            problems.append(f"step {step}: {values} is the average of no epoch ({sorted(possible)})")
    return problems


class _ChaosRun:
    """Some members, the faults injected into them, and the records they write."""

    def __init__(self, rng: random.Random, folder: Path, over_tcp: bool) -> None:
        self.rng, self.folder = rng, folder
        self.size = rng.randint(3, 5)
        self.topology = Topology(tuple((f"h{rank}", "", "") for rank in range(self.size)))
        self.over_tcp = over_tcp
        self.net: NetworkNamespaces | None = None
        self._stack = ExitStack()
        self.faults: Counter[str] = Counter()
        self.rejoined = 0
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._records: list[dict[str, Any]] = []

    def __enter__(self) -> _ChaosRun:
        if self.over_tcp:
            self.net = self._stack.enter_context(NetworkNamespaces(self.topology))
        return self

    def __exit__(self, *error: Any) -> None:
        for member in list(self._pids):
            self._kill(member)
        self.records()
        self._stack.close()

    def inject_faults(self, count: int) -> None:
        for member in range(self.size):
            self._start(member, rejoining=False)
        self._wait_until("all members are ready", lambda: len(self.records("ready")) == self.size)
        members = set(range(self.size))
        for _ in range(count):
            time.sleep(self.rng.random() * 0.3)
            kinds = ["kill", "kill", "stop"] + (["cut"] if self.over_tcp else [])
            kind = self.rng.choice(kinds if len(members) > 2 else ["stop"])
            victim = self.rng.choice(sorted(members))
            self.faults[kind] += 1
            before = len(self.records("epoch"))
            if kind == "stop":
                self._pause(victim, sorted(members), before)
                continue
            if kind == "kill":
                self._kill(victim)
            elif self.net is not None:
                self.net.disconnect(victim)
            members.discard(victim)
            self._wait_until(
                f"{sorted(members)} continue without {victim} ({kind})",
                partial(self._agreed_on, frozenset(members), before),
            )
            if kind == "cut":
                self._wait_until(f"the disconnected member {victim} ends", partial(self._has_ended, victim))
                code = self._codes[victim]
                assert code == PeerError.exit_code, f"the disconnected member {victim} ended with {code}"
            elif self.rng.random() < 0.5:
                self._start(victim, rejoining=True)
                members.add(victim)
                self._wait_until(f"member {victim} has rejoined", partial(self._has_stepped, victim))
                self.rejoined += 1
        if self.rng.random() < 0.2:
            return  # __exit__ kills all members at once
        (self.folder / "stop").touch()
        for member in sorted(members):
            self._wait_until(f"member {member} ends", partial(self._has_ended, member))
            assert self._codes[member] == 0, f"member {member} ended with {self._codes[member]}: {self._output(member)}"

    def _pause(self, victim: int, members: list[int], epochs_before: int) -> None:
        os.kill(self._pids[victim], signal.SIGSTOP)
        time.sleep(self.rng.random() * 2.0)
        os.kill(self._pids[victim], signal.SIGCONT)
        steps = len(self.records("step"))
        self._wait_until("members continue after a stop", lambda: len(self.records("step")) > steps + len(members))
        assert len(self.records("epoch")) == epochs_before, f"member {victim} was only stopped, but was declared dead"

    def _agreed_on(self, members: frozenset[int], epochs_before: int) -> bool:
        """Whether each of these members has entered an epoch of exactly these members."""
        epochs = self.records("epoch")[epochs_before:]
        return members <= {record["member"] for record in epochs if set(record["members"]) == members}

    def _has_stepped(self, member: int) -> bool:
        return any(r["member"] == member and r["pid"] == self._pids[member] for r in self.records("step"))

    # --- processes ---

    def _start(self, member: int, rejoining: bool) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self._pids[member] = pid
            self._codes.pop(member, None)
            return
        code = 1
        try:
            os.setsid()
            die_with_parent(parent, signal.SIGKILL)
            output = os.open(self.folder / f"output-{member}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if self.net is not None:
                enter_namespace(self.net.namespaces[self.topology.hosts[member]])
                os.environ["LAKH_C3_ADDRESS"] = self.net.address(member)
                os.environ["LAKH_C3_HOST"] = f"h{member}"
            code = run_member(self.folder, member, self.size, rejoining)
        except BaseException as error:  # noqa: BLE001 - the last frame of a forked process
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)

    def _has_ended(self, member: int) -> bool:
        if member in self._codes:
            return True
        pid, status = os.waitpid(self._pids[member], os.WNOHANG)
        if pid:
            self._codes[member] = os.waitstatus_to_exitcode(status)
        return bool(pid)

    def _kill(self, member: int) -> None:
        if not self._has_ended(member):
            os.kill(self._pids[member], signal.SIGKILL)
            _, status = os.waitpid(self._pids[member], 0)
            self._codes[member] = os.waitstatus_to_exitcode(status)

    # --- records ---

    def records(self, kind: str = "") -> list[dict[str, Any]]:
        if self.folder.exists():  # afterwards, the last content
            self._records = read_records(self.folder)
        return [record for record in self._records if not kind or record["kind"] == kind]

    def _output(self, member: int) -> str:
        path = self.folder / f"output-{member}"
        return path.read_text()[-300:] if path.exists() else ""

    def _wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + TIMEOUT_S
        while not condition():
            if time.monotonic() > end_s:
                outputs = {member: self._output(member) for member in range(self.size)}
                text = "; ".join(f"{member}: {output}" for member, output in outputs.items() if output)
                found = f"not within {TIMEOUT_S:g} s: {what} ({text})"
                raise PeerTimeout("c3 chaos test", found, "run this seed again")
            time.sleep(0.05)


def enter_namespace(namespace: str) -> None:
    """Move this process into a network namespace."""
    with Path(f"/run/netns/{namespace}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise UserError(namespace, os.strerror(ctypes.get_errno()), "run as root")


def run_member(
    folder: Path,
    member: int,
    size: int,
    rejoining: bool,
    *,
    steps: int = sys.maxsize,
    pause_s: float = COMPUTE_S,
    settle_s: float = SETTLE_S,
    timeout_s: float = TIMEOUT_S,
) -> int:
    """Be a member: reduce and record until the file `stop` exists, or for `steps`. Returns the exit code."""
    import torch

    from lakh.c3.faults.resilient import ResilientGroup

    with _record_writer(folder, member) as record:

        def on_epoch(epoch: Any) -> None:
            record("epoch", number=epoch.number, members=epoch.members, reason=epoch.reason)

        store = DirectoryStore(folder / "store", timeout_s)
        options: dict[str, Any] = {"timeout_s": timeout_s, "settle_s": settle_s, "on_epoch": on_epoch}
        try:
            if rejoining:
                group = ResilientGroup.rejoin(store, member, **options)
            else:
                group = ResilientGroup(store, member, size, **options)
            step_done = torch.zeros(1)
            if rejoining:
                group.synchronise([step_done])
            record("ready")
            ends = torch.zeros(1)
            while not int(ends):
                step = int(step_done) + 1
                buckets = [torch.full((count,), float((member + 1) * step)) for count in BUCKETS]
                for bucket in buckets:
                    group.all_reduce(bucket)
                ends = torch.tensor([float(step >= steps or (folder / "stop").exists())])
                group.all_reduce(ends, "max")
                changed = group.commit()
                samples = ((bucket, index) for bucket in buckets for index in (0, len(bucket) // 2, -1))
                values = sorted({float(bucket[index]) for bucket, index in samples})
                record("step", step=step, values=values, members=group.epoch.members)
                time.sleep(pause_s * random.random())  # ranks reach the next step at different times
                step_done += 1
                if changed:
                    group.synchronise([step_done])
            record("done")
            group.close()
        except LakhError as error:
            os.write(2, f"{error}\n".encode())
            return error.exit_code
    return 0


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The complete records of all members so far, in order of time."""
    lines = [line for path in folder.glob("records-*") for line in path.read_text().splitlines(keepends=True)]
    return sorted((json.loads(line) for line in lines if line.endswith("}\n")), key=lambda record: record["time_s"])


@contextmanager
def _record_writer(folder: Path, member: int) -> Iterator[Callable[..., None]]:
    """Records as lines of a file, one write each: a kill leaves at most half a line."""
    with (folder / f"records-{member}-{os.getpid()}").open("ab", buffering=0) as file:

        def record(kind: str, **fields: Any) -> None:
            document = {"kind": kind, "member": member, "pid": os.getpid(), "time_s": time.time(), **fields}
            file.write((json.dumps(document) + "\n").encode())

        yield record
