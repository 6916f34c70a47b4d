"""Factors of programs: published ones, lakh's own from its measured runs, and a user's from a run folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lakh import config, events
from lakh.errors import DataError, UserError
from lakh.planner.calibration.fit import calibration_for
from lakh.planner.calibration.own_runs import MeasuredRun, own_factors, read_runs
from lakh.planner.calibration.program_factor import (
    LAKH,
    SHIPPED,
    OwnFactor,
    load_own_factors,
    own_factors_to_toml,
    program_factor,
)
from lakh.planner.execution_plan import plan_of_run
from lakh.planner.timing.step_time import GPU_PARTS, step_time
from lakh.planner.validation.own_run_errors import own_run_errors
from lakh.spec.cluster import load_cluster
from lakh.spec.model import Model
from lakh.spec.run import Data, Run, Training

Lakh = Callable[..., tuple[int, str, str]]
Json = Callable[[str], Any]
RUNS = SHIPPED.with_name("lakh_runs.csv")


def small_run(cluster: str = "h200") -> Run:
    model = Model(layers=12, width=1024, heads=16, kv_heads=16, ffn=2816, vocab=32000, context=2048)
    data = Data(sequence=2048, batch=16, micro_batch=2)
    return Run(name="small", model=model, cluster=load_cluster(cluster), data=data, train=Training(precision="bf16"))


def measured(run: Run, gpus: int, on_gpu: float) -> MeasuredRun:
    """A run whose work on the GPU took `on_gpu` times the prediction."""
    plan = plan_of_run(run, gpus)
    step = step_time(run.model, plan, run.cluster, calibration_for(run.cluster.gpu.family)[0].efficiency)
    work_s = sum(float(getattr(step, name)) for name in GPU_PARTS)
    return MeasuredRun("made", run.model, plan, run.cluster, float(step.total_s) + (on_gpu - 1) * work_s, 9)


def test_the_shipped_factor_follows_from_the_shipped_runs() -> None:
    runs = read_runs(RUNS)
    assert len(runs) == 11
    shipped, found = load_own_factors(SHIPPED), own_factors(runs)
    assert found.keys() == shipped.keys() == {"H200"}
    assert shipped["H200"].on_gpu == pytest.approx(found["H200"].on_gpu, abs=1e-4)


def test_the_factor_of_own_runs_leaves_communication_as_predicted() -> None:
    one, eight = measured(small_run(), 1, 0.8), measured(small_run("8xh100"), 8, 1.3)
    assert one.on_gpu == pytest.approx(0.8)
    assert eight.on_gpu == pytest.approx(1.3)
    found = own_factors([one, eight])
    factor = program_factor(LAKH, "H100", calibration_for("H100")[0], found)
    step = eight.predicted()
    assert float(step.data_s) > 0
    assert factor.apply(step).data_s == step.data_s
    assert float(factor.apply(step).total_s) == pytest.approx(eight.step_s)


def test_a_gpu_type_without_runs_has_factor_one_and_says_so() -> None:
    found = program_factor(LAKH, "A100", calibration_for("A100")[0])
    assert (found.on_gpu, found.elsewhere) == (1.0, 1.0)
    assert "no runs of lakh were measured on A100" in found.basis


def test_published_programs_scale_the_whole_step() -> None:
    calibration = calibration_for("H100")[0]
    found = program_factor("nanotron", "H100", calibration)
    assert found.on_gpu == found.elsewhere == calibration.program_factors["nanotron"]
    with pytest.raises(UserError, match="choose from: lakh"):
        program_factor("abacus", "H100", calibration)


def test_a_run_folder_gives_the_median_of_steps_after_the_warm_up(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").write_text(config.to_toml(small_run()))
    write_steps(folder, [9.0, 5.0, 5.0, 0.5, 0.4, 0.6, 0.5])
    (run,) = read_runs(folder)
    assert (run.step_s, run.steps, int(run.plan.gpus)) == (0.5, 4, 1)


def test_a_run_with_too_few_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no run\.toml"):
        read_runs(tmp_path)
    (tmp_path / "run.toml").write_text(config.to_toml(small_run()))
    write_steps(tmp_path, [1.0] * 5)
    with pytest.raises(UserError, match="2 measured steps"):
        read_runs(tmp_path)


def test_a_step_shorter_than_its_communication_is_refused() -> None:
    run = replace(measured(small_run("8xh100"), 8, 1.0), step_s=1e-9)
    with pytest.raises(UserError, match="less time than its predicted communication"):
        own_factors([run])


def test_a_file_of_factors_round_trips_and_damage_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "factors.toml"
    factors = {"H200": OwnFactor(on_gpu=0.75, low=0.5, high=1.0, runs=3)}
    file.write_text(own_factors_to_toml(factors))
    assert load_own_factors(file) == factors
    file.write_text("[H200]\nspeed = 2\n")
    with pytest.raises(DataError, match="has no factors of runs"):
        load_own_factors(file)
    with pytest.raises(UserError, match="no such file"):
        load_own_factors(tmp_path / "none.toml")


def test_an_estimate_uses_the_factors_of_a_calibration_to_runs(lakh: Lakh, last_line: Json, tmp_path: Path) -> None:
    folder, file = tmp_path / "run", tmp_path / "factors.toml"
    folder.mkdir()
    (folder / "run.toml").write_text(config.to_toml(small_run()))
    write_steps(folder, [1.0] * 8)
    code, out, _ = lakh("plan", "calibrate", "--from", str(folder), "--out", str(file), "--json")
    assert code == 0
    assert last_line(out)["runs"][0]["measured_s"] == 1.0
    code, out, _ = lakh("plan", "estimate", str(folder / "run.toml"), "--factors", str(file), "--json")
    assert code == 0
    assert last_line(out)["step_s"] == pytest.approx(1.0, rel=1e-3)


def test_an_estimate_of_a_published_program_uses_its_settings_and_factor(lakh: Lakh, last_line: Json) -> None:
    words = ["plan", "estimate", "--model", "llama3-8b", "--cluster", "8xh100", "--gpus", "8", "--shard", "8"]
    found = {}
    for program in ("lakh", "nanotron", "torchtitan"):
        code, out, _ = lakh(*words, "--batch", "64", "--program", program, "--json")
        found[program] = last_line(out)
        assert code in (0, 2)
        assert any(note.startswith(f"program {program}: factor") for note in found[program]["notes"])
    assert found["torchtitan"]["memory_bytes"]["total"] != found["lakh"]["memory_bytes"]["total"]
    assert found["nanotron"]["step_s"] > found["lakh"]["step_s"]
    code, _, err = lakh("plan", "estimate", "node", "--program", "nemo")
    assert code == 2
    assert "a run is executed by lakh" in err


def test_the_shipped_points_can_be_validated_by_anyone(lakh: Lakh, last_line: Json) -> None:
    code, out, _ = lakh("plan", "validate", "--unseen", "--json")
    assert code == 0
    data = last_line(out)
    assert data["n"] == 427
    assert data["mape"] < 0.08
    assert data["coverage"]["all"] == pytest.approx(0.8, abs=0.04)


def write_steps(folder: Path, seconds: list[float]) -> None:
    with events.EventLog(folder, rank=0) as log:
        log.write(
            events.RunStarted(
                world=1, attempt=0, backend="gloo", device="cuda", parameters=1, sequence_index=0, run_sha256="",
                data_sha256="",
            )
        )  # fmt: skip
        for step_s in seconds:
            log.write(
                events.StepDone(
                    loss=1.0, lr=1.0, grad_norm=1.0, tokens=1, tokens_per_s=1.0, step_s=step_s, data_wait_s=0.0
                )
            )


def test_own_runs_are_predicted_without_themselves() -> None:
    found = own_run_errors()
    fitted = [row for row in found["rows"] if row["basis"].startswith("factor of the other")]
    later = [row for row in found["rows"] if row["basis"].startswith("shipped")]
    assert {row["gpu"] for row in found["rows"]} == {"H200"}
    assert not {row["run"] for row in fitted} & {row["run"] for row in later}
    for rows, basis in ((fitted, "factor of the other runs"), (later, "shipped factor, measured later")):
        assert found["scores"][basis]["n"] == len(rows)
        assert found["scores"][basis]["mape"] == pytest.approx(sum(abs(row["error"]) for row in rows) / len(rows))
    assert found["scores"]["factor of the other runs"]["mape"] < 0.08
    assert found["scores"]["shipped factor, measured later"]["mape"] < 0.12
