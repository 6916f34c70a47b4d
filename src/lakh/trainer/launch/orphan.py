"""A rank must not outlive its launcher: asks the kernel for SIGTERM when the parent dies (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["die_with_launcher"]

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_launcher() -> None:
    """Does nothing under torchrun or Slurm, which look after their ranks themselves."""
    launcher = os.environ.get("LAKH_LAUNCHER_PID")
    if launcher is None:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(launcher):  # it died before we asked
        os.kill(os.getpid(), signal.SIGTERM)
