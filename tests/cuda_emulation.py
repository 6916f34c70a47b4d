"""CUDA kernels for Hopper, compiled for a CPU (cuda_emulation.h)."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from lakh.workloads.code.kernels.cuda import nvrtc

__all__ = ["EmulatedKernel", "EmulatedTensorMap", "address", "compiled", "needs_compiler"]

COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def compiled(folder: Path, text: str, defines: Mapping[str, object], runner: str) -> ctypes.CDLL:
    """A library of a kernel's source with these macros, without ptx.cu; `runner` is C++ that runs it."""
    text = re.sub(r"extern __shared__ char (\w+)\[\];", r"char* \1 = shared_memory();", text)
    text = re.sub(r"extern __shared__ __align__\((\d+)\) char (\w+)\[\];", r"char* \2 = shared_memory(\1);", text)
    macros = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    (folder / "kernel.cpp").write_text(f'#include "cuda_emulation.h"\n{macros}{text}{runner}')
    include = f"-I{Path(__file__).parent}"
    command = [str(COMPILER), "-std=c++20", "-O1", "-U_FORTIFY_SOURCE", "-w", "-shared", "-fPIC", include]
    done = subprocess.run(
        [*command, "kernel.cpp", "-o", "kernel.so"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "kernel.so"))


class EmulatedKernel:
    """In place of nvrtc.CudaKernel, for a persistent kernel: all blocks run at the same time."""

    folder: Path

    def __init__(
        self,
        source: str,
        name: str,
        defines: Mapping[str, object],
        *,
        threads: int,
        shared_bytes: int,
        device: torch.device,
        architecture_specific: bool,
    ) -> None:
        assert device.type == "cpu"
        runner = f"""
extern "C" void launch_kernel(int blocks, void** arguments) {{ launch({name}, blocks, {threads}, arguments); }}
"""
        self._library = compiled(self.folder, source.removeprefix(nvrtc.ptx()), defines, runner)

    def __call__(self, blocks: int, *arguments: torch.Tensor | int | nvrtc.KernelArgument) -> None:
        values = [
            ctypes.c_int(value) if isinstance(value, int)
            else ctypes.c_void_p(value.data_ptr()) if isinstance(value, torch.Tensor)
            else value
            for value in arguments
        ]  # fmt: skip
        addresses = (ctypes.c_void_p * len(values))(
            *(value.address if isinstance(value, EmulatedTensorMap) else ctypes.addressof(value) for value in values)
        )
        self._library.launch_kernel(blocks, addresses)
        self._library.failure_of_run.restype = ctypes.c_char_p
        failure = self._library.failure_of_run().decode()
        assert not failure, failure


class _TensorMap(ctypes.Structure):
    """TensorMap of cuda_emulation.h."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("sizes", ctypes.c_longlong * 4),
        ("strides", ctypes.c_longlong * 4),
        ("box", ctypes.c_longlong * 4),
    )


class EmulatedTensorMap:
    """In place of tensor_map.TensorMap, with four dimensions."""

    def __init__(self, tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> None:
        assert not any(stride % 16 for stride in strides)
        four = ctypes.c_longlong * 4
        self._map = _TensorMap(tensor.data_ptr(), four(*sizes), four(1, *strides), four(*box))
        self.address = ctypes.addressof(self._map)


def address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
