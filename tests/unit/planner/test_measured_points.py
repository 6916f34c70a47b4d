"""Published figures become seconds per step by their own source's rule, and nothing is dropped silently."""

import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from lakh.errors import DataError, UserError
from lakh.planner.calibration.measured_points import COLUMNS, MeasuredPoint, MeasuredPoints, read_points
from lakh.planner.execution_plan import ExecutionPlan

ROW = {
    "id": "x", "source": "vTrain multi-node", "gpu": "A100-80", "n_gpus": "64", "gpus_per_node": "8",
    "interconnect": "NVLink3; 800 Gb/s per node", "hidden": "3072", "layers": "30", "heads": "32", "kv_heads": "32",
    "ffn": "12288", "vocab": "50257", "seq": "2048", "global_batch": "512", "micro_batch": "8", "tp": "1", "pp": "1",
    "cp": "1", "ep": "1", "fsdp": "1", "vpp": "1", "recompute": "full", "precision": "fp16", "metric": "step_s",
    "flops_convention": "", "value": "3.5", "note": "model=m",
}  # fmt: skip


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., MeasuredPoints]:
    def run(*rows: dict[str, str]) -> MeasuredPoints:
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS)
        writer.writeheader()
        writer.writerows({**ROW, **row} for row in rows)
        file = tmp_path / "points.csv"
        file.write_text(text.getvalue())
        return read_points(file)

    return run


def one(points: MeasuredPoints) -> MeasuredPoint:
    (point,) = points.kept
    return point


def test_every_metric_becomes_seconds_per_step(read: Callable[..., MeasuredPoints]) -> None:
    tokens = 512 * 2048 / 64
    assert one(read({})).step_s == 3.5
    assert one(read({"metric": "tok_s_per_gpu", "value": "1000"})).step_s == pytest.approx(tokens / 1000)
    linear = 6 * 30 * (4 * 3072**2 + 2 * 3072 * 12288) + 6 * 50257 * 3072
    full = linear + 12 * 30 * 3072 * 2048
    given = {"metric": "tflops_per_gpu", "flops_convention": "model", "value": "100"}
    assert one(read(given)).step_s == pytest.approx(tokens * full / 100e12)
    assert one(read({"metric": "mfu", "flops_convention": "model", "value": "50"})).step_s == pytest.approx(
        tokens * full / 156e12
    )
    causal = linear + 6 * 30 * 3072 * 2048
    bridge = {**given, "source": "Megatron-Bridge", "note": "model=gpt"}
    assert one(read(bridge)).step_s == pytest.approx(tokens * causal / 100e12)
    named = {**bridge, "note": "model=gpt; 51.5 GFLOP/token"}
    assert one(read(named)).step_s == pytest.approx(tokens * 51.5e9 / 100e12)


def test_hardware_flops_count_four_passes_over_the_blocks(read: Callable[..., MeasuredPoints]) -> None:
    row = {"source": "Megatron-LM 2021", "metric": "tflops_per_gpu", "flops_convention": "hardware", "value": "140"}
    flops = 96 * 512 * 2048 * 30 * 3072**2 * (1 + 2048 / (6 * 3072) + 50257 / (16 * 30 * 3072))
    assert one(read(row)).step_s == pytest.approx(flops / (64 * 140e12))


def test_an_unstated_micro_batch_is_tried_in_several_sizes(read: Callable[..., MeasuredPoints]) -> None:
    sizes = [plan.micro_batch for plan in one(read({"micro_batch": ""})).candidates]
    assert sizes == [1, 2, 4, 8]
    assert len(one(read({})).candidates) == 1


def test_rows_that_cannot_be_planned_are_counted_with_their_reason(read: Callable[..., MeasuredPoints]) -> None:
    odd = [{"precision": "int2"}, {"metric": "miles"}, {"recompute": "some"}, {"global_batch": ""}]
    found = read({}, {"hidden": ""}, {"note": "model=m; run level"}, {"gpu": "X1"}, *odd)
    assert len(found.kept) == 1
    assert sum(found.left_out.values()) == 7
    assert any("X1" in reason for reason in found.left_out)


def test_the_network_of_a_row_is_the_one_it_states(read: Callable[..., MeasuredPoints]) -> None:
    assert one(read({})).cluster.tiers[1].bandwidth_Bps == 12.5e9
    rails = {"interconnect": "NVLink4; 8x400 Gb/s per node class", "gpu": "H100-80"}
    assert one(read(rails)).cluster.tiers[1].bandwidth_Bps == 50e9


def test_rows_of_one_configuration_share_a_digest_across_sources(read: Callable[..., MeasuredPoints]) -> None:
    same, other, another = read({}, {"source": "Megatron-LM 2021", "value": "3.6"}, {"tp": "2"}).kept
    assert same.config == other.config != another.config


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("a,b\n1,2\n", UserError, "has no column"),
        ("", UserError, "has no column"),
        (",".join(COLUMNS) + "\n", UserError, "has no row"),
    ],
)
def test_a_file_without_points_is_refused(text: str, error: type, words: str, tmp_path: Path) -> None:
    file = tmp_path / "points.csv"
    file.write_text(text)
    with pytest.raises(error, match=words):
        read_points(file)


