"""Calculon as a peer: which rows it can describe, in which words, and what happens without it."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from bench.plan import calculon
from bench.plan.calculon import cannot_describe, compare, one_step

from lakh.errors import UserError
from lakh.planner.calibration.fit import is_held_out
from lakh.planner.calibration.measured_points import MeasuredPoints

SYSTEM = {
    "matrix": {"float16": {"tflops": 312}},
    "mem1": {"GiB": 80, "GBps": 2048},
    "mem2": {"GiB": 512, "GBps": 32},
    "networks": [{"bandwidth": 300, "size": 8}, {"bandwidth": 25, "size": 65536}],
}
PACKAGE = """
class System:
    def __init__(self, cfg): self.cfg = cfg
"""
# As much of Calculon's interface as is called: a step of 6 x FLOPs at the system's matrix rate, however it is laid out.
LLM = """
class Llm:
    class Error(Exception): pass
    class Application:
        def __init__(self, cfg): self.cfg = cfg
    class Execution:
        def __init__(self, cfg): self.cfg = cfg
        @staticmethod
        def from_json(cfg): return Llm.Execution(cfg)
    def __init__(self, app, log): self.app = app.cfg
    def compile(self, system, exe):
        self.exe, self.system = exe.cfg, system.cfg
        if self.exe["tensor_par"] > 8: raise Llm.Error("too wide")
    def run(self, system): pass
    def get_total_time(self):
        a, e = self.app, self.exe
        weights = a["num_blocks"] * (4 * a["hidden"] ** 2 + 2 * a["hidden"] * a["feedforward"])
        rate = self.system["matrix"]["float16"]["tflops"] * 1e12
        return 8 * weights * e["batch_size"] * a["seq_size"] / e["num_procs"] / rate
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A stand-in with Calculon's interface and folders: its repository is not at hand where tests run."""
    for folder in ("calculon/llm", "models", "examples", "systems"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "calculon/__init__.py").write_text(PACKAGE)
    (tmp_path / "calculon/llm/__init__.py").write_text(LLM)
    for name in calculon.SYSTEMS.values():
        (tmp_path / "systems" / name).write_text(json.dumps(SYSTEM))
    model, execution, _ = calculon.EXAMPLE
    application = {"hidden": 64, "feedforward": 256, "seq_size": 32, "num_blocks": 2}
    (tmp_path / "models" / model).write_text(json.dumps(application))
    (tmp_path / "examples" / execution).write_text(json.dumps({"tensor_par": 4, "batch_size": 8, "num_procs": 8}))
    return tmp_path


@pytest.mark.slow
def test_only_rows_that_calculon_can_describe_are_compared(points: MeasuredPoints) -> None:
    by_source = {p.source: cannot_describe(p) for p in points.kept}
    assert by_source["vTrain multi-node"] is None
    assert by_source["Korthikanti 2022"] is None
    assert by_source["llm-foundry"] == "sharded weights or context parallelism"
    assert {p.source for p in points.kept if cannot_describe(p) is None and p.kind == "H100"} >= {
        "Megatron-Core 0.8 H100"
    }


@pytest.mark.slow
def test_both_are_compared_on_the_same_unseen_rows(points: MeasuredPoints, checkout: Path) -> None:
    pytest.importorskip("scipy", reason="install the planner's extra: pip install 'lakh[plan]'")
    rows = [p for p in points.kept if p.source == "vTrain multi-node"]
    found = compare(rows, str(checkout))
    assert [row["system"] for row in found.rows] == [
        "lakh", "calculon, as shipped", "calculon, tuned on the same rows"
    ]  # fmt: skip
    ours, shipped, tuned = found.rows
    assert ours["n"] == shipped["n"] == tuned["n"] > 5
    assert tuned["mape"] < shipped["mape"]  # its matrix rate was a peak
    assert found.scales["A100"][0] < 0.7


def test_a_row_that_it_refuses_is_counted_and_left_out_for_both(points: MeasuredPoints, checkout: Path) -> None:
    rows = [p for p in points.kept if p.source == "vTrain multi-node" and is_held_out(p.config)]
    wider = replace(rows[0], candidates=(replace(rows[0].plan, tp=16.0),))
    found = compare([wider, *rows[1:]], str(checkout), tune=False)
    assert found.left_out["refused by Calculon"] == 1
    assert {row["n"] for row in found.rows} == {len(rows) - 1}


def test_one_configuration_is_timed(checkout: Path) -> None:
    assert one_step(str(checkout), 3)["each_s"] > 0


def test_a_folder_that_is_not_a_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a checkout of Calculon"):
        one_step(str(tmp_path), 3)


def test_the_error_of_calculon_is_shown(checkout: Path) -> None:
    (checkout / "calculon/llm/__init__.py").write_text("raise RuntimeError('no psutil here')")
    with pytest.raises(UserError, match="no psutil here"):
        one_step(str(checkout), 3)
    assert "calculon.llm" not in sys.modules
