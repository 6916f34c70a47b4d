"""Runs untrusted programs in isolation and reports how each one ended.

    program.py    what runs: Python in two processes, or commands of another language
    sandbox.py    chooses an isolation backend, tests it, and keeps a pool of warm workers
    worker.py     one warm worker: an isolated process tree that runs one program after another
    channel.py    messages between a worker and its first process
    isolation.py  the contract of an isolation backend; backends/ has one file for each
    verdict.py    limits of a program, and how it ended
    cgroup.py resident_memory.py seccomp.py   limits on memory, processes and system calls

The code that runs on the other side is in lakh.evals.sandboxed. Independent of benchmarks and models.
"""

from lakh.evals.sandbox.backends import BACKENDS
from lakh.evals.sandbox.program import NONCE, CommandProgram, Program
from lakh.evals.sandbox.sandbox import Sandbox
from lakh.evals.sandbox.verdict import SandboxLimits, SandboxVerdict, VerdictKind

__all__ = [
    "BACKENDS",
    "NONCE",
    "CommandProgram",
    "Program",
    "Sandbox",
    "SandboxLimits",
    "SandboxVerdict",
    "VerdictKind",
]
