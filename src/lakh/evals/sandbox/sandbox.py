"""Runs programs in isolation, on a pool of warm workers.

`Sandbox.choose()` tries the isolation backends in order of preference, each with a program that attempts to get out,
and raises if none holds: model-written code never runs unprotected unless `unsafe=True`. `description` names the
backend and goes into every result.

Safe to use from many threads; each program has a worker to itself. Disk traffic is limited only by the size of /tmp.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import TypeVar

from lakh.errors import Interrupted, UserError
from lakh.evals.sandbox import cgroup
from lakh.evals.sandbox.backends import BACKENDS, HOST_BACKENDS, REMEDIES, make_backend
from lakh.evals.sandbox.backends.none import NoIsolation
from lakh.evals.sandbox.isolation import IsolationBackend
from lakh.evals.sandbox.program import CommandProgram, Program
from lakh.evals.sandbox.verdict import SandboxLimits, SandboxVerdict
from lakh.evals.sandbox.worker import SandboxWorker, WorkerLost, WorkerOutOfMemory

__all__ = ["Sandbox"]

UNSAFE_HINT = "or accept the risk with --unsafe"
Item = TypeVar("Item")
Output = TypeVar("Output")


class Sandbox:
    """Made by `choose`. Close it, or use it as a context manager, to stop what still runs."""

    def __init__(self, backend: IsolationBackend, groups: cgroup.ControlGroupParent | None = None) -> None:
        self._backend, self._groups = backend, groups
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._idle: list[SandboxWorker] = []

    @staticmethod
    def choose(*, unsafe: bool = False, backend: str | None = None, workers: int = 1) -> Sandbox:
        """The strongest isolation that works here, or the backend of this name. UserError if none works.

        `unsafe` takes no isolation at all. With several workers, the others start while the first runs the self-test.
        """
        if unsafe:
            sandbox = Sandbox(NoIsolation())
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
                return Sandbox._tested(make_backend(name), cgroup.find() if name in HOST_BACKENDS else None, ahead)
            except UserError as error:
                refusals.append(error)
        todo = "; ".join(dict.fromkeys(error.todo for error in refusals))
        raise UserError("sandbox", "; ".join(error.found for error in refusals), f"{todo}, {UNSAFE_HINT}")

    @property
    def description(self) -> str:
        if self._groups is None:
            return self._backend.description
        name, _, rest = self._backend.description.partition(" (")
        return f"{name}+cgroup ({rest}"

    def run(self, program: Program | CommandProgram, limits: SandboxLimits | None = None) -> SandboxVerdict:
        """Run one program to its end. When this returns, nothing that the program started is left alive."""
        limits = limits or SandboxLimits()
        verdict = self._run_once(program, limits)
        if not verdict.passed or not isinstance(program, CommandProgram) or not program.controls:
            return verdict
        for files in program.controls:
            control = self._run_once(replace(program, files=files), limits)
            if control.kind == "sandbox_error":
                return control
            if not control.passed and control.compiled:
                return verdict
        return replace(
            verdict, kind="failed", detail="passes changed tests too: its result does not depend on the test"
        )

    def _run_once(self, program: Program | CommandProgram, limits: SandboxLimits) -> SandboxVerdict:
        if isinstance(program, CommandProgram) and self._backend.no_commands:
            return SandboxVerdict("not_run", self._backend.no_commands)
        for _ in range(2):
            try:
                worker = self._acquire(limits)
            except WorkerLost as error:
                return SandboxVerdict("sandbox_error", str(error))
            clean = False
            try:
                verdict, clean = worker.run(program, limits)
                return verdict
            except WorkerOutOfMemory as error:
                return SandboxVerdict("memory", str(error))
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

    def _acquire(self, limits: SandboxLimits) -> SandboxWorker:
        if self._stopping.is_set():
            raise Interrupted("sandbox", "stopped while a program was running", "run the same command again")
        with self._lock:
            for index, worker in enumerate(self._idle):
                if worker.fits(limits):
                    del self._idle[index]
                    return worker
        return SandboxWorker(self._backend, limits, self._stopping, self._groups)

    def _release(self, worker: SandboxWorker, clean: bool) -> None:
        with self._lock:
            if clean and not self._stopping.is_set():
                self._idle.append(worker)
                return
        worker.close()

    def _start_ahead(self) -> None:
        """Start a worker before it is needed. If it cannot start, the first program that needs one reports that."""
        with contextlib.suppress(WorkerLost, Interrupted):
            self._release(SandboxWorker(self._backend, SandboxLimits(), self._stopping, self._groups), clean=True)

    @staticmethod
    def _tested(backend: IsolationBackend, groups: cgroup.ControlGroupParent | None, ahead: int) -> Sandbox:
        """A sandbox in which the backend's self-test has passed."""
        sandbox = Sandbox(backend, groups)
        program = Program(backend.probe(), "check()", names=("check",))
        others = [threading.Thread(target=sandbox._start_ahead, name="lakh-eval-start") for _ in range(ahead)]
        try:
            for thread in others:
                thread.start()
            verdict = sandbox.run(program, SandboxLimits(cpu_s=5, wall_s=30))
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
        if verdict.kind == "sandbox_error":
            raise UserError("sandbox", f"{name} cannot start here ({verdict.detail})", REMEDIES[name])
        found = f"the self-test of {name} ended as {verdict.kind} ({verdict.detail})"
        raise UserError("sandbox", found, "report it with the output of lakh doctor")
