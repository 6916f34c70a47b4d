"""The process that compiles and runs a program of another language: files into /tmp, then commands, one after another.

Here test and code under test are one program, as their benchmarks make them. A pass is an exit code of 0 *and* the
nonce as the last line of output, which the test prints after its last check: leaving early with 0 proves nothing. A
program that looks for the nonce in its own memory could still print it; what cannot be forged is said in examiner.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from typing import Any

from lakh.evals.inside import values

KEPT_BYTES = 4096


def run(order_fd: int, verdict_fd: int) -> None:
    order = json.loads(values.read_all(order_fd))
    os.close(order_fd)
    os.set_inheritable(verdict_fd, False)
    for name, text in order["files"].items():
        if "/" in name:
            os.makedirs(os.path.dirname(name), exist_ok=True)  # noqa: PTH103, PTH120
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:  # noqa: PTH123 - as little as possible
            file.write(text)
    said = "failed no command"
    for number, words in enumerate(order["commands"]):
        last = number == len(order["commands"]) - 1
        status, tail = _step(words, order["environment"])
        said = _judge(status, tail, order["nonce"] if last else None)
        if not said.startswith("passed"):
            break
    os.write(verdict_fd, said.encode("utf-8", "replace")[:4096])


def _step(words: list[str], environment: dict[str, str]) -> tuple[int, bytes]:
    """Run one command; its end and the end of its output, which also goes where ours goes."""
    output, child_output = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(child_output, 1)
            os.dup2(child_output, 2)
            os.execve(words[0], words, environment)
        finally:
            os._exit(127)
    os.close(child_output)
    tail = b""
    while block := os.read(output, 1 << 16):
        os.write(1, block)
        tail = (tail + block)[-KEPT_BYTES:]
    os.close(output)
    return os.waitpid(child, 0)[1], tail


def _judge(status: int, tail: bytes, nonce: str | None) -> str:
    lines = tail.decode("utf-8", "replace").split("\n")
    if status == 0:
        if nonce is None:
            return "passed"
        if nonce in lines[-2:]:
            return f"passed {nonce}"
        return "failed ended before its test did (exit code 0)"
    words: Any = [line.strip() for line in lines if line.strip()]
    detail = next((line for line in words if "rror" in line), words[-1] if words else "")[:200]
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number in (signal.SIGXCPU, signal.SIGKILL):
            return "timeout CPU limit"
        name = f"signal {number}"
        with contextlib.suppress(ValueError):
            name = signal.Signals(number).name
        return f"failed killed by {name} {detail}"
    return f"failed exit code {os.waitstatus_to_exitcode(status)}: {detail}"
