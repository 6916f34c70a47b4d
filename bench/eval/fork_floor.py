"""The least cost of one process per program: a warm interpreter, fork, the program and its test, wait.

No isolation, no limits, no second process for the tests; only the exit code is kept. The forking interpreter has the
same modules imported as lakh's own, and has compiled a program before, so that the children do not pay for the first
compilation.
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
    """Run (source, test) pairs in `workers` interpreters, each taking the next; returns the number that passed."""
    programs_bytes = marshal.dumps(list(programs))
    taken, waiting = os.pipe()  # small enough to hold all numbers at once, and a read of one is whole
    loop = _LOOP.replace("COMMON", repr(COMMON)).replace("NEXT", str(taken))
    command = [interpreter(), *PYTHON_FLAGS, "-c", loop]

    def share(_: int) -> int:
        done = subprocess.run(
            command,
            input=programs_bytes,
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
