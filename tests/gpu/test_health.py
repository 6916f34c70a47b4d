"""Health of a real GPU: NVML's counters, checked products, and the devices of a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakh.health.decisions import decide_health, evaluate_checks
from lakh.health.sources.nvml import read_gpus
from lakh.trainer.launch.restart_plan import find_devices

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_nvml_reads_every_gpu_and_a_healthy_one_is_healthy() -> None:
    readings = list(read_gpus("node", expected=torch.cuda.device_count()))
    gpus = {reading.device for reading in readings if reading.device.removeprefix("gpu").isdecimal()}
    assert gpus == {f"gpu{number}" for number in range(torch.cuda.device_count())}
    metrics = {reading.metric for reading in readings}
    assert {"gpus_missing", "ecc_uncorrectable", "pcie_lanes_missing"} <= metrics
    assert decide_health(evaluate_checks(readings)).word in ("healthy", "watch")


def test_products_of_a_gpu_are_exact() -> None:
    from lakh.trainer.product_check import count_wrong_products

    done, wrong = count_wrong_products(torch.device("cuda", 0), 1.0)
    assert done > 1
    assert wrong == 0


def test_a_restart_uses_the_gpus_that_the_driver_lists(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    assert find_devices(tmp_path / "0", range(count + 1), on_gpus=True) == list(range(count))
