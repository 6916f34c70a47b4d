"""The process that compiles and runs a program of another language: files into /tmp, then one command after another.

Test and code under test are one program, as in their benchmarks. A pass needs exit code 0 and, among the last lines of
output, the nonce that the test prints after its last check. A program could find the nonce and print it; that is why
one that passes is also run with changed tests, which it has to fail (tasks/control_tests.py).
"""

from __future__ import annotations

import json
import os
import re
import signal

from lakh.evals.sandboxed import messages

TAIL_BYTES = 4096


def run(request_fd: int, outcome_fd: int) -> None:
    request = json.loads(messages.read_all(request_fd))
    os.close(request_fd)
    os.set_inheritable(outcome_fd, False)
    for name, text in request["files"].items():
        if "/" in name:
            os.makedirs(os.path.dirname(name), exist_ok=True)  # noqa: PTH103, PTH120
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:  # noqa: PTH123 - pathlib costs memory
            file.write(text)
    outcome = "failed no command"
    for number, command in enumerate(request["commands"]):
        is_last = number == len(request["commands"]) - 1
        status, tail = _run_command(command, request["environment"])
        outcome = _outcome(status, tail, request["nonce"] if is_last else None, request["failure"])
        if not outcome.startswith("passed"):
            if not is_last:
                outcome = outcome.replace("failed", "uncompiled", 1)
            break
    os.write(outcome_fd, outcome.encode("utf-8", "replace")[:4096])


def _run_command(command: list[str], environment: dict[str, str]) -> tuple[int, bytes]:
    """Wait status and end of output, which is also copied to our own stdout."""
    output, child_output = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(child_output, 1)
            os.dup2(child_output, 2)
            os.execve(command[0], command, environment)
        finally:
            os._exit(127)
    os.close(child_output)
    tail = b""
    while block := os.read(output, 1 << 16):
        os.write(1, block)
        tail = (tail + block)[-TAIL_BYTES:]
    os.close(output)
    return os.waitpid(child, 0)[1], tail


def _outcome(status: int, tail: bytes, nonce: str | None, failure: str) -> str:
    lines = tail.decode("utf-8", "replace").split("\n")
    if status == 0:
        if nonce is None:
            return "passed"
        failed = next((line for line in lines if failure and re.search(failure, line)), "")
        if failed:
            return f"failed {failed[:200]}"
        return f"passed {nonce}" if nonce in lines else "failed ended before its test did (exit code 0)"
    shown = [line.strip() for line in lines if line.strip()]
    detail = next((line for line in shown if "rror" in line), shown[-1] if shown else "")[:200]
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number in (signal.SIGXCPU, signal.SIGKILL):
            return "timeout CPU limit"
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return f"failed killed by {name} {detail}"
    return f"failed exit code {os.waitstatus_to_exitcode(status)}: {detail}"
