"""A drill: ranks that reduce together are killed, stopped and cut off at random moments, and every sum is checked.

    lakh bench comm --chaos 200 --seed 0

Each run has 3 to 5 members of a ResilientGroup, on one host (shared memory) or, with root, on hosts of their own
(network namespaces, TCP). Member m adds (m + 1) * step to every bucket, so that the right average over any set of
members is known. Wrong are: a result that is not the average over the members of one epoch, two results of one step
among those who go on, a member that neither goes on nor ends in time, one that is declared dead while it was only
stopped, a process or a file in /dev/shm that is left behind. A problem is reported with the seed that brings it back.

Members are forked from this process, which has imported torch and run nothing: a member starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lakh.c3.directory_store import DirectoryStore
from lakh.c3.emulate import Namespaces, why_not
from lakh.c3.topology import Topology
from lakh.errors import LakhError, PeerTimeout, UserError

__all__ = ["Report", "drill", "wrong_sums"]

BUCKETS = (10, 20_000, 150_000)
SETTLE_S = 8.0
"""Longer than a loaded machine may keep a living member from signing up; who is known dead is not waited for."""
PATIENCE_S = 60.0
"""Longer than a loaded machine needs for anything that happens here."""
COMPUTE_S = 0.01
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1


@dataclass
class Report:
    """What was done to the ranks and what came of it."""

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


def drill(
    faults: int,
    seed: int = 0,
    *,
    namespaces: bool | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Runs with random faults until there were so many. `namespaces`: hosts of their own; None: where allowed."""
    import torch

    torch.set_num_threads(1)
    places = Topology(tuple((f"h{rank}", "", "") for rank in range(5)))
    allowed = not why_not(places) if namespaces is None else namespaces
    report, began_s, files_before = Report(), time.monotonic(), _shared_files()
    while report.total < faults and len(report.problems) < 5:
        dice, before = random.Random(f"{seed}/{report.runs}"), len(report.problems)
        over_tcp = allowed and dice.random() < 0.5
        with tempfile.TemporaryDirectory(prefix="lakh-chaos-") as folder:
            run = _Run(dice, Path(folder), over_tcp)
            try:
                with run:
                    run.play(min(faults - report.total, dice.randint(2, 4)))
            except (LakhError, AssertionError) as error:
                report.problems.append(f"seed {seed}, run {report.runs}: {error}")
            report.problems += [f"seed {seed}, run {report.runs}: {what}" for what in wrong_sums(run.facts(), run.size)]
            for problem in report.problems[before:]:
                say(problem)
            report.faults += run.faults
            report.rejoined += run.rejoined
            report.steps += len(run.facts("step"))
            report.epochs += len({fact["number"] for fact in run.facts("epoch")})
        report.runs += 1
        report.runs_over_tcp += over_tcp
        say(f"run {report.runs}: {report.total} of {faults} faults, {len(report.problems)} problems")
    left = _shared_files() - files_before
    report.problems += [f"left in /dev/shm: {name}" for name in sorted(left) if "lakh" in name]
    report.seconds = time.monotonic() - began_s
    return report


def _shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def wrong_sums(facts: list[dict[str, Any]], size: int) -> list[str]:
    """What is wrong with the results that the members saw; each says "done" when it ends well.

    One that is lost may have passed a commit as the only one, for what it sent last reached nobody: the others then do
    that step again without it. So the last word of one that was lost is the average of an epoch, but not theirs.
    """
    last_word = {fact["pid"]: fact for fact in facts}
    by_step: dict[int, set[tuple[float, ...]]] = {}
    results: dict[tuple[int, tuple[float, ...]], None] = {}
    for fact in facts:
        if fact["kind"] == "step":
            results[fact["step"], tuple(fact["values"])] = None
            if fact is not last_word[fact["pid"]]:
                by_step.setdefault(fact["step"], set()).add(tuple(fact["values"]))
    epochs = [tuple(range(size)), *(tuple(fact["members"]) for fact in facts if fact["kind"] == "epoch")]
    problems = [f"step {step}: members saw {sorted(seen)}" for step, seen in by_step.items() if len(seen) != 1]
    for step, values in results:
        possible = {sum(m + 1 for m in members) * step / len(members) for members in epochs}
        # sums of small integers are exact; the division rounds once
        if len(values) != 1 or not any(abs(values[0] - right) <= 1e-6 * abs(right) for right in possible):
            problems.append(f"step {step}: {values} is the average of no epoch ({sorted(possible)})")
    return problems


