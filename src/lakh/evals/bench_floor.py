"""What a process of its own costs a program at least: a warm interpreter, fork, the program and its test, wait.

No walls, no limits, no second process for the tests, nothing kept from a program but its exit code. Whoever gives each
program a fresh process made by a fork of Python pays this; what a judge takes beyond it is what its safety costs. The
forking interpreter is bare, has the same modules imported as lakh's own, and has compiled a program before, which a
first compilation would make each child pay for.
"""

from __future__ import annotations

import marshal
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from lakh.evals.sandbox.isolation import ENVIRONMENT, PYTHON_FLAGS, interpreter
from lakh.evals.sandboxed.zygote import COMMON

__all__ = ["fork_each"]

TIMEOUT_S = 600.0

_LOOP = """
import gc, marshal, os, sys
for name in COMMON.split():
    __import__(name)
programs = marshal.load(sys.stdin.buffer)
for _ in range(10):
    exec(compile(programs[0][0], "<program>", "exec"), {})
gc.collect()
gc.freeze()
passed = 0
while index := os.read(NEXT, 2):
    source, test = programs[int.from_bytes(index, "little")]
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            space = {}
            exec(compile(source, "<program>", "exec"), space)
            exec(compile(test, "<test>", "exec"), space)
            os._exit(0)
        finally:
            os._exit(1)
    passed += os.waitpid(child, 0)[1] == 0
print(passed)
"""


def fork_each(programs: Sequence[tuple[str, str]], workers: int) -> int:
    """Run (source, test) pairs over so many interpreters, each taking the next; how many passed."""
    told = marshal.dumps(list(programs))
    taken, waiting = os.pipe()  # small enough to hold all numbers at once, and a read of one is whole
    loop = _LOOP.replace("COMMON", repr(COMMON)).replace("NEXT", str(taken))
    command = [interpreter(), *PYTHON_FLAGS, "-c", loop]

    def share(_: int) -> int:
        done = subprocess.run(
            command,
            input=told,
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
            timeout=TIMEOUT_S,
            check=True,
            pass_fds=[taken],
        )
        return int(done.stdout)

    try:
        os.write(waiting, b"".join(number.to_bytes(2, "little") for number in range(len(programs))))
        os.close(waiting)
        with ThreadPoolExecutor(workers) as pool:
            return sum(pool.map(share, range(workers)))
    finally:
        os.close(taken)
