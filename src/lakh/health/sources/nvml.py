"""Counters of NVIDIA GPUs, through the driver's own library (libnvidia-ml), which comes with every driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from lakh.health.checks import HealthReading

__all__ = ["read_gpus"]

LIBRARY = "libnvidia-ml.so.1"
TEXT_BYTES = 96
MAX_NVLINKS = 18
_CORRECTED, _UNCORRECTED, _VOLATILE = 0, 1, 0
_TEMPERATURE_GPU, _THRESHOLD_SLOWDOWN = 0, 1
_REPLAY, _RECOVERY = 0, 1
# nvmlClocksEventReasonHwSlowdown, HwThermalSlowdown, HwPowerBrakeSlowdown
_SLOWDOWNS = 0x8 | 0x40 | 0x80


def read_gpus(node: str, expected: int | None = None) -> Iterator[HealthReading]:
    """Readings of every GPU; none on a machine without a driver, unless GPUs are expected."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        library = None
    count = ctypes.c_uint(0)
    if library is not None and library.nvmlInit_v2() == 0:
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                yield from _Gpu(library, handle, index, node).read()
        library.nvmlShutdown()
    if expected is not None:
        yield HealthReading("gpus", node, "gpus_missing", max(0, expected - count.value))


class _Gpu:
    def __init__(self, library: Any, handle: ctypes.c_void_p, index: int, node: str) -> None:
        self._library, self._handle, self._device = library, handle, f"gpu{index}"
        self._serial = self._text("nvmlDeviceGetSerial") or self._text("nvmlDeviceGetUUID") or f"{node}/gpu{index}"

    def read(self) -> Iterator[HealthReading]:
        yield from self._number("ecc_uncorrectable", "nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE)
        yield from self._number("ecc_correctable", "nvmlDeviceGetTotalEccErrors", _CORRECTED, _VOLATILE)
        yield from self._remaps()
        yield from self._difference(
            "pcie_lanes_missing",
            self._get("nvmlDeviceGetMaxPcieLinkWidth", ctypes.c_uint),
            self._get("nvmlDeviceGetCurrPcieLinkWidth", ctypes.c_uint),
        )
        yield from self._difference(
            "degrees_to_slowdown",
            self._get("nvmlDeviceGetTemperatureThreshold", ctypes.c_uint, _THRESHOLD_SLOWDOWN),
            self._get("nvmlDeviceGetTemperature", ctypes.c_uint, _TEMPERATURE_GPU),
        )
        reasons = self._get("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong)
        if reasons is not None:
            yield self._reading("throttled", float(bool(reasons & _SLOWDOWNS)))
        errors = [
            self._get("nvmlDeviceGetNvLinkErrorCounter", ctypes.c_ulonglong, link, counter)
            for link in range(MAX_NVLINKS)
            for counter in (_REPLAY, _RECOVERY)
        ]
        if any(error is not None for error in errors):
            yield self._reading("nvlink_errors", sum(error or 0 for error in errors))

    def _remaps(self) -> Iterator[HealthReading]:
        numbers = [ctypes.c_uint() for _ in range(4)]  # corrected, uncorrected, pending, failed
        references = [ctypes.byref(number) for number in numbers]
        if self._call("nvmlDeviceGetRemappedRows", *references):
            yield self._reading("row_remap_pending", numbers[2].value)
            yield self._reading("row_remap_failure", numbers[3].value)

    def _number(self, metric: str, function: str, *arguments: int) -> Iterator[HealthReading]:
        value = self._get(function, ctypes.c_ulonglong, *arguments)
        if value is not None:
            yield self._reading(metric, value)

    def _difference(self, metric: str, larger: int | None, smaller: int | None) -> Iterator[HealthReading]:
        if larger is not None and smaller is not None:
            yield self._reading(metric, larger - smaller)

    def _reading(self, metric: str, value: float) -> HealthReading:
        return HealthReading(self._device, self._serial, metric, value)

    def _get(self, function: str, kind: type[ctypes.c_uint] | type[ctypes.c_ulonglong], *arguments: int) -> int | None:
        """The number that a function returns; None where this GPU or driver does not have it."""
        value = kind()
        return value.value if self._call(function, *arguments, ctypes.byref(value)) else None

    def _text(self, function: str) -> str:
        buffer = ctypes.create_string_buffer(TEXT_BYTES)
        return buffer.value.decode(errors="replace") if self._call(function, buffer, TEXT_BYTES) else ""

    def _call(self, function: str, *arguments: Any) -> bool:
        try:
            return bool(getattr(self._library, function)(self._handle, *arguments) == 0)
        except AttributeError:  # an older driver
            return False