class _Run:
    """Some members, what is done to them, and what they said."""

    def __init__(self, dice: random.Random, folder: Path, over_tcp: bool) -> None:
        self.dice, self.folder = dice, folder
        self.size = dice.randint(3, 5)
        self.topology = Topology(tuple((f"h{rank}", "", "") for rank in range(self.size)))
        self.over_tcp = over_tcp
        self.net: Namespaces | None = None
        self._space = ExitStack()
        self.faults: Counter[str] = Counter()
        self.rejoined = 0
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._facts: list[dict[str, Any]] = []

    def __enter__(self) -> _Run:
        if self.over_tcp:
            self.net = self._space.enter_context(Namespaces(self.topology))
        return self

    def __exit__(self, *error: Any) -> None:
        for member in list(self._pids):
            self._end(member)
        self.facts()
        self._space.close()

    def play(self, blows: int) -> None:
        for member in range(self.size):
            self._start(member, rejoining=False)
        self._until("all members are ready", lambda: len(self.facts("ready")) == self.size)
        there = set(range(self.size))
        for _ in range(blows):
            time.sleep(self.dice.random() * 0.3)
            kinds = ["kill", "kill", "stop"] + (["cut"] if self.over_tcp else [])
            kind = self.dice.choice(kinds if len(there) > 2 else ["stop"])
            victim = self.dice.choice(sorted(there))
            self.faults[kind] += 1
            before = len(self.facts("epoch"))
            if kind == "stop":
                self._stop_for_a_while(victim, sorted(there), before)
                continue
            if kind == "kill":
                self._end(victim)
            elif self.net is not None:
                self.net.cut(victim)
            there.discard(victim)
            self._until(
                f"{sorted(there)} go on without {victim} ({kind})",
                partial(self._agreed_on, frozenset(there), before),
            )
            if kind == "cut":
                self._until(f"the cut off member {victim} ends", partial(self._has_ended, victim))
                assert self._codes[victim] == 75, f"the cut off member {victim} ended with {self._codes[victim]}"
            elif self.dice.random() < 0.5:
                self._start(victim, rejoining=True)
                there.add(victim)
                self._until(f"member {victim} is back", partial(self._reported_since, victim))
                self.rejoined += 1
        if self.dice.random() < 0.2:
            return  # all are killed at once
        (self.folder / "stop").touch()
        for member in sorted(there):
            self._until(f"member {member} ends", partial(self._has_ended, member))
            assert self._codes[member] == 0, f"member {member} ended with {self._codes[member]}: {self._said(member)}"

    def _stop_for_a_while(self, victim: int, there: list[int], epochs_before: int) -> None:
        os.kill(self._pids[victim], signal.SIGSTOP)
        time.sleep(self.dice.random() * 2.0)
        os.kill(self._pids[victim], signal.SIGCONT)
        steps = len(self.facts("step"))
        self._until("they go on after a stop", lambda: len(self.facts("step")) > steps + len(there))
        assert len(self.facts("epoch")) == epochs_before, f"member {victim} was only stopped, and was given up"

    def _agreed_on(self, members: frozenset[int], epochs_before: int) -> bool:
        """Whether each of these members has entered an epoch of just these members."""
        epochs = self.facts("epoch")[epochs_before:]
        return members <= {fact["member"] for fact in epochs if set(fact["members"]) == members}

    def _reported_since(self, member: int) -> bool:
        return any(f["member"] == member and f["pid"] == self._pids[member] for f in self.facts("step"))

    # --- processes ---

    def _start(self, member: int, rejoining: bool) -> None:
        pid = os.fork()
        if pid:
            self._pids[member] = pid
            self._codes.pop(member, None)
            return
        code = 1
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # nobody outlives the drill
            words = os.open(self.folder / f"said-{member}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(words, 1)
            os.dup2(words, 2)
            if self.net is not None:
                _enter(self.net.namespaces[self.topology.hosts[member]])
                os.environ["LAKH_C3_ADDRESS"] = self.net.address(member)
                os.environ["LAKH_C3_HOST"] = f"h{member}"
            code = _be_a_member(self.folder, member, self.size, rejoining)
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

    def _end(self, member: int) -> None:
        if not self._has_ended(member):
            os.kill(self._pids[member], signal.SIGKILL)
            _, status = os.waitpid(self._pids[member], 0)
            self._codes[member] = os.waitstatus_to_exitcode(status)

    # --- words ---

    def facts(self, kind: str = "") -> list[dict[str, Any]]:
        if self.folder.exists():  # afterwards, what was read last
            self._facts = []
            for path in sorted(self.folder.glob("facts-*")):
                lines = path.read_text().splitlines(keepends=True)
                self._facts += [json.loads(line) for line in lines if line.endswith("}\n")]
            self._facts.sort(key=lambda fact: fact["time_s"])
        return [fact for fact in self._facts if not kind or fact["kind"] == kind]

    def _said(self, member: int) -> str:
        path = self.folder / f"said-{member}"
        return path.read_text()[-300:] if path.exists() else ""

    def _until(self, what: str, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > end_s:
                words = "; ".join(
                    f"{member}: {self._said(member)}" for member in range(self.size) if self._said(member)
                )
                raise PeerTimeout("c3 drill", f"not within {PATIENCE_S:g} s: {what} ({words})", "run this seed again")
            time.sleep(0.05)


def _enter(namespace: str) -> None:
    with Path(f"/run/netns/{namespace}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise UserError(namespace, os.strerror(ctypes.get_errno()), "run as root")


def _be_a_member(folder: Path, member: int, size: int, rejoining: bool) -> int:
    import torch

    from lakh.c3.resilient import ResilientGroup

    with _telling(folder, member) as say:

        def on_epoch(epoch: Any) -> None:
            say("epoch", number=epoch.number, members=epoch.members, reason=epoch.reason)

        store = DirectoryStore(folder / "store", PATIENCE_S)
        options: dict[str, Any] = {"timeout_s": PATIENCE_S, "settle_s": SETTLE_S, "on_epoch": on_epoch}
        try:
            if rejoining:
                group = ResilientGroup.rejoin(store, member, **options)
            else:
                group = ResilientGroup(store, member, size, **options)
            step_done = torch.zeros(1)
            if rejoining:
                group.synchronise([step_done])
            say("ready")
            ends = torch.zeros(1)
            while not int(ends):
                step = int(step_done) + 1
                buckets = [torch.full((count,), float((member + 1) * step)) for count in BUCKETS]
                for bucket in buckets:
                    group.all_reduce(bucket)
                ends = torch.tensor([float((folder / "stop").exists())])
                group.all_reduce(ends, "max")
                changed = group.commit()
                places = ((bucket, place) for bucket in buckets for place in (0, len(bucket) // 2, -1))
                values = sorted({float(bucket[place]) for bucket, place in places})
                say("step", step=step, values=values)
                time.sleep(COMPUTE_S * random.random())  # ranks come late to the next one, each by another time
                step_done += 1
                if changed:
                    group.synchronise([step_done])
            say("done")
            group.close()
        except LakhError as error:
            os.write(2, f"{error}\n".encode())
            return error.exit_code
    return 0


@contextmanager
def _telling(folder: Path, member: int) -> Iterator[Callable[..., None]]:
    """Facts as lines of a file of our own, one write each: a kill leaves at most half a line."""
    with (folder / f"facts-{member}-{os.getpid()}").open("ab", buffering=0) as file:

        def say(kind: str, **fact: Any) -> None:
            whole = {"kind": kind, "member": member, "pid": os.getpid(), "time_s": time.time(), **fact}
            file.write((json.dumps(whole) + "\n").encode())

        yield say
