"""CUDA kernels for Hopper, compiled for a CPU (cuda_emulation.h)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

__all__ = ["address", "compiled", "needs_compiler"]

COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def compiled(folder: Path, source: Path, defines: dict[str, object], runner: str) -> ctypes.CDLL:
    """A library of a kernel with these macros, without ptx.cu; `runner` is C++ that runs it."""
    text = source.read_text()
    text = text.replace("extern __shared__ char shared[];", "")
    text = text.replace("(u32)__cvta_generic_to_shared(shared)", "EMULATED_SHARED")
    macros = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    (folder / "kernel.cpp").write_text(f'#include "cuda_emulation.h"\n{macros}{text}{runner}')
    command = [str(COMPILER), "-std=c++20", "-O2", "-w", "-shared", "-fPIC", "-pthread", f"-I{Path(__file__).parent}"]
    done = subprocess.run(
        [*command, "kernel.cpp", "-o", "kernel.so"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "kernel.so"))


def address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
