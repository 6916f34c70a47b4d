"""Processes that a timed command leaves behind are killed."""

import sys
import time
from pathlib import Path

from bench.harness import measure_process

LEAVE_ONE = """
import os, time
if (child := os.fork()) == 0:
    os.close(1), os.close(2)
    time.sleep(600)
print(child, flush=True)
"""


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def await_the_end_of(pid: str) -> None:
    deadline_s = time.monotonic() + 60
    while is_alive(pid):
        assert time.monotonic() < deadline_s, f"{pid} was left behind"
        time.sleep(0.01)


def test_a_process_that_the_command_leaves_behind_is_ended() -> None:
    usage = measure_process([sys.executable, "-c", LEAVE_ONE], timeout_s=60)
    await_the_end_of(usage.stdout.strip())
