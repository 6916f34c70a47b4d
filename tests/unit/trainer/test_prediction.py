"""The predicted step time of a run: of GPUs that the planner knows only, and with a reason otherwise."""

from __future__ import annotations

import dataclasses
import tomllib
from importlib.resources import files

import pytest

from lakh.planner.estimate import estimate
from lakh.spec import Data, Run, load_run
from lakh.spec.cluster import load_cluster
from lakh.trainer.observability.prediction import predict_step

H200 = "NVIDIA H200"


@pytest.fixture(scope="module")
def run() -> Run:
    return dataclasses.replace(load_run("laptop", ()), cluster=load_cluster("h200"))


def test_a_gpu_of_the_settings_has_the_planner_s_estimate(run: Run) -> None:
    found, expected = predict_step(run, 1, H200, step=7), estimate(run, 1)
    assert (found.step, found.step_s) == (7, expected.step_s)
    assert found.low_s is not None
    assert found.high_s is not None
    assert found.low_s < expected.step_s < found.high_s
    factors = tomllib.loads((files("lakh.planner") / "data" / "lakh_factors.toml").read_text())
    assert f"factor {factors['H200']['on_gpu']:.3f}" in found.basis


@pytest.mark.parametrize(
    ("device", "reason"),
    [("", "this run is on a CPU"), ("NVIDIA A100-SXM4-80GB", "has H200, this run is on NVIDIA A100-SXM4-80GB")],
)
def test_where_the_planner_knows_nothing_there_is_a_reason(run: Run, device: str, reason: str) -> None:
    found = predict_step(run, 1, device)
    assert (found.step_s, found.low_s, found.high_s) == (None, None, None)
    assert reason in found.basis


def test_settings_that_the_planner_refuses_are_a_reason(run: Run) -> None:
    odd = dataclasses.replace(run, data=dataclasses.replace(run.data, batch=run.data.micro_batch * 3))
    assert isinstance(odd.data, Data)
    found = predict_step(odd, 2, H200)
    assert found.step_s is None
    assert found.basis.startswith("the planner refuses these settings: ")
