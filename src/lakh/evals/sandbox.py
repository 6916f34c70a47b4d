"""Runs programs behind walls and says how each ended.

`Sandbox.choose()` goes down the ladder of walls.py, tries each rung on a program that attempts to get out, and refuses
to go on where none holds: code that a model wrote never runs unprotected unless `unsafe=True` says so. What was chosen
is in `description`, which goes into every result.

The CPU limit is the real one: it gives the same verdict on a slow, loaded machine as on a fast one. The wall limit is a
generous backstop for programs that sleep.

Each process has its memory limit from the kernel; all of a program together may hold twice that, which a control group
holds where we may make one (cgroup.py), and which is looked at five times a second elsewhere (resident.py). Disk
traffic is not limited, beyond the size of /tmp.

Knows nothing of benchmarks or models. Safe to use from many threads; each gets a cell of its own while it runs a
program.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading

from lakh.errors import Interrupted, UserError
from lakh.evals import bubblewrap, cgroup
from lakh.evals.cell import Cell, CellLost, CellTooLarge
from lakh.evals.task import Commands, Program
from lakh.evals.verdict import Kind, Limits, Verdict
from lakh.evals.walls import NoWalls, Walls

__all__ = ["RUNGS", "Kind", "Limits", "Sandbox", "Verdict"]

IMAGE_REMEDY = "pull that image with docker or podman, or name one that is there in LAKH_EVAL_IMAGE"
UNSAFE_HINT = "or accept the risk with --unsafe"
HOST_RUNGS = ("bubblewrap", "landlock")  # containers have their own control group
RUNGS = ("bubblewrap", "landlock", "gvisor", "docker")


class Sandbox:
    """Made by `choose`. Close it, or use it as a context manager, to stop what still runs."""

    def __init__(self, walls: Walls, groups: cgroup.Tree | None = None) -> None:
        self._walls, self._groups = walls, groups
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._idle: list[Cell] = []

    @staticmethod
    def choose(*, unsafe: bool = False, rung: str | None = None, workers: int = 1) -> Sandbox:
        """The strongest walls that hold on this machine, or those of `rung`; an error where none do.

        `unsafe` takes no walls at all. For several workers, their cells are started while the first is tried.
        """
        if unsafe:
            sandbox = Sandbox(NoWalls())
            verdict = sandbox.run(Program("", "assert True"))
            if not verdict.passed:
                raise UserError("unsafe run", f"cannot start Python ({verdict.detail})", "check the installation")
            return sandbox
        if not sys.platform.startswith("linux"):
            raise UserError("sandbox", f"there is none for {sys.platform}", f"run this on Linux, {UNSAFE_HINT}")
        refusals = []
        for name in RUNGS if rung is None else (rung,):
            try:
                ahead = min(workers, os.cpu_count() or 1) - 1 if name == "bubblewrap" else 0
                return Sandbox._prove(_walls(name), cgroup.find() if name in HOST_RUNGS else None, ahead)
            except UserError as error:
                refusals.append(error)
        todo = "; ".join(dict.fromkeys(error.todo for error in refusals))
        raise UserError("sandbox", "; ".join(error.found for error in refusals), f"{todo}, {UNSAFE_HINT}")

    @property
    def description(self) -> str:
        if self._groups is None:
            return self._walls.description
        walls, _, rest = self._walls.description.partition(" (")
        return f"{walls}+cgroup ({rest}"

    def run(self, program: Program | Commands, limits: Limits | None = None) -> Verdict:
        """Run one program to its end. When this returns, nothing that the program started is left alive."""
        limits = limits or Limits()
        if isinstance(program, Commands) and self._walls.no_commands:
            return Verdict("not_run", self._walls.no_commands)
        for _ in range(2):
            try:
                cell = self._take(limits)
            except CellLost as error:
                return Verdict("sandbox_error", str(error))
            clean = False
            try:
                verdict, clean = cell.run(program, limits)
                return verdict
            except CellTooLarge as error:
                return Verdict("memory", str(error))
            except CellLost as error:  # by accident once, by this program's doing twice
                lost = str(error)
            finally:
                self._give(cell, clean)
        return Verdict("failed", f"its sandbox ended with it, twice ({lost})")

    def stop(self) -> None:
        """End every program that still runs, soon; later ones do not start."""
        self._stopping.set()
        with self._lock:
            idle, self._idle = self._idle, []
        for cell in idle:
            cell.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.stop()

    def _take(self, limits: Limits) -> Cell:
        if self._stopping.is_set():
            raise Interrupted("sandbox", "stopped while a program was running", "run the same command again")
        with self._lock:
            for index, cell in enumerate(self._idle):
                if cell.fits(limits):
                    del self._idle[index]
                    return cell
        return Cell(self._walls, limits, self._stopping, self._groups)

    def _start_ahead(self) -> None:
        """A cell that nobody waits for yet. One that cannot start says so to whoever needs it."""
        with contextlib.suppress(CellLost, Interrupted):
            self._give(Cell(self._walls, Limits(), self._stopping, self._groups), clean=True)

    def _give(self, cell: Cell, clean: bool) -> None:
        with self._lock:
            if clean and not self._stopping.is_set():
                self._idle.append(cell)
                return
        cell.close()

    @staticmethod
    def _prove(walls: Walls, groups: cgroup.Tree | None, ahead: int) -> Sandbox:
        """Run a program that tries the walls; it passes only where all of them hold."""
        sandbox = Sandbox(walls, groups)
        program = Program(walls.probe(), "check()", names=("check",))
        others = [threading.Thread(target=sandbox._start_ahead, name="lakh-eval-start") for _ in range(ahead)]
        try:
            for thread in others:
                thread.start()
            verdict = sandbox.run(program, Limits(cpu_s=5, wall_s=30))
        except BaseException:
            sandbox.stop()
            raise
        finally:
            for thread in others:
                thread.join()
        if verdict.passed:
            return sandbox
        sandbox.stop()
        name = walls.description.partition("+")[0]
        if verdict.kind == "sandbox_error":
            raise UserError("sandbox", f"{name} cannot start here ({verdict.detail})", _REMEDIES[name])
        found = f"the self-test of {name} ended as {verdict.kind} ({verdict.detail})"
        raise UserError("sandbox", found, "report it with the output of lakh doctor")


_REMEDIES = {
    "bubblewrap": "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, or bwrap's AppArmor profile; in a "
    "container, more privileges) and have bubblewrap 0.7 or newer",
    "gvisor": IMAGE_REMEDY,
    "docker": IMAGE_REMEDY,
    "landlock": "use a Linux kernel of 6.2 or newer with landlock enabled (lsm=landlock,... on its command line)",
}


def _walls(rung: str) -> Walls:
    if rung == "bubblewrap":
        bwrap = bubblewrap.find()
        if bwrap is None:
            found = "bubblewrap is not installed: there is no bwrap on the PATH"
            raise UserError("sandbox", found, "install it (apt-get install bubblewrap)")
        return bubblewrap.Bubblewrap(bwrap)
    if rung == "landlock":
        from lakh.evals import landlock  # most machines stop at the first rung

        return landlock.Landlock.here()
    if rung in ("gvisor", "docker"):
        from lakh.evals import container

        return container.Container.here(gvisor=rung == "gvisor")
    raise UserError(f"--sandbox {rung}", "no such rung", f"choose one of: {', '.join(RUNGS)}")
