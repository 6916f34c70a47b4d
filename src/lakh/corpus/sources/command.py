"""Programs of other people, run to their end: what they printed, or an error that says whose fault it was.

Each has a time limit (COMMAND_TIMEOUT_S), no terminal to ask questions on, and a line that says what to install where
it is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from lakh.errors import LakhError, PeerTimeout, UserError

__all__ = ["COMMAND_TIMEOUT_S", "run"]

COMMAND_TIMEOUT_S = 1800.0


def run(
    command: list[str],
    where: str,
    package: str,
    cwd: Path | None = None,
    todo: str = "check the name and version",
    failure: type[LakhError] = UserError,
    telling: str = "",
) -> str:
    """Run it and return what it printed. The last line of its complaints is told, `telling` marks a better one."""
    if shutil.which(command[0]) is None:
        found = f"needs {command[0]}, which is not installed"
        raise UserError(where, found, f"install it with: apt-get install {package}")
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}  # a question would wait for ever
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
        told = [line for line in lines if telling in line] or lines or ["failed"]
        raise failure(where, f"{command[0]}: {told[-1][:300]}", todo)
    return done.stdout
