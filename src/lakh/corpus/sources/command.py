"""Run an external program to its end and return its output, or fail with a clear error.

Each call has a time limit (COMMAND_TIMEOUT_S) and no terminal for questions; a missing program names its package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from lakh.errors import LakhError, PeerTimeout, UserError

__all__ = ["COMMAND_TIMEOUT_S", "run_command"]

COMMAND_TIMEOUT_S = 1800.0


def run_command(
    command: list[str],
    where: str,
    package: str,
    cwd: Path | None = None,
    todo: str = "check the name and version",
    failure: type[LakhError] = UserError,
    prefer: str = "",
) -> str:
    """Run and return stdout. An error shows the last line of stderr, or the last one that contains `prefer`."""
    if shutil.which(command[0]) is None:
        found = f"needs {command[0]}, which is not installed"
        raise UserError(where, found, f"install it with: apt-get install {package}")
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}  # a question would wait forever
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, encoding="utf-8", errors="replace", check=False,
            timeout=COMMAND_TIMEOUT_S, env=environment, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        found = f"{command[0]} took over COMMAND_TIMEOUT_S = {COMMAND_TIMEOUT_S:g} s"
        raise PeerTimeout(where, found, "try again") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        shown = [line for line in lines if prefer in line] or lines or ["failed"]
        raise failure(where, f"{command[0]}: {shown[-1][:300]}", todo)
    return done.stdout
