"""The plan commands: fields of their JSON, exit codes and error messages."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lakh.spec import load_run

ASK = ["--model", "llama3-8b", "--cluster", "h100-pod", "--gpus", "64", "--batch", "256"]
Lakh = Callable[..., tuple[int, str, str]]
Json = Callable[[str], dict]


def test_estimate_returns_its_fields(lakh: Lakh, last_line: Json) -> None:
    code, out, _ = lakh("plan", "estimate", *ASK, "--tp", "2", "--recompute", "full", "--tokens", "1e12", "--json")
    data = last_line(out)
    assert code == 0
    assert data["fits"] is True
    assert {"binds", "step_s", "tflops_per_gpu", "mfu", "tok_per_s", "memory_bytes", "cost", "error_bar"} <= set(data)
    assert data["memory_bytes"]["total"] < data["memory_bytes"]["limit"]
    assert data["cost"]["run_usd"] == pytest.approx(data["cost"]["run_gpu_hours"] * data["cost"]["usd_per_gpu_hour"])
    assert data["error_bar"]["heldout_n"] > 0


def test_options_of_a_layout_change_what_they_name(lakh: Lakh, last_line: Json) -> None:
    def ask(*more: str) -> dict:
        return last_line(lakh("plan", "estimate", *ASK, "--pp", "4", *more, "--json")[1])

    plain = ask()
    assert ask("--schedule", "zb-h1")["step_parts_s"]["bubble_s"] < plain["step_parts_s"]["bubble_s"]
    assert ask("--offload")["memory_bytes"]["optimizer"] == 0
    assert ask("--optimizer", "adamw-8bit")["memory_bytes"]["optimizer"] == plain["memory_bytes"]["optimizer"] / 2
    assert ask("--precision", "fp8")["step_s"] < plain["step_s"]
    assert ask("--micro-batch", "2")["layout"]["micro_batches"] == plain["layout"]["micro_batches"] / 2
    assert ask("--attention", "older")["step_s"] > plain["step_s"]
    assert [ask("--zero", str(n))["layout"]["zero"] for n in (0, 1, 2)] == [0, 1, 2]
    assert ask("--shard", "8")["layout"]["zero"] == 3
    assert ask("--zero", "0")["memory_bytes"]["optimizer"] > plain["memory_bytes"]["optimizer"]
    assert ask("--schedule", "gpipe")["memory_bytes"]["activations"] > plain["memory_bytes"]["activations"]
    usual, lean = (ask("--chunks", "4", "--schedule", name) for name in ("interleaved", "lean"))
    assert lean["memory_bytes"]["activations"] < usual["memory_bytes"]["activations"]
    assert lean["layout"]["schedule"] == "lean"


def test_expert_overlap_reduces_exposed_exchange_time(lakh: Lakh, last_line: Json) -> None:
    words = ["--model", "qwen3-30b-a3b", "--cluster", "h100-pod", "--gpus", "16", "--batch", "256", "--ep", "16"]
    plain, hidden = (
        last_line(lakh("plan", "estimate", *words, "--sequence", "4096", *more, "--json")[1])
        for more in ([], ["--expert-overlap"])
    )
    assert 0 < hidden["step_parts_s"]["expert_s"] < plain["step_parts_s"]["expert_s"]
    assert hidden["layout"]["expert_overlap"] is True


def test_an_estimate_that_does_not_fit_exits_with_2_and_names_the_nearest_that_fits(
    lakh: Lakh, last_line: Json
) -> None:
    big = ["--model", "code-70b", "--cluster", "8xh100", "--gpus", "8", "--batch", "64"]
    code, out, _ = lakh("plan", "estimate", *big, "--json")
    assert code == 2
    assert last_line(out)["fits"] is False
    assert "most of it" in last_line(out)["binds"]
    code, out, _ = lakh("plan", "estimate", *big)
    assert code == 2
    assert "nearest that fits" in out


def test_a_search_without_a_feasible_layout_returns_the_reason(lakh: Lakh, last_line: Json) -> None:
    code, out, _ = lakh("plan", "search", "--model", "llama3-405b", "--cluster", "8xh100", "--gpus", "8", "--json")
    assert code == 0
    assert last_line(out)["best"] is None
    assert "nothing fits" in last_line(out)["why"]


def test_a_search_writes_a_run_that_loads(lakh: Lakh, last_line: Json, tmp_path: Path) -> None:
    file, picture = tmp_path / "run.toml", tmp_path / "front.svg"
    pytest.importorskip("matplotlib", reason="install the planner's extra: pip install 'lakh[plan]'")
    code, out, _ = lakh("plan", "search", "node", "--gpus", "8", "--out", str(file), "--plot", str(picture), "--json")
    data = last_line(out)
    assert code == 0
    assert {"searched", "seconds", "best", "pareto", "why"} <= set(data)
    run = load_run(file)
    assert run.accumulation(8) >= 1
    assert picture.read_text().lstrip().startswith("<?xml")
    code, out, _ = lakh("plan", "estimate", str(file), "--json")
    assert code == 0
    assert last_line(out)["step_s"] == pytest.approx(data["best"]["step_s"], rel=0.1)


def test_a_run_with_biased_experts_is_planned_and_not_trained(lakh: Lakh, last_line: Json, tmp_path: Path) -> None:
    dense = lakh("config", "show", "node")[1]
    file = tmp_path / "run.toml"
    file.write_text(
        dense.replace("[mesh]", "[model.experts]\ncount = 32\ntop_k = 4\nffn = 1024\nbias = true\n\n[mesh]", 1)
    )
    code, out, _ = lakh("plan", "estimate", str(file), "--gpus", "8", "--json")
    assert code == 0
    found = last_line(out)
    code, out, _ = lakh("plan", "search", str(file), "--gpus", "8", "--json")
    best = last_line(out)["best"]
    assert best["ep"] > 1
    assert best["step_s"] < found["step_s"]
    code, _, err = lakh("plan", "search", str(file), "--gpus", "8", "--out", str(tmp_path / "plan.toml"))
    assert code == 2
    assert "planned (lakh plan estimate) and not trained" in err.replace("\n", " ")


@pytest.mark.slow
def test_goodput_returns_its_fields(lakh: Lakh, last_line: Json, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="install the planner's extra: pip install 'lakh[plan]'")
    picture = tmp_path / "g.png"
    code, out, _ = lakh("plan", "goodput", "--interval", "600", "--runs", "200", "--plot", str(picture), "--json")
    data = last_line(out)
    assert code == 0
    assert data["goodput"] > 0.9
    assert data["interval_s"] == 600
    assert data["goodput"] + sum(data["badput"].values()) == pytest.approx(1)
    assert data["failures_per_day"] == pytest.approx(7.76, abs=0.2)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_cost_of_a_deadline_and_of_a_cluster(lakh: Lakh, last_line: Json) -> None:
    job = ["plan", "cost", "--model", "code-70b", "--tokens", "1.4e12", "--tflops", "214", "--goodput", "1"]
    code, out, _ = lakh(*job, "--days", "21", "--json")
    data = last_line(out)
    assert code == 0
    assert 1514 <= data["gpus_net"] <= 1600  # attention and logits are counted too
    assert data["usd"] == pytest.approx(sum(data["usd_parts"].values()))
    code, out, _ = lakh(*job, "--gpus", "100000", "--owned", "--json")
    assert last_line(out)["days"] < 0.4
    assert lakh(*job)[0] == 2


@pytest.mark.slow
def test_audit_hall_and_validate_return_their_fields(lakh: Lakh, last_line: Json, points_file: Path) -> None:
    code, out, _ = lakh("plan", "audit", "--seed", "--json")
    assert code == 0
    claims = last_line(out)["claims"]
    assert len(claims) >= 22
    assert {"id", "claim", "stated", "right", "verdict", "reason"} <= set(claims[0])
    assert lakh("plan", "audit")[0] == 2
    code, out, _ = lakh("plan", "hall", "--json")
    assert code == 0
    assert last_line(out)["fills"][0]["gpus"] > 0
    code, out, _ = lakh("plan", "validate", "--points", str(points_file), "--json")
    data = last_line(out)
    assert code == 0
    assert {"n", "mape", "median_ape", "p95_ape", "bias", "kendall_tau", "by_source"} <= set(data)
    assert data["unseen"]["n"] < data["n"]
    assert sum(data["left_out"].values()) > 0
    for words in (["audit", "--seed"], ["hall", "--map"], ["validate", "--points", str(points_file), "--worst", "3"]):
        code, out, _ = lakh("plan", *words)
        assert code == 0
        assert out.strip()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["estimate"], "give a run, or --model"),
        (["estimate", "node", "--model", "llama3-8b"], "give one of them"),
        (["estimate", *ASK[:4], "--gpus", "99999999"], "request fewer"),
        (["estimate", "--model", "lama3-8b", "--cluster", "h100-pod", "--gpus", "8"], "did you mean llama3-8b"),
        (["estimate", *ASK, "--tp", "3"], "not a multiple of tp x pp x cp"),
        (["estimate", *ASK, "--cluster", "nowhere"], "no such file"),
        (["estimate", *ASK, "--pp", "4", "--schedule", "lean"], "give --chunks 2 or more"),
        (["estimate", *ASK, "--pp", "4", "--chunks", "2", "--schedule", "gpipe"], "omit --chunks"),
        (["estimate", *ASK, "--zero", "2", "--shard", "8"], "omit --shard"),
        (["estimate", *ASK, "--ep", "8"], "does not divide 1 experts"),
        (["estimate", *ASK, "--plot", "x.pdf"], "neither .png nor .svg"),
        (
            ["estimate", "--model", "llama3-8b", "--cluster", "a100-pod", "--gpus", "8", "--precision", "fp8"],
            "A100-SXM",
        ),
        (
            ["search", "--model", "llama3-8b", "--cluster", "a100-pod", "--gpus", "8", "--precision", "nvfp4"],
            "A100-SXM",
        ),
        (["estimate", *ASK, "--precision", "nvfp4"], "choose from: bf16, fp8"),
        (["estimate", *ASK, "--pp", "4", "--chunks", "100", "--schedule", "interleaved"], "choose one of 2, 4, 8"),
        (["estimate", *ASK, "--chunks", "2"], "has no pipeline"),
        (["cost", "--model", "llama3-8b", "--tokens", "1e12", "--days", "9", "--tflops", "5000"], "505% of the dense"),
        (["search", *ASK, "--days", "3"], "give --tokens too"),
        (["search", *ASK, "--also-gpus", "a,b"], "not a list of whole numbers"),
        (["goodput", "--failures", "none"], "is not in failures.toml"),
        (["goodput", "--interval", "-1"], "interval_s: -1.0 is not positive"),
        (["validate", "--points", "/nowhere.csv"], "no such file"),
        (["hall", "/nowhere.toml"], "no such file"),
    ],
)
def test_invalid_options_are_refused_with_a_reason(words: list[str], told: str, lakh: Lakh) -> None:
    code, _, err = lakh("plan", *words)
    assert code == 2
    assert told in err.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpus", "batch"), [("llama3-8b", 16, 64), ("llama3-70b", 256, 512), ("mixtral-8x7b", 64, 256)]
)
def test_the_winner_of_a_search_can_be_estimated(
    model: str, gpus: int, batch: int, lakh: Lakh, last_line: Json
) -> None:
    words = [
        "--model",
        model,
        "--cluster",
        "h100-pod",
        "--gpus",
        str(gpus),
        "--batch",
        str(batch),
        "--sequence",
        "8192",
    ]
    found = last_line(lakh("plan", "search", *words, "--json")[1])
    command = found["command"].split()
    assert command[0] == "lakh"
    again = last_line(lakh(*command[1:], "--json")[1])
    assert again["step_s"] == pytest.approx(found["best"]["step_s"], rel=1e-6)
    assert again["memory_bytes"]["total"] == pytest.approx(found["best"]["memory_bytes"], rel=1e-6)


@pytest.mark.slow
def test_a_number_of_gpus_that_divides_badly_has_a_hint(lakh: Lakh, last_line: Json) -> None:
    words = ["plan", "search", "--model", "llama3-405b", "--cluster", "h100-pod", "--batch", "2048", "--json"]
    bad = last_line(lakh(*words, "--gpus", "800")[1])
    assert "on 768 GPUs it takes" in bad["hint"]
    assert last_line(lakh(*words, "--gpus", "768")[1])["hint"] is None


@pytest.mark.slow
def test_goodput_of_ten_million_gpus_takes_seconds(lakh: Lakh, last_line: Json) -> None:
    words = ["plan", "goodput", "--gpus", "10000000", "--interval", "5", "--stall", "0.1", "--restart", "1", "--detect"]
    data = last_line(lakh(*words, "1", "--runs", "100", "--json")[1])
    assert data["simulated_days"] < data["days"]
    assert data["goodput"] == pytest.approx(data["closed_forms"]["daly"], abs=0.02)


@pytest.mark.slow
def test_fabric_prints_what_binds(lakh: Lakh, last_line: Json, tmp_path: Path) -> None:
    words = ["plan", "fabric", "--cluster", "llama3-24k-roce", "--gpus", "256", "--qps", "4", "--order", "random"]
    data = last_line(lakh(*words, "--routing", "e-ecmp", "--json")[1])
    assert {"flows", "seconds", "min_fraction", "mean_fraction", "binding_links", "time_s"} <= data.keys()
    assert data["flows"] == 256 * 4
    assert 0 < data["min_fraction"] < data["mean_fraction"] < 1
    assert data["time_s"] > data["ideal_s"]
    plot = tmp_path / "load.svg"
    code, out, _ = lakh(*words, "--jobs", "2", "--plot", str(plot))
    assert code == 0
    assert "uplink" in out
    assert "GB/s" in out
    assert plot.read_text().lstrip().startswith("<?xml")


@pytest.mark.slow
def test_planning_imports_neither_torch_nor_numba_nor_scipy() -> None:
    blocked = "import sys\nfor name in ('torch', 'numba', 'scipy', 'matplotlib'):\n    sys.modules[name] = None\n"
    words = ["plan", "search", *ASK, "--json"]
    program = f"{blocked}from lakh.cli import main\nmain({words!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    plot = [*words, "--plot", "front.png"]
    program = f"{blocked}from lakh.cli import main\nmain({plot!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "pip install 'lakh[plan]'" in done.stderr


@pytest.mark.slow
def test_a_hall_can_be_read_on_a_narrow_terminal(lakh: Lakh, last_line: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = lakh("plan", "hall")
    fills = last_line(lakh("plan", "hall", "--json")[1])["fills"]
    assert len(fills) >= 4
    for fill in fills:
        assert f"{fill['gpus']:,}" in out
        assert f"{fill['scenario']}: {fill['binds']} binds" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["validate", "--transfer", "nobody"],
        ["validate", "--cross-validate", "nobody"],
        ["validate", "--cross-validate", "vTrain", "--repeats", "0"],
    ],
)
def test_an_unknown_source_is_an_error(arguments: list[str], lakh: Lakh, points_file: Path) -> None:
    code, _, err = lakh("plan", *arguments, "--points", str(points_file))
    assert code == 2
    assert "names no source" in err or "--repeats" in err


def test_options_other_than_degrees_keep_the_mesh_of_a_run(lakh: Lakh, last_line: Json) -> None:
    def layout(*more: str) -> dict:
        return last_line(lakh("plan", "estimate", "recipes/cluster.py:code_70b_24k", *more, "--json")[1])["layout"]

    own = layout()
    assert own["tp"] == 8
    assert layout("--recompute", "half") == own | {"recompute": "half"}
    assert layout("--tp", "8", "--pp", "2")["shard"] != own["shard"]  # a degree stands for a whole new mesh


def test_an_estimate_prints_degrees_and_enabled_options(lakh: Lakh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = ["plan", "estimate", "--model", "llama3-8b", "--cluster", "8xh100", "--gpus", "8", "--tp", "2", "--offload"]
    _, out, _ = lakh(*words, "--recompute", "full", "--batch", "64")
    (layout,) = [line.split(maxsplit=1)[1].strip() for line in out.splitlines() if line.startswith("  layout")]
    assert layout.split(", ")[:2] == ["tp 2", "dp 4"]
    assert {"micro_batch 1", "recompute full", "offload"} <= set(layout.split(", "))
    assert not any(word in layout for word in ("False", "True", "none", "pp", "adapters"))
    assert [line.split() for line in out.splitlines() if line.startswith("  GPUs")] == [["GPUs", "8"]]
