"""`lakh bench comm`: c3 beside its peers, on the same buffers in the same run.

Starts the ranks (`bench_rank.py`), each in its own process, here or in emulated hosts; turns their times into rows.
Knows no torch itself. A rank that dies or hangs ends the run with what it said, never a wait without end.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lakh.c3.faults.network_namespaces import NetworkNamespaces, unavailable_reason
from lakh.c3.network.slow_ranks import find_slow_ranks
from lakh.c3.topology import Topology, read_topology
from lakh.errors import MissingExtra, PeerLost, PeerTimeout, UserError
from lakh.spec.collectives import codec_bytes

__all__ = ["BACKENDS", "DTYPES", "OPS", "Sweep", "calls_of", "calls_within", "parse_size", "run_bench", "run_ranks"]

BACKENDS = ("c3", "gloo", "mpi")
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
DTYPES = {"f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16", "i32": "int32", "i64": "int64"}
ALGORITHMS = ("flat", "halving_doubling", "ring", "hierarchical")
SMALL_BYTES = 64 << 10
WARM_UP = 3
"""Calls before each turn: another backend has left ranks on other cores and caches cold."""
LONG_S = 0.5
"""An operation that takes so long does not feel that, and is not called in vain."""
MOST_S = 10.0
"""Of timed calls of one operation, where nobody says how many."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What to measure."""

    backends: tuple[str, ...] = ("c3", "gloo")
    ops: tuple[str, ...] = ("all_reduce",)
    sizes: tuple[int, ...] = (1 << 10, 1 << 20, 8 << 20)
    dtypes: tuple[str, ...] = ("f32",)
    ranks: int = 2
    registered: bool = False
    codec: str = "none"
    algorithm: str = ""
    emulate: str = ""
    untold: bool = False
    """c3 is told where the emulated ranks are and not what their links carry: it must find out."""
    repeats: int | None = None
    """Timed calls of each; None: by the size."""
    find_slow: bool = False
    metrics_port: int | None = None
    """Rank r serves its counters at this port + r while it runs; None: not."""
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for what, given, known in (
            ("--backends", self.backends, BACKENDS),
            ("--ops", self.ops, OPS),
            ("--dtypes", self.dtypes, tuple(DTYPES)),
            ("--codec", (self.codec,), ("none", "bf16", "int8", "int4")),
            ("--algorithm", (self.algorithm,) if self.algorithm else (), ALGORITHMS),
        ):
            for name in given:
                if name not in known:
                    raise UserError(f"{what} {name}", "is not known", f"choose from: {', '.join(known)}")
        if self.ranks < 2:
            raise UserError(f"--ranks {self.ranks}", "a collective needs two", "give 2 or more")
        if self.untold and not self.emulate:
            raise UserError("--untold", "there are no emulated links to keep from c3", "add --emulate FILE")
        if self.find_slow and "c3" not in self.backends:
            raise UserError("--find-slow", "sends messages over c3", "add c3 to --backends")
        if self.metrics_port is not None and not 0 < self.metrics_port <= 65536 - self.ranks:
            found = f"leaves no port for each of {self.ranks} ranks"
            raise UserError(f"--metrics-port {self.metrics_port}", found, "give one from 1024 to 60000")


def parse_size(text: str) -> int:
    """ "64MB" -> bytes; units are powers of two, as is usual for buffers."""
    units = {"GB": 1 << 30, "MB": 1 << 20, "KB": 1 << 10, "B": 1}
    for unit, factor in units.items():
        number = text.upper().removesuffix(unit)
        if text.upper().endswith(unit) and number.strip().isdigit() and int(number):
            return int(number) * factor
    raise UserError(f"--sizes {text}", "is not a size", "write 1KB, 8MB, ...")


def calls_of(size_bytes: int, asked: int | None = None) -> int:
    """How often an operation is timed. A few late wake-ups are half of 25 small calls, so small ones run more often."""
    return asked or (200 if size_bytes <= SMALL_BYTES else 25)


