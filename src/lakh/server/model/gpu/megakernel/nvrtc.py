"""CUDA source to a kernel that can be launched, by the compiler that comes with torch (NVRTC) and the driver.

For what Triton has no words for. Knows nothing of what a kernel does.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["CudaCompileError", "CudaKernel"]

MAX_SHARED_BYTES = 8  # the driver's number of that attribute of a function


class CudaCompileError(Exception):
    """There is no compiler, or it refuses the source, or the driver the result."""


class CudaKernel:
    """The function `name` of a source, with these words defined."""

    def __init__(
        self,
        source: str,
        name: str,
        defines: Mapping[str, object],
        *,
        threads: int,
        shared_bytes: int,
        device: torch.device,
    ) -> None:
        text = "".join(f"#define {key} {value}\n" for key, value in defines.items()) + source
        binary = _compiled(text, name, torch.cuda.get_device_capability(device))
        self._threads, self._shared_bytes, self._device = threads, shared_bytes, device
        self._function, module = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # from here on the driver knows the device's context
            _check(_driver().cuModuleLoadData(ctypes.byref(module), binary))
            _check(_driver().cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))
            _check(_driver().cuFuncSetAttribute(self._function, MAX_SHARED_BYTES, shared_bytes))

    def __call__(self, blocks: int, *arguments: Tensor | int) -> None:
        """Launch so many blocks on torch's stream; of a tensor the kernel gets the address."""
        values = [
            ctypes.c_void_p(value.data_ptr()) if isinstance(value, Tensor) else ctypes.c_int(value)
            for value in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        grid, block = (blocks, 1, 1), (self._threads, 1, 1)
        _check(_driver().cuLaunchKernel(self._function, *grid, *block, self._shared_bytes, stream, pointers, None))


def _check(code: int) -> None:
    if code:
        words = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(words))
        raise CudaCompileError(f"the CUDA driver says: {(words.value or b'?').decode()} ({code})")


def _compiled(text: str, name: str, capability: tuple[int, int]) -> bytes:
    """For this generation of chips."""
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode())
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None):
        raise CudaCompileError("NVRTC makes no program")
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), options):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CudaCompileError(log.value.decode(errors="replace"))
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, binary)
        return binary.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _driver() -> ctypes.CDLL:
    return _library("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    return _library(f"libnvrtc.so.{(torch.version.cuda or '?').split('.')[0]}")


def _library(name: str) -> ctypes.CDLL:
    """Where the loader finds it, else in the wheels beside torch."""
    beside = [found for folder in sys.path for found in Path(folder or ".").glob(f"nvidia/*/lib/{name}")]
    for place in [name, *map(str, beside)]:
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise CudaCompileError(f"{name} is not to be found")
