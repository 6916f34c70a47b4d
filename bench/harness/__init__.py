"""The parts that every benchmark shares."""

from bench.harness.peers import Peer, detect_peers
from bench.harness.processes import (
    ProcessUsage,
    measure_process,
    module_command,
    module_environment,
    rss_bytes,
    run_ranks,
    start_process,
    wait_for_ranks,
)
from bench.harness.results import BenchRow, log, machine, out_option, print_rows, result
from bench.harness.rounds import Attempts, SystemFailed, alternate, best, medians

__all__ = [
    "Attempts",
    "BenchRow",
    "Peer",
    "ProcessUsage",
    "SystemFailed",
    "alternate",
    "best",
    "detect_peers",
    "log",
    "machine",
    "measure_process",
    "medians",
    "module_command",
    "module_environment",
    "out_option",
    "print_rows",
    "result",
    "rss_bytes",
    "run_ranks",
    "start_process",
    "wait_for_ranks",
]