def calls_within(calls: int, seconds: float, turns: int) -> tuple[int, int]:
    """Of an operation that takes `seconds`: the calls in vain before each turn, and the timed ones in it."""
    if seconds < LONG_S:
        return WARM_UP, max(1, calls // turns)
    return 0, max(1, min(calls, int(MOST_S / seconds)) // turns)


def run_bench(sweep: Sweep, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure everything in the sweep: {"rows": [...], ...} as `lakh bench comm --json` prints."""
    topology = _emulated(sweep) if sweep.emulate else None
    reports: list[dict[str, Any]] = []
    notes: list[str] = []
    torch_backends = [name for name in sweep.backends if name != "mpi"]
    if torch_backends:
        say(f"{sweep.ranks} ranks: {', '.join(torch_backends)}")
        reports.append(_run(sweep, torch_backends, topology, notes))
    if "mpi" in sweep.backends:
        if topology is not None:
            raise UserError("--backends mpi", "is not run in emulated hosts", "leave mpi out")
        say(f"{sweep.ranks} ranks: mpi")
        reports.append(_run(sweep, ["mpi"], None, notes))
    data: dict[str, Any] = {"rows": _rows(sweep, reports, topology), "notes": notes}
    data["memcpy_GBps"] = reports[0].get("memcpy_GBps")
    data["reasons"] = {str(row["size_bytes"]): row["reason"] for row in reports[0]["rows"] if "reason" in row}
    if sweep.find_slow:
        data["pairs"] = reports[0]["pairs"]
        data["slow"] = find_slow_ranks(
            {tuple(p["ranks"]): p["GBps"] for p in reports[0]["pairs"]}, sweep.ranks, topology
        )
    return data


def _emulated(sweep: Sweep) -> Topology:
    whole = read_topology(sweep.emulate)
    if whole.size < sweep.ranks:
        found = f"describes {whole.size} ranks and not {sweep.ranks}"
        raise UserError(sweep.emulate, found, f"give --ranks {whole.size}, or describe more")
    return whole.first_ranks(sweep.ranks)


def _run(sweep: Sweep, backends: list[str], topology: Topology | None, notes: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lakh-bench-") as folder, ExitStack() as stack:
        report = Path(folder) / "report.json"
        job = {
            "backends": backends,
            "ops": list(sweep.ops),
            "sizes": list(sweep.sizes),
            "dtypes": [DTYPES[name] for name in sweep.dtypes],
            "registered": sweep.registered,
            "codec": sweep.codec,
            "algorithm": sweep.algorithm,
            "emulate": "",
            "shaper": "",
            "repeats": {str(size): calls_of(size, sweep.repeats) for size in sweep.sizes},
            "as_asked": sweep.repeats is not None,
            "metrics_port": sweep.metrics_port,
            "find_slow": sweep.find_slow,
            "timeout_s": sweep.timeout_s,
            "rendezvous": str(Path(folder) / "meet"),
            "report": str(report),
        }
        net = None
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(sweep.ranks)}
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if topology is not None:
            told = Path(folder) / "told.toml"
            # A line of its own: figures that an earlier emulation left in the cache are of other links.
            head = f"# {folder}\n" if sweep.untold else ""
            told.write_text(head + topology.as_toml(links=not sweep.untold), encoding="utf-8")
            environment["LAKH_C3_TOPOLOGY"] = job["emulate"] = str(told)
            reason = unavailable_reason(topology)
            if reason and sweep.untold:  # it slows collectives, and messages measure
                raise UserError("--untold", f"{reason}, which measuring does not see", "run as root, without delays")
            if reason:
                if "gloo" in backends:
                    notes.append(f"gloo left out: {reason}, and the in-library shaper slows c3 alone")
                    job["backends"] = [name for name in backends if name != "gloo"]
                job["shaper"] = str(Path(folder) / "links")
            else:
                net = stack.enter_context(NetworkNamespaces(topology))
                environment["GLOO_SOCKET_IFNAME"] = "eth0"
        program = [sys.executable, "-m", "lakh.c3.bench_rank", json.dumps(job)]
        ranks = []
        if backends == ["mpi"]:
            launcher = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{environment.get('PATH', '')}")
            if launcher is None:
                raise MissingExtra("--backends mpi", "mpi4py and mpich", "bench")
            command = [launcher, "-n", str(sweep.ranks), *program]
            ranks.append(_start(command, {**environment, "RANK": "0"}))
        else:
            for rank in range(sweep.ranks):
                own = {**environment, "RANK": str(rank)}
                if net is not None:
                    own["LAKH_C3_ADDRESS"] = net.address(rank)
                ranks.append(_start([*(net.command(rank) if net else []), *program], own))
        _wait(ranks, sweep.timeout_s)
        return dict(json.loads(report.read_text(encoding="utf-8")))


def run_ranks(module: str, job: dict[str, Any], ranks: int, timeout_s: float) -> None:
    """Run `module` with `job` as its one argument, once for each rank, on this machine."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    program = [sys.executable, "-m", module, json.dumps(job)]
    _wait([_start(program, {**environment, "RANK": str(rank)}) for rank in range(ranks)], timeout_s)


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _wait(ranks: Sequence[subprocess.Popen[str]], timeout_s: float) -> None:
    """Until all ranks have ended well; kills the rest when one has not."""
    end_s = time.monotonic() + timeout_s
    try:
        while any(process.poll() is None for process in ranks):
            for rank, process in enumerate(ranks):
                if process.poll():
                    said = (process.stderr.read() if process.stderr else "").strip().splitlines()
                    last = said[-1][:300] if said else f"exit code {process.returncode}"
                    raise PeerLost(f"bench, rank {rank}", last, "see what it says and run again")
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


def _rows(sweep: Sweep, reports: list[dict[str, Any]], topology: Topology | None) -> list[dict[str, Any]]:
    rows = []
    short = {long: name for name, long in DTYPES.items()}
    copies: dict[str, float] = next((r["memcpy_GBps"] for r in reports if "memcpy_GBps" in r), {})
    for number, first in enumerate(reports[0]["rows"]):
        times: dict[str, list[float]] = {}
        for report in reports:
            times.update({name: value for name, value in report["rows"][number]["times_us"].items() if value})
        medians = {name: statistics.median(value) for name, value in times.items()}
        for backend, values in times.items():
            size_bytes = first["size_bytes"]
            seconds = medians[backend] * 1e-6
            algbw = size_bytes / seconds / 1e9
            on_wire = codec_bytes(sweep.codec, size_bytes // 4) if backend == "c3" and topology else size_bytes
            bound_s = _bound_s(on_wire, copies, topology)
            rows.append(
                {
                    "backend": backend,
                    "op": first["op"],
                    "dtype": short[first["dtype"]],
                    "ranks": sweep.ranks,
                    "size_bytes": size_bytes,
                    "registered": sweep.registered,
                    "codec": sweep.codec if backend == "c3" else "none",
                    "min_us": min(values),
                    "median_us": medians[backend],
                    "calls": len(values),
                    "p99_us": sorted(values)[min(len(values) - 1, int(0.99 * len(values)))],
                    "algbw_GBps": algbw,
                    "busbw_GBps": algbw * _bus_factor(first["op"], sweep.ranks),
                    "bound_fraction": bound_s / seconds if bound_s else None,
                    "ratio_to_gloo": medians["gloo"] / medians[backend] if "gloo" in medians else None,
                }
            )
    return rows


def _bus_factor(op: str, ranks: int) -> float:
    """Bytes that each rank's link must carry over bytes of the buffer, as nccl-tests define it."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


def _bound_s(size_bytes: int, copies: dict[str, float], topology: Topology | None) -> float | None:
    """The least time possible: one copy of the buffer by all ranks at once, or the buffer over the slowest link."""
    if topology is not None:
        rates = [*(link.bytes_per_s for link in topology.links.values()), *topology.host_rates.values()]
        return size_bytes / min(rates) if rates else None
    if not copies:
        return None
    rate = copies[str(64 << 20)] if size_bytes > 4 << 20 else copies[str(1 << 20)]
    return size_bytes / (rate * 1e9)
