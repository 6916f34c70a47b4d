"""The table of health checks. A check compares one metric with limits, or its rise since the previous reading.

Limits follow the vendor where `source` names one; the others are lakh's own and conservative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CHECKS", "XID_LEVELS", "HealthCheck", "HealthLevel", "HealthReading"]

HealthLevel = Literal["watch", "drain", "rma"]
Compare = Literal["above", "below", "rise"]


@dataclass(frozen=True)
class HealthReading:
    """One number that a source has read."""

    device: str
    """gpu0, eth0, memory, disk ..."""
    serial: str
    """The device's serial number, or the node's name for parts without one."""
    metric: str
    value: float


@dataclass(frozen=True)
class HealthCheck:
    name: str
    metric: str
    compare: Compare
    limit: float
    """The finding applies above, below, or at a rise of more than this."""
    level: HealthLevel
    reason: str
    source: str
    fault: float
    """A value of the metric (for `rise`: the increase) that injects the fault."""


_NVIDIA_MEMORY = "docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt"
_NVIDIA_XID = "docs.nvidia.com/deploy/xid-errors"
_NVML = "docs.nvidia.com/deploy/nvml-api"
_LINUX = "Linux kernel documentation"
_LAKH = "lakh"

CHECKS = (
    HealthCheck("gpu-count", "gpus_missing", "above", 0, "drain", "a GPU is not on the bus", _NVIDIA_XID, 1),
    HealthCheck("pcie-width", "pcie_lanes_missing", "above", 0, "drain", "PCIe runs on fewer lanes", _LAKH, 8),
    HealthCheck(
        "ecc-uncorrectable", "ecc_uncorrectable", "above", 0, "drain", "uncorrectable memory errors", _NVIDIA_MEMORY, 1
    ),
    HealthCheck(
        "ecc-correctable", "ecc_correctable", "rise", 100, "drain", "correctable errors are rising", _LAKH, 1000
    ),
    HealthCheck(
        "row-remap-pending", "row_remap_pending", "above", 0, "drain", "a remap needs a GPU reset", _NVIDIA_MEMORY, 1
    ),
    HealthCheck(
        "row-remap-failure", "row_remap_failure", "above", 0, "rma", "a row could not be remapped", _NVIDIA_MEMORY, 1
    ),
    HealthCheck("xid-watch", "xid_watch", "rise", 0, "watch", "the driver logged a contained error", _NVIDIA_XID, 1),
    HealthCheck("xid-drain", "xid_drain", "above", 0, "drain", "the driver logged a hardware error", _NVIDIA_XID, 1),
    HealthCheck("xid-rma", "xid_rma", "above", 0, "rma", "the driver logged a permanent failure", _NVIDIA_XID, 1),
    HealthCheck("nvlink-errors", "nvlink_errors", "rise", 0, "watch", "NVLink replays or recovers", _LAKH, 10),
    HealthCheck("throttling", "throttled", "above", 0, "watch", "the hardware slows the GPU down", _NVML, 1),
    HealthCheck("temperature", "degrees_to_slowdown", "below", 3, "watch", "close to the slowdown limit", _NVML, 0),
    HealthCheck("link-flaps", "link_downs", "rise", 0, "watch", "a network link went down and came back", _LINUX, 2),
    HealthCheck("link-errors", "link_errors", "rise", 100, "watch", "a network link has errors", _LINUX, 1000),
    HealthCheck("host-ecc-uncorrectable", "host_ue", "above", 0, "drain", "uncorrectable host memory", _LINUX, 1),
    HealthCheck("host-ecc-correctable", "host_ce", "rise", 100, "watch", "host memory errors are rising", _LINUX, 1000),
    HealthCheck("host-memory", "memory_free_share", "below", 0.03, "watch", "host memory is nearly full", _LAKH, 0.01),
    HealthCheck("disk-space", "disk_free_share", "below", 0.02, "watch", "the disk is nearly full", _LAKH, 0.001),
    HealthCheck("disk-read-only", "disk_read_only", "above", 0, "drain", "the disk cannot be written", _LAKH, 1),
    HealthCheck("clock-skew", "clock_skew_s", "above", 1.0, "watch", "the clock differs from the storage's", _LAKH, 60),
    HealthCheck("gemm-checksum", "wrong_products", "above", 0, "drain", "a product of matrices is wrong", _LAKH, 1),
)

# Xids of the hardware, by what NVIDIA's table advises; the others are errors of applications.
XID_LEVELS: dict[int, HealthLevel] = {
    48: "drain",  # double-bit ECC error
    63: "watch",  # a row remap was recorded
    64: "rma",  # recording a row remap failed
    74: "drain",  # NVLink error
    79: "drain",  # the GPU has fallen off the bus
    92: "watch",  # high rate of single-bit ECC errors
    94: "watch",  # contained ECC error
    95: "drain",  # uncontained ECC error
    119: "drain",  # timeout of the GPU system processor
    120: "drain",  # error of the GPU system processor
}
