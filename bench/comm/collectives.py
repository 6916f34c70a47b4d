"""Collectives of c3 beside Gloo and MPI, on the same buffers in the same run.

Starts the ranks (rank.py), each in its own process, on this machine or in emulated hosts, and turns their times into
rows. Independent of torch.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.comm.emulation import first_ranks, to_toml
from bench.comm.network_namespaces import NetworkNamespaces, unavailable_reason
from bench.comm.slow_ranks import find_slow_ranks
from bench.harness import BenchRow, module_command, module_environment, start_process, wait_for_ranks
from lakh.c3.topology import Topology, read_topology
from lakh.errors import UserError
from lakh.spec.schedule import codec_bytes

__all__ = [
    "BACKENDS",
    "DTYPES",
    "OPS",
    "CommSweep",
    "bench_collectives",
    "calls_of",
    "calls_within",
    "parse_size",
    "uneven_splits",
]

BACKENDS = ("c3", "gloo", "mpi")
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "all_to_all_v", "barrier")
DTYPES = {"f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16", "i32": "int32", "i64": "int64"}
ALGORITHMS = ("flat", "halving_doubling", "ring", "hierarchical")
SMALL_BYTES = 64 << 10
WARM_UP = 3
"""Untimed calls before each turn: another backend has moved the ranks and cooled the caches."""
LONG_S = 0.5
"""An operation that takes this long needs no warm-up."""
MAX_S = 10.0
"""Time limit of the timed calls of one operation, unless the number of calls is given."""


@dataclass(frozen=True, kw_only=True)
class CommSweep:
    backends: tuple[str, ...] = ("c3", "gloo")
    ops: tuple[str, ...] = ("all_reduce",)
    sizes: tuple[int, ...] = (1 << 10, 1 << 20, 8 << 20)
    dtypes: tuple[str, ...] = ("f32",)
    ranks: int = 2
    registered: bool = False
    codec: str = "none"
    algorithm: str = ""
    emulate: str = ""
    measure_links: bool = False
    """c3 gets the emulated hosts but not the speed of their links, and must measure them."""
    repeats: int | None = None
    """Timed calls of each operation; None: chosen by the size."""
    find_slow: bool = False
    metrics_port: int | None = None
    """Rank r serves its counters at this port + r; None: no metrics."""
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
                    raise UserError(f"{what} {name}", "is unknown", f"choose from: {', '.join(known)}")
        if self.ranks < 2:
            raise UserError(f"--ranks {self.ranks}", "a collective needs at least 2 ranks", "give 2 or more")
        if self.measure_links and not self.emulate:
            raise UserError("--measure-links", "applies to emulated links only", "add --emulate FILE")
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
    """The number of timed calls. Small operations run more often: a few late wake-ups would be half of 25 calls."""
    return asked or (200 if size_bytes <= SMALL_BYTES else 25)


def calls_within(calls: int, seconds: float, turns: int) -> tuple[int, int]:
    """The untimed and the timed calls of one turn, for an operation that takes `seconds`."""
    if seconds < LONG_S:
        return WARM_UP, max(1, calls // turns)
    return 0, max(1, min(calls, int(MAX_S / seconds)) // turns)


def bench_collectives(sweep: CommSweep, log: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure everything in the sweep: {"rows": [...], ...} as in `lakh bench comm --json`."""
    topology = _emulated(sweep) if sweep.emulate else None
    reports: list[dict[str, Any]] = []
    notes: list[str] = []
    torch_backends = [name for name in sweep.backends if name != "mpi"]
    if torch_backends:
        log(f"{sweep.ranks} ranks: {', '.join(torch_backends)}")
        reports.append(_run(sweep, torch_backends, topology, notes))
    if "mpi" in sweep.backends:
        if topology is not None:
            raise UserError("--backends mpi", "does not run in emulated hosts", "remove mpi")
        log(f"{sweep.ranks} ranks: mpi")
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


def _emulated(sweep: CommSweep) -> Topology:
    whole = read_topology(sweep.emulate)
    if whole.size < sweep.ranks:
        found = f"describes {whole.size} ranks and not {sweep.ranks}"
        raise UserError(sweep.emulate, found, f"give --ranks {whole.size}, or describe more")
    return first_ranks(whole, sweep.ranks)


def _run(sweep: CommSweep, backends: list[str], topology: Topology | None, notes: list[str]) -> dict[str, Any]:
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
        environment = module_environment(OMP_NUM_THREADS="1", WORLD_SIZE=str(sweep.ranks))
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if topology is not None:
            topology_file = Path(folder) / "topology.toml"
            # The comment makes the file unique: cached measurements of an earlier emulation are of other links.
            head = f"# {folder}\n" if sweep.measure_links else ""
            topology_file.write_text(head + to_toml(topology, links=not sweep.measure_links), encoding="utf-8")
            environment["LAKH_C3_TOPOLOGY"] = job["emulate"] = str(topology_file)
            reason = unavailable_reason(topology)
            # The in-library shaper slows collectives, not the messages that measure links.
            if reason and sweep.measure_links:
                raise UserError(
                    "--measure-links", f"{reason}, which link measurements do not see", "run as root, without delays"
                )
            if reason:
                if "gloo" in backends:
                    notes.append(f"gloo is left out: {reason}, and the in-library shaper slows c3 only")
                    job["backends"] = [name for name in backends if name != "gloo"]
                job["shaper"] = str(Path(folder) / "links")
            else:
                net = stack.enter_context(NetworkNamespaces(topology))
                environment["GLOO_SOCKET_IFNAME"] = "eth0"
        program = module_command("bench.comm.rank", json.dumps(job))
        ranks = []
        if backends == ["mpi"]:
            launcher = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{environment.get('PATH', '')}")
            command = [launcher or "mpiexec", "-n", str(sweep.ranks), *program]
            ranks.append(start_process(command, {**environment, "RANK": "0"}))
        else:
            for rank in range(sweep.ranks):
                own = {**environment, "RANK": str(rank)}
                if net is not None:
                    own["LAKH_C3_ADDRESS"] = net.address(rank)
                ranks.append(start_process([*(net.command(rank) if net else []), *program], own))
        wait_for_ranks(ranks, sweep.timeout_s)
        return dict(json.loads(report.read_text(encoding="utf-8")))


def _rows(sweep: CommSweep, reports: list[dict[str, Any]], topology: Topology | None) -> list[BenchRow]:
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


def uneven_splits(count: int, ranks: int) -> list[list[int]]:
    """How many numbers each rank (rows) sends to each rank (columns) in all_to_all_v: uneven, as tokens for experts."""
    rng = random.Random(ranks)
    splits = []
    for _ in range(ranks):
        weights = [rng.expovariate(1.0) for _ in range(ranks)]
        row = [int(count * weight / sum(weights)) for weight in weights]
        splits.append([*row[:-1], count - sum(row[:-1])])
    return splits


def _bus_factor(op: str, ranks: int) -> float:
    """Bytes on each rank's link per byte of the buffer, as nccl-tests define it."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if op in ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_v"):
        return (ranks - 1) / ranks
    return 1.0


def _bound_s(size_bytes: int, copies: dict[str, float], topology: Topology | None) -> float | None:
    """Lower bound of the time: one copy of the buffer by all ranks at once, or the buffer over the slowest link."""
    if topology is not None:
        rates = [*(link.bytes_per_s for link in topology.links.values()), *topology.host_rates.values()]
        return size_bytes / min(rates) if rates else None
    if not copies:
        return None
    rate = copies[str(64 << 20)] if size_bytes > 4 << 20 else copies[str(1 << 20)]
    return size_bytes / (rate * 1e9)
