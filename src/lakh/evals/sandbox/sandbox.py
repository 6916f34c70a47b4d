"""Runs programs in isolation, on a pool of warm workers.

`Sandbox.choose()` tries the isolation backends in order of preference, each with a program that attempts to get out,
and raises if none holds: model-written code never runs unprotected unless `unsafe=True`. `description` names the
backend and goes into every result.

Safe to use from many threads; each program has a worker to itself. Disk traffic is limited only by the size of /tmp.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import TypeVar

from lakh.errors import Interrupted, UserError
from lakh.evals.sandbox import cgroup, packages
from lakh.evals.sandbox.backends import BACKENDS, HOST_BACKENDS, REMEDIES, make_backend
from lakh.evals.sandbox.backends.none import NoIsolation
from lakh.evals.sandbox.isolation import IsolationBackend
from lakh.evals.sandbox.packages import SandboxPackages
from lakh.evals.sandbox.program import CommandProgram, Program
from lakh.evals.sandbox.verdict import SandboxLimits, SandboxVerdict
from lakh.evals.sandbox.worker import SandboxWorker, WorkerIdle, WorkerLost, WorkerOutOfMemory

__all__ = ["Sandbox"]

# Of a program that passes its test:
CONTROLS_TO_FAIL = 3
REPEATS = 4
REPEATS_FOR_A_PASSED_CONTROL = 3
SELF_TEST_LIMITS = SandboxLimits(cpu_s=20, wall_s=120.0)  # takes 0.1 s; a machine may be a hundred times slower
UNSAFE_HINT = "or accept the risk with --unsafe"
Item = TypeVar("Item")
Output = TypeVar("Output")


class Sandbox:
    """Made by `choose`. Close it, or use it as a context manager, to stop what still runs."""

    def __init__(
        self, backend: IsolationBackend, groups: cgroup.ControlGroupParent | None = None,
        packages: SandboxPackages | None = None,
    ) -> None:  # fmt: skip
        """`packages` are those that the backend was made with."""
        self._backend, self._groups, self._packages = backend, groups, packages
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._idle: list[SandboxWorker] = []

    @staticmethod
    def choose(
        *, unsafe: bool = False, backend: str | None = None, workers: int = 1, package_names: Sequence[str] = ()
    ) -> Sandbox:
        """The strongest isolation that works here, or the backend of this name. UserError if none works.

        `unsafe` takes no isolation at all. With several workers, the others start while the first runs the self-test.
        Programs may import the standard library, and the installed packages of `package_names` with what these require.
        """
        allowed = packages.find(package_names) if package_names else None
        if unsafe:
            sandbox = Sandbox(NoIsolation(allowed), packages=allowed)
            verdict = sandbox.run(Program("", "assert True"))
            if not verdict.passed:
                raise UserError("unsafe run", f"cannot start Python ({verdict.detail})", "check the installation")
            return sandbox
        if not sys.platform.startswith("linux"):
            raise UserError("sandbox", f"there is none for {sys.platform}", f"run this on Linux, {UNSAFE_HINT}")
        refusals = []
        for name in BACKENDS if backend is None else (backend,):
            try:
                ahead = min(workers, os.cpu_count() or 1) - 1 if name == "bubblewrap" else 0
                groups = cgroup.find() if name in HOST_BACKENDS else None
                return Sandbox._tested(Sandbox(make_backend(name, allowed), groups, allowed), ahead)
            except UserError as error:
                refusals.append(error)
        todo = "; ".join(dict.fromkeys(error.todo for error in refusals))
        raise UserError("sandbox", "; ".join(error.found for error in refusals), f"{todo}, {UNSAFE_HINT}")

    @property
    def description(self) -> str:
        name, _, rest = self._backend.description.partition(" (")
        group = "" if self._groups is None else "+cgroup"
        return f"{name}{group} ({rest}" + (f" with {self._packages}" if self._packages else "")

    def run(self, program: Program | CommandProgram, limits: SandboxLimits | None = None) -> SandboxVerdict:
        """Run one program to its end. When this returns, nothing that the program started is left alive."""
        limits = limits or SandboxLimits()
        verdict = self._run_once(program, limits)
        if not verdict.passed or not isinstance(program, CommandProgram) or not program.controls:
            return verdict
        return self._recheck(program, limits) or verdict

    def _recheck(self, program: CommandProgram, limits: SandboxLimits) -> SandboxVerdict | None:
        """The verdict of a program that passed its test without regard for what it says; None if it looks honest.

        Runs with changed tests, which have to fail, and with parts of the test, which have to pass, come in an order
        that the program cannot know. One that passes by chance with probability p gets through with a probability of
        p^5 (1-p)^3 / (1-p^4)^3, which is below 1.6 % for every p.
        """
        controls, equals = iter(program.controls), itertools.cycle((*program.parts, program.files))
        needed, repeats, extra = min(CONTROLS_TO_FAIL, len(program.controls)), REPEATS, 0
        while needed + repeats + extra > 0:
            if secrets.randbelow(needed + repeats or 1) < needed:
                files = next(controls, None)
                if files is None:
                    found = "passes changed tests too: its result does not depend on the test"
                    return SandboxVerdict("failed", found)
                control = self._run_once(replace(program, files=files), limits)
                if control.kind == "sandbox_error":
                    return control
                needed -= not control.passed and control.compiled
                extra += REPEATS_FOR_A_PASSED_CONTROL * control.passed
                continue
            if repeats:
                repeats -= 1
            else:
                extra -= 1
            files = next(equals)
            again = self._run_once(replace(program, files=files), limits)
            if not again.passed and (again.compiled or files is program.files):
                return replace(again, detail=f"passed once and then not: {again.detail}")
        return None

    def _run_once(self, program: Program | CommandProgram, limits: SandboxLimits) -> SandboxVerdict:
        if isinstance(program, CommandProgram) and self._backend.no_commands:
            return SandboxVerdict("not_run", self._backend.no_commands)
        missing = set(program.packages) - set(self._packages.names if self._packages else ())
        if missing:
            return SandboxVerdict("not_run", f"needs --packages {','.join(sorted(missing))}")
        for _ in range(2):
            try:
                worker = self._acquire(limits, of_commands=isinstance(program, CommandProgram))
            except WorkerLost as error:
                return SandboxVerdict("sandbox_error", str(error))
            clean = False
            try:
                verdict, clean = worker.run(program, limits)
                return verdict
            except WorkerOutOfMemory as error:
                return SandboxVerdict("memory", str(error))
            except WorkerIdle as error:
                return SandboxVerdict("timeout", str(error))
            except WorkerLost as error:  # once may be an accident; twice is the program's doing
                reason = str(error)
            finally:
                self._release(worker, clean)
        return SandboxVerdict("failed", f"its sandbox ended with it, twice ({reason})")

    def map(
        self, function: Callable[[Item], Output], items: Iterable[Item], workers: int | None, *,
        progress: Callable[[int], None] | None = None, already_done: int = 0,
    ) -> list[Output]:  # fmt: skip
        """Call a function that runs programs, on threads. The results are in the order of the items.

        `progress` gets the number done so far, `already_done` included. An error or Ctrl-C stops the running programs.
        """
        pool = ThreadPoolExecutor(workers or os.cpu_count() or 1, thread_name_prefix="lakh-eval")
        try:
            futures = [pool.submit(function, item) for item in items]
            for done, future in enumerate(as_completed(futures), start=already_done + 1):
                future.result()
                if progress:
                    progress(done)
            return [future.result() for future in futures]
        except BaseException:
            self.stop()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def stop(self) -> None:
        """End every running program soon; later ones do not start."""
        self._stopping.set()
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.stop()

    def _acquire(self, limits: SandboxLimits, *, of_commands: bool) -> SandboxWorker:
        if self._stopping.is_set():
            raise Interrupted("sandbox", "stopped while a program was running", "run the same command again")
        with self._lock:
            for index, worker in enumerate(self._idle):
                if worker.fits(limits, of_commands=of_commands):
                    del self._idle[index]
                    return worker
        return self._start(limits, only_commands=of_commands and self._packages is not None)

    def _start(self, limits: SandboxLimits, *, only_commands: bool = False) -> SandboxWorker:
        return SandboxWorker(
            self._backend, limits, self._stopping, self._groups, has_packages=self._packages is not None,
            only_commands=only_commands,
        )  # fmt: skip

    def _release(self, worker: SandboxWorker, clean: bool) -> None:
        with self._lock:
            if clean and not self._stopping.is_set():
                self._idle.append(worker)
                return
        worker.close()

    def _start_ahead(self) -> None:
        """Start a worker before it is needed. If it cannot start, the first program that needs one reports that."""
        with contextlib.suppress(WorkerLost, Interrupted):
            self._release(self._start(SandboxLimits()), clean=True)

    @staticmethod
    def _tested(sandbox: Sandbox, ahead: int) -> Sandbox:
        """The sandbox, if its backend's self-test has passed."""
        backend = sandbox._backend
        program = Program(backend.probe(), "check()", names=("check",))
        others = [threading.Thread(target=sandbox._start_ahead, name="lakh-eval-start") for _ in range(ahead)]
        try:
            for thread in others:
                thread.start()
            verdict = sandbox.run(program, SELF_TEST_LIMITS)
        except BaseException:
            sandbox.stop()
            raise
        finally:
            for thread in others:
                thread.join()
        if verdict.passed:
            return sandbox
        sandbox.stop()
        name = backend.description.partition("+")[0]
        if verdict.kind == "sandbox_error" and "cannot import" in verdict.detail:
            todo = "check that it can be imported, and that its files are readable to all users"
            raise UserError("--packages", f"in the sandbox, {name} {verdict.detail}", todo)
        if verdict.kind == "sandbox_error":
            raise UserError("sandbox", f"{name} cannot start here ({verdict.detail})", REMEDIES[name])
        found = f"the self-test of {name} ended as {verdict.kind} ({verdict.detail})"
        raise UserError("sandbox", found, "report it with the output of lakh doctor")
