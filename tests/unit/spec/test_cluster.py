"""A cluster file has units in its names, sources for its numbers, and no figure that a GPU cannot reach."""

from pathlib import Path

import pytest

from lakh.errors import ConfigError
from lakh.spec.cluster import load_cluster

CLUSTER = """
name = "mine"
[gpu]
kind = "H100-SXM"
memory_GiB = 74.5
dense_bf16_TFLOPs = 989.4
memory_bandwidth_GBps = 3350.0
source = "data sheet"
[[tiers]]
name = "node"
size = 8
bandwidth_GBps = 450.0
latency_us = 2.0
source = "data sheet"
"""


def write(tmp_path: Path, old: str = "", new: str = "") -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(CLUSTER.replace(old, new))
    return file


@pytest.mark.parametrize(
    ("unit", "bare"),
    [("memory_GiB", "memory"), ("bandwidth_GBps = 450", "bandwidth = 450"), ("latency_us", "latency")],
)
def test_a_value_without_a_unit_is_refused_with_the_name_that_has_one(unit: str, bare: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"no such setting; did you mean .*{unit.partition(' ')[0]}"):
        load_cluster(write(tmp_path, unit, bare))


def test_the_sparse_peak_of_an_h100_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"1979 is more than a H100-SXM can do in dense bf16.*give the dense figure, 989\.4"
    ):
        load_cluster(write(tmp_path, "989.4", "1979"))


def test_power_is_optional_and_positive(tmp_path: Path) -> None:
    assert load_cluster(write(tmp_path)).gpu.power_W is None
    with pytest.raises(ConfigError, match="power_W"):
        load_cluster(write(tmp_path, "kind =", "power_W = 0\nkind ="))


def test_gigabits_for_gigabytes_and_memory_of_a_rack_are_refused(tmp_path: Path) -> None:
    rack = '\n[[tiers]]\nname = "pod"\nsize = 64\nbandwidth_GBps = 400.0\nlatency_us = 8.0\n'
    with pytest.raises(ConfigError, match=r"more than any NIC.*400 Gbit/s are 50 GB/s"):
        load_cluster(write(tmp_path, "latency_us = 2.0\n", "latency_us = 2.0\n" + rack))
    with pytest.raises(ConfigError, match="more than any accelerator"):
        load_cluster(write(tmp_path, "memory_GiB = 74.5", "memory_GiB = 80000.0"))
