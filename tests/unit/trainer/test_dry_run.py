"""lakh train --dry-run: recipes fit on their cluster, and a run that does not fit gets the nearest settings that do."""

import json

import pytest

from lakh.cli.main import main

SIZES = ["code_160m", "code_1b", "code_3b", "code_7b"]


def dry_run(capsys: pytest.CaptureFixture[str], recipe: str, *arguments: str) -> tuple[int, dict]:
    with pytest.raises(SystemExit) as ended:
        main(["train", recipe, "--dry-run", "--json", *arguments])
    return int(ended.value.code or 0), json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("size", SIZES)
def test_every_size_fits_on_a_node_of_its_cluster(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, plan = dry_run(capsys, f"recipes/sizes.py:{size}", *([] if size == "code_160m" else ["--nproc", "8"]))
    assert code == 0
    assert plan["memory_bytes_per_gpu"] < plan["memory_limit_bytes"]
    assert plan["step_s_low"] <= plan["step_s"] <= plan["step_s_high"]


def test_a_run_that_needs_a_node_is_refused_on_one_gpu_with_that_advice(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = dry_run(capsys, "recipes/sizes.py:code_7b")
    assert code == 2
    assert "most of it optimizer" in answer["error"]["found"]
    assert answer["error"]["todo"].endswith("--nproc 8")


def test_a_run_that_does_not_fit_on_a_node_gets_no_such_advice(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = dry_run(capsys, "recipes/sizes.py:code_7b", "--set", "model.layers=320")
    assert code == 2
    assert "--nproc" not in answer["error"]["todo"]


def test_a_run_that_cannot_be_trained_is_not_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = dry_run(capsys, "laptop", "--set", "mesh.pp=2", "--nproc", "2")
    assert code == 2
    assert "model.tied makes them one matrix" in answer["error"]["found"]


@pytest.mark.parametrize(
    ("recipe", "sets", "found"),
    [
        ("laptop", [], "cluster.gpu.kind is cpu"),
        ("node", ["train.device=cpu"], "train.device is cpu"),
        ("node", ["train.fp8_recipe=rowwise", "train.precision=f32"], "rowwise products have bf16 results"),
        ("node", ["model.ffn=5001"], "must be multiples of 16"),
        ("node", ["train.num_layers_at_start_in_bf16=99"], "99 first and 0 last layers"),
    ],
)
def test_fp8_is_refused_where_the_run_would_refuse_it(
    recipe: str, sets: list[str], found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word for one in ("train.fp8=true", *sets) for word in ("--set", one)]
    code, answer = dry_run(capsys, recipe, "--nproc", "8" if recipe == "node" else "1", *given)
    assert code == 2
    assert found in answer["error"]["found"]


def test_fp8_is_estimated_for_gpus_that_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, plan = dry_run(capsys, "node", "--nproc", "8", "--set", "train.fp8=true")
    assert code == 0
    assert plan["step_s"] < dry_run(capsys, "node", "--nproc", "8")[1]["step_s"]
