"""Compile CUDA source with NVRTC, which comes with torch, and launch it through the driver API."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["CudaCompileError", "CudaKernel", "KernelArgument", "check", "compile_cubin", "driver", "ptx"]

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class CudaCompileError(Exception):
    """There is no compiler, or compiling or loading failed."""


class KernelArgument(Protocol):
    """A structure that is passed by value, such as a tensor map."""

    address: int


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute; its value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


class CudaKernel:
    """The kernel `name` of a source, compiled with these macros.

    `pdl`: programmatic dependent launch; the kernel itself waits for its predecessor. `architecture_specific`: for this
    compute capability only, with instructions that no other has.
    """

    def __init__(
        self,
        source: str,
        name: str,
        defines: Mapping[str, object],
        *,
        threads: int,
        shared_bytes: int,
        device: torch.device,
        pdl: bool = False,
        architecture_specific: bool = False,
    ) -> None:
        text = "".join(f"#define {key} {value}\n" for key, value in defines.items()) + source
        suffix = "a" if architecture_specific else ""
        binary = compile_cubin(text, name, torch.cuda.get_device_capability(device), suffix)
        self._threads, self._shared_bytes, self._device = threads, shared_bytes, device
        self._attribute = _LaunchAttribute(id=PROGRAMMATIC_STREAM_SERIALIZATION, value=(1,))
        self._num_attributes = int(pdl)
        self._function, module = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context current in the driver
            check(driver().cuModuleLoadData(ctypes.byref(module), binary))
            check(driver().cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))
            check(driver().cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes))

    def __call__(self, blocks: int, *arguments: Tensor | int | KernelArgument) -> None:
        """Launch on torch's current stream; a tensor is passed as its address."""
        values: list[Any] = [
            ctypes.c_void_p(value.data_ptr()) if isinstance(value, Tensor)
            else ctypes.c_int(value) if isinstance(value, int)
            else value
            for value in arguments
        ]  # fmt: skip
        addresses = [
            ctypes.addressof(value) if isinstance(value, ctypes.c_void_p | ctypes.c_int) else value.address
            for value in values
        ]
        pointers = (ctypes.c_void_p * len(values))(*addresses)
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        config = _LaunchConfig(
            grid=(blocks, 1, 1),
            block=(self._threads, 1, 1),
            shared_bytes=self._shared_bytes,
            stream=stream,
            attributes=ctypes.pointer(self._attribute),
            num_attributes=self._num_attributes,
        )
        check(driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None))


def check(code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(text))
        raise CudaCompileError(f"CUDA driver error {code}: {(text.value or b'?').decode()}")


def compile_cubin(text: str, name: str, capability: tuple[int, int], suffix: str = "") -> bytes:
    """The binary for this compute capability."""
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture=sm_{capability[0]}{capability[1]}{suffix}".encode())
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None):
        raise CudaCompileError("NVRTC cannot create a program")
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


def ptx() -> str:
    """The source that names the instructions of a Hopper GPU, to be put before that of a kernel."""
    return (Path(__file__).parent / "ptx.cu").read_text()


@functools.cache
def driver() -> ctypes.CDLL:
    return _library("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    return _library(f"libnvrtc.so.{(torch.version.cuda or '?').split('.')[0]}")


def _library(name: str) -> ctypes.CDLL:
    """From the loader's path, else from the wheels beside torch."""
    beside = [found for folder in sys.path for found in Path(folder or ".").glob(f"nvidia/*/lib/{name}")]
    for place in [name, *map(str, beside)]:
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise CudaCompileError(f"{name} was not found")