def test_an_error_in_a_row_names_its_line(read: Callable[..., MeasuredPoints], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 3"):
        read({}, {"n_gpus": "many"})
    binary = tmp_path / "b.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        read_points(binary)


def test_expert_settings_are_read_from_the_note(read: Callable[..., MeasuredPoints]) -> None:
    mixture = {"source": "Megatron-Bridge", "gpu": "H100-80", "precision": "bf16"}
    facts = "model=m; MoE 128 experts top-8 (ffn is the expert ffn)"

    def plan(note: str, **row: str) -> ExecutionPlan:
        return one(read({**mixture, **row, "note": f"{facts}; {note}"})).plan

    assert plan("dropless").node_dispatch == 1
    assert plan("tokendrop").node_dispatch == plan("alltoall dispatcher").node_dispatch == 0
    assert plan("EP overlap on").expert_overlap == 1
    assert plan("EP overlap off").expert_overlap == 0
    assert plan("dropless", source="vTrain multi-node").whole_experts == 0


def test_blackwell_parts_sustain_in_proportion_to_their_power_limit(read: Callable[..., MeasuredPoints]) -> None:
    speed = {}
    for gpu in ("B200", "B300", "GB200", "GB300"):
        speed[gpu] = one(read({"gpu": gpu})).cluster.gpu.sustained_FLOPs
    assert speed["B300"] / speed["B200"] == pytest.approx(1.1)
    assert speed["GB200"] / speed["B200"] == pytest.approx(1.2)
    assert speed["GB300"] / speed["GB200"] == pytest.approx(1400 / 1200)
    part = one(read({"gpu": "A100-80"})).cluster.gpu
    assert part.sustained_FLOPs == part.peak_FLOPs


@pytest.mark.parametrize(
    ("gpu", "model", "note", "precision", "cuda_graphs"),
    [
        ("GB200", "qwen3-235b-a22b", "NeMo container 26.04", "mxfp8", 1),
        ("GB200", "qwen3-235b-a22b", "NeMo container 26.06", "mxfp8", 2),
        ("B200", "qwen3-235b-a22b", "NeMo container 26.04", "mxfp8", 0),
        ("B200", "qwen3-30b-a3b", "NeMo container 26.04", "mxfp8", 1),
        ("GB200", "gpt-oss-120b", "NeMo container 26.02", "bf16", 0),
        ("GB300", "gpt-oss-120b", "NeMo container 26.02", "bf16", 1),
        ("H100-80", "qwen3-30b-a3b", "NeMo container 26.02", "fp8", 0),
    ],
)
def test_cuda_graphs_are_set_by_published_recipes(
    gpu: str, model: str, note: str, precision: str, cuda_graphs: int, read: Callable[..., MeasuredPoints]
) -> None:
    row = {"source": "Megatron-Bridge", "gpu": gpu, "precision": precision, "note": f"model={model}; {note}"}
    assert one(read(row)).plan.cuda_graphs == cuda_graphs
    assert one(read({**row, "source": "DGX Cloud benchmarking"})).plan.cuda_graphs == 0


@pytest.mark.parametrize(
    ("gpu", "model", "container", "precision", "expected"),
    [
        ("B200", "gpt-oss-120b", "26.02", "bf16", {"node_dispatch": 0, "expert_overlap": 0}),
        ("GB200", "gpt-oss-120b", "26.04", "bf16", {"node_dispatch": 1, "expert_overlap": 1}),
        ("B300", "gpt-oss-120b", "26.06", "mxfp8", {"node_dispatch": 1, "expert_overlap": 0, "fused_experts": 0}),
        ("H100-80", "qwen3-235b-a22b", "26.04", "fp8", {"node_dispatch": 0, "expert_overlap": 1, "tensor_overlap": 0}),
        ("GB300", "qwen3-30b-a3b", "26.04", "mxfp8", {"node_dispatch": 1, "expert_overlap": 0, "narrow_attention": 0}),
        ("GB300", "qwen3-30b-a3b", "26.06", "mxfp8", {"expert_overlap": 1, "fused_experts": 1, "narrow_attention": 1}),
        ("GB200", "deepseek-v3", "26.06.01", "mxfp8", {"fused_experts": 1, "narrow_attention": 0}),
        ("GB300", "llama3-70b", "26.06", "mxfp8", {"narrow_attention": 0, "gradient_bytes": 2}),
    ],
)
def test_exchange_and_kernels_are_those_of_the_release(
    gpu: str, model: str, container: str, precision: str, expected: dict[str, float],
    read: Callable[..., MeasuredPoints],
) -> None:  # fmt: skip
    note = f"model={model}; MoE 128 experts top-8; NeMo container {container}; published 1 TFLOP/s"
    plan = one(read({"source": "Megatron-Bridge", "gpu": gpu, "precision": precision, "note": note})).plan
    assert {name: getattr(plan, name) for name in expected} == expected


def test_a_page_with_the_plan_of_an_older_release_is_corrected_by_the_recipe(
    read: Callable[..., MeasuredPoints],
) -> None:
    row = {"source": "Megatron-Bridge", "gpu": "H100-80", "precision": "fp8", "n_gpus": "16", "tp": "1", "pp": "2",
           "vpp": "12", "ep": "8"}  # fmt: skip
    note = "model=qwen3-30b-a3b; MoE 128 experts top-8; NeMo container"
    before, after = (one(read({**row, "note": f"{note} {release}; published"})) for release in ("26.02", "26.02.01"))
    assert (before.plan.pp, before.plan.chunks, before.plan.ep) == (2, 12, 8)
    assert (after.plan.pp, after.plan.chunks, after.plan.ep) == (1, 1, 16)
    assert before.config == after.config  # one side of a split, whatever was corrected


def test_adapters_are_read_from_the_note(read: Callable[..., MeasuredPoints]) -> None:
    assert one(read({"note": "model=llama3-70b; LoRA; 278.8 GFLOP/token"})).plan.adapters == 1
    assert one(read({"note": "model=llama3-70b; SFT"})).plan.adapters == 0


def test_tensor_traffic_is_exposed_where_the_recipe_disables_overlap(
    read: Callable[..., MeasuredPoints],
) -> None:
    row = {"source": "DGX Cloud benchmarking", "gpu": "GB200"}
    assert one(read(row)).plan.tensor_overlap == 0
    assert one(read({**row, "gpu": "H100-80"})).plan.tensor_overlap == 1
    assert one(read({**row, "source": "Megatron-Bridge"})).plan.tensor_overlap == 1


@pytest.mark.parametrize(
    ("source", "gpu", "note", "fused"),
    [
        ("DGX Cloud benchmarking", "GB200", "model=deepseek-v3; MLA", 0),  # no fused backward pass for its heads then
        ("DGX Cloud benchmarking", "H100-80", "model=deepseek-v3; MLA", 1),
        ("DGX Cloud benchmarking", "GB200", "model=llama3-405b", 1),
        ("Megatron-Bridge", "GB200", "model=deepseek-v3; MLA; NeMo container 25.09", 1),
    ],
)
def test_early_containers_on_blackwell_do_not_fuse_latent_attention(
    source: str, gpu: str, note: str, fused: int, read: Callable[..., MeasuredPoints]
) -> None:
    plan = one(read({"source": source, "gpu": gpu, "note": note, "recompute": "", "precision": "bf16"})).plan
    assert plan.flash == fused
    assert plan.recompute == (0 if fused else 1)


@pytest.mark.parametrize(
    ("id_", "gpu", "note", "expected"),
    [
        ("dgxc-25.04.01-a", "H100-80", "model=grok1-314b", {"native_attention": 0, "whole_experts": 0}),
        ("dgxc-25.05.04-a", "H100-80", "model=grok1-314b", {"native_attention": 1, "whole_experts": 1}),
        ("dgxc-25.04.01-a", "H100-80", "model=llama3-70b", {"native_attention": 1, "tensor_overlap": 1}),
        ("dgxc-25.05.04-a", "GB200", "model=grok1-314b",
         {"whole_experts": 0, "cuda_graphs": 2, "tensor_overlap": 1, "native_attention": 1}),
        ("dgxc-25.05.04-a", "H100-80", "model=deepseek-v3; MLA", {"recompute_latent": 1, "tensor_overlap": 0}),
        ("dgxc-25.05.04-a", "GB200", "model=deepseek-v3; MLA", {"recompute_latent": 0, "tensor_overlap": 0}),
    ],
)  # fmt: skip
def test_mixtures_of_dgx_cloud_run_as_their_launch_scripts_say(
    id_: str, gpu: str, note: str, expected: dict[str, float], read: Callable[..., MeasuredPoints]
) -> None:
    row = {"id": id_, "source": "DGX Cloud benchmarking", "gpu": gpu, "note": note, "recompute": ""}
    plan = one(read(row)).plan
    assert {name: getattr(plan, name) for name in expected} == expected


def test_recomputation_is_set_by_published_recipes(read: Callable[..., MeasuredPoints]) -> None:
    def plan(gpu: str, note: str, precision: str = "bf16") -> ExecutionPlan:
        row = {"source": "Megatron-Bridge", "gpu": gpu, "precision": precision, "note": note}
        return one(read(row)).plan

    small, large = plan("GB200", "model=gpt-oss-120b"), plan("GB300", "model=gpt-oss-120b")
    assert (small.recompute_expert_activation, large.recompute_expert_activation) == (1, 0)
    assert small.node_dispatch == large.node_dispatch == 0
    latent = "model=deepseek-v3; MLA"
    assert plan("GB300", latent, "mxfp8").recompute_latent == plan("GB200", latent).recompute_latent == 1
    assert plan("GB300", latent).recompute_latent == plan("GB200", "model=llama3-70b").recompute_latent == 0
