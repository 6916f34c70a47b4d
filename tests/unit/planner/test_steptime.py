"""Laws of the step-time model: they hold for every layout, whatever the calibration."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.planner.calibration.fit import calibrated
from lakh.planner.catalogue import architecture
from lakh.planner.timing.collectives import Network, all_reduce_s, all_to_all_s, dispatch_s, gather_s, group
from lakh.planner.timing.elementwise import elementwise
from lakh.planner.timing.gpu_traits import Hardware, hardware_of
from lakh.planner.execution_plan import FULL, NONE, Layout
from lakh.planner.memory import memory
from lakh.planner.shape import Shape
from lakh.planner.timing.step_time import Fractions, gemm_s, step_time
from lakh.spec.cluster import load_cluster

MODELS = [architecture(name).shape for name in ("llama3-70b", "deepseek-v3", "gpt3-175b")]
HW = hardware_of(load_cluster("llama3-24k-roce"))
FR = calibrated("H100")[0].fractions
powers = st.sampled_from([1.0, 2.0, 4.0, 8.0])
layouts = st.builds(
    Layout,
    gpus=st.just(4096.0),
    sequence=st.just(4096.0),
    batch=st.just(8192.0),
    micro_batch=st.sampled_from([1.0, 2.0]),
    tp=powers,
    pp=powers,
    cp=powers,
    ep=powers,
    shard=st.sampled_from([1.0, 8.0, 64.0]),
    recompute=st.sampled_from([0.0, 1.0, 2.0, 3.0]),
    chunks=st.sampled_from([1.0, 2.0]),
    overlap=st.sampled_from([0.0, 1.0]),
    tensor_overlap=st.sampled_from([0.0, 1.0]),
    eager=st.sampled_from([0.0, 1.0]),
    native_attention=st.sampled_from([0.0, 1.0]),
    flash=st.sampled_from([0.0, 1.0]),
    zero1=st.sampled_from([0.0, 1.0]),
    zero2=st.sampled_from([0.0, 1.0]),
    run_ahead=st.sampled_from([1.0, 2.0]),
    sequence_parallel=st.sampled_from([0.0, 1.0]),
    experts_whole=st.sampled_from([0.0, 1.0]),
    node_dispatch=st.sampled_from([0.0, 1.0]),
    expert_overlap=st.sampled_from([0.0, 1.0]),
    graphed=st.sampled_from([0.0, 1.0, 2.0]),
    adapters=st.sampled_from([0.0, 1.0]),
    repeats_latent=st.sampled_from([0.0, 1.0]),
    repeats_activation=st.sampled_from([0.0, 1.0]),
)


def seconds(layout: Layout, hw: Hardware = HW, fr: Fractions = FR, model: int = 0) -> float:
    return float(step_time(MODELS[model], layout, hw, fr).total_s)


@given(
    layout=layouts, model=st.integers(0, 2), rate=st.sampled_from(["peak_FLOPs", "memory_Bps", "node_Bps", "levels"])
)
def test_a_faster_part_never_slows_a_step(layout: Layout, model: int, rate: str) -> None:
    if rate == "levels":
        faster = replace(HW, levels=tuple(replace(level, rate_Bps=2 * level.rate_Bps) for level in HW.levels))
    else:
        faster = replace(HW, **{rate: 2 * getattr(HW, rate)})
    assert seconds(layout, faster, model=model) <= seconds(layout, model=model) * (1 + 1e-9)


@given(layout=layouts, model=st.integers(0, 2))
def test_every_part_of_a_step_is_there_and_none_is_negative(layout: Layout, model: int) -> None:
    step = step_time(MODELS[model], layout, HW, FR)
    parts = [float(getattr(step, f.name)) for f in fields(step)]
    assert min(parts) >= -1e-12
    assert sum(parts) == pytest.approx(float(step.total_s))
    assert np.isfinite(step.total_s)


@given(layout=layouts)
def test_an_array_of_layouts_is_many_single_ones(layout: Layout) -> None:
    other = replace(layout, tp=2.0, micro_batch=1.0)
    both = replace(
        layout, **{f.name: np.array([getattr(layout, f.name), getattr(other, f.name)]) for f in fields(layout)}
    )
    together = step_time(MODELS[0], both, HW, FR).total_s
    assert together.tolist() == pytest.approx([seconds(layout), seconds(other)])


def test_the_answer_changes_with_the_topology() -> None:
    layout = Layout(gpus=8192.0, sequence=8192.0, batch=8192.0, shard=8192.0)
    roce, infiniband = (hardware_of(load_cluster(f"llama3-24k-{kind}")) for kind in ("roce", "ib"))
    assert seconds(layout, roce) > 1.02 * seconds(layout, infiniband)  # 1:7 between zones against full bisection
    inside = replace(layout, gpus=2048.0, shard=2048.0, batch=2048.0)
    assert seconds(inside, roce) == pytest.approx(seconds(inside, infiniband), rel=0.01)  # one zone: no difference


def test_recomputation_costs_a_third_and_a_bubble_shrinks_with_chunks() -> None:
    layout = Layout(gpus=1024.0, sequence=4096.0, batch=2048.0, tp=8.0, pp=8.0)
    assert (
        1.15 < seconds(replace(layout, recompute=float(FULL))) / seconds(replace(layout, recompute=float(NONE))) < 1.45
    )
    plain, interleaved = (float(step_time(MODELS[0], replace(layout, chunks=c), HW, FR).bubble_s) for c in (1.0, 5.0))
    assert interleaved == pytest.approx(plain / 5, rel=0.1)  # a little more traffic between stages


@pytest.mark.parametrize("part", ["repeats_latent", "repeats_activation"])
def test_repeating_a_part_of_a_layer_costs_less_than_repeating_all_of_it(part: str) -> None:
    layout = Layout(gpus=1024.0, sequence=4096.0, batch=2048.0, pp=8.0, ep=64.0)
    plain, some, all_ = (seconds(replace(layout, **what), model=1) for what in ({}, {part: 1.0}, {"recompute": 2.0}))
    assert plain < some < all_
    assert seconds(replace(layout, **{part: 1.0}), model=0) == seconds(layout, model=0)  # a dense model has neither
    assert seconds(replace(layout, recompute=2.0, **{part: 1.0}), model=1) == all_  # nothing is repeated twice


def test_work_beside_the_products_is_counted() -> None:
    layout = Layout(gpus=64.0, sequence=4096.0, batch=512.0, ep=8.0)
    plain = replace(MODELS[1], kv_rank=0.0, q_rank=0.0, rope_dim=0.0)
    for extra in ("qk_norm", "expert_bias"):
        more = step_time(replace(plain, **{extra: 1.0}), layout, HW, FR)
        assert more.elementwise_s > step_time(plain, layout, HW, FR).elementwise_s
    fused, eager = (float(elementwise(MODELS[0], replace(layout, eager=e), 1.0).forward_bytes) for e in (0.0, 1.0))
    rotary = 4 * (64 + 8) * 128  # queries and keys of Llama 3 70B, read and written
    assert eager == pytest.approx(3 * (fused - rotary))


def test_products_that_do_not_fill_their_last_tile_pay_for_it() -> None:
    def per_column(columns: float) -> float:
        return float(gemm_s(65536.0, 8192.0, columns, HW, FR, 1.0)) / columns

    assert per_column(2880.0) == pytest.approx(per_column(3072.0) * 3072 / 2880, rel=0.01)
    assert per_column(640.0) < per_column(1152.0)  # narrow products have narrower tiles to choose from


def test_attention_kernels_of_the_gpu_count_where_sequences_are_long() -> None:
    def gain(sequence: float) -> float:
        layout = Layout(gpus=64.0, sequence=sequence, batch=64.0, tp=8.0)
        return seconds(replace(layout, native_attention=0.0)) / seconds(layout)

    assert 1.0 < gain(2048.0) < gain(8192.0) < gain(65536.0) < 1.66
    layout = Layout(gpus=64.0, sequence=65536.0, batch=64.0, tp=8.0)
    old_part = hardware_of(load_cluster("a100-pod"))
    assert seconds(replace(layout, native_attention=0.0), old_part) == seconds(layout, old_part)


def test_small_heads_spend_more_of_attention_on_exponentials() -> None:
    def score_s(head_dim: float) -> float:
        shape = replace(MODELS[0], heads=8192.0 / head_dim, kv_heads=1024.0 / head_dim, head_dim=head_dim)
        far, near = (
            float(step_time(shape, Layout(gpus=8.0, sequence=s, batch=8.0), HW, FR).compute_s / s)
            for s in (65536.0, 32768.0)
        )
        return far - near  # what a longer sequence adds to each token: attention alone

    assert score_s(64.0) / score_s(128.0) == pytest.approx(2 / (1 + 0.5), rel=0.02)  # (1 + 64/64) / (1 + 64/128)
    assert score_s(256.0) < score_s(128.0)


def test_less_memory_is_paid_for_in_traffic() -> None:
    layout = Layout(
        gpus=1024.0, sequence=4096.0, batch=2048.0, tp=8.0, pp=8.0, chunks=5.0, zero1=1.0, gradient_bytes=4.0
    )
    usual, lean, cut = (
        step_time(MODELS[0], replace(layout, **change), HW, FR) for change in ({}, {"run_ahead": 1.0}, {"zero2": 1.0})
    )
    assert float(lean.pipeline_s) > float(usual.pipeline_s)
    assert float(lean.bubble_s) == pytest.approx(float(usual.bubble_s))
    assert float(cut.data_s) > float(usual.data_s)  # scattered once per round of micro-batches


def test_groups_that_share_a_node_share_its_nics() -> None:
    net = Network(HW, 1.0, 1.0, 0.0)
    whole, alone = group(net, 16.0, 1.0), group(net, 2.0, 8.0)
    assert float(whole.in_node) == 8
    assert float(alone.in_node) == 1
    assert float(whole.nic_Bps) == 8 * float(alone.nic_Bps)
    size = 1e9
    ring = 2 * gather_s(net, alone, size)
    assert float(all_reduce_s(net, alone, size)) == pytest.approx(float(ring))
    assert float(gather_s(net, alone, size)) == pytest.approx(0.5 * size / 50e9, rel=0.01)


def test_a_token_that_goes_once_to_a_node_spares_the_nics() -> None:
    fast_inside = replace(HW, node_Bps=1e15)  # only the NICs count
    net = Network(fast_inside, 1.0, 1.0, 0.0)
    two_nodes = group(net, 16.0, 1.0)
    token = 1e9
    latency = float(two_nodes.hop_s)
    plain = float(all_to_all_s(net, two_nodes, 8 * token)) - latency
    once = float(dispatch_s(net, two_nodes, token, 8.0)) - latency
    # Of eight copies four leave the node; one is enough unless all eight experts are at home (1 in 256).
    assert plain / once == pytest.approx(4 / (1 - 1 / 256), rel=1e-3)


def test_a_router_with_a_limit_of_nodes_sends_less() -> None:
    net = Network(replace(HW, node_Bps=1e15), 1.0, 1.0, 0.0)
    eight_nodes = group(net, 64.0, 1.0)
    free, limited = (float(dispatch_s(net, eight_nodes, 1e9, 8.0, most)) for most in (0.0, 4.0))
    assert limited < free
    assert float(dispatch_s(net, eight_nodes, 1e9, 8.0, 8.0)) == pytest.approx(free)


def test_whole_experts_keep_to_a_node_where_cut_ones_leave_it() -> None:
    layout = Layout(gpus=64.0, sequence=4096.0, batch=64.0, tp=2.0, ep=8.0, sequence_parallel=1.0)
    cut, whole = (float(step_time(MODELS[1], replace(layout, experts_whole=w), HW, FR).expert_s) for w in (0.0, 1.0))
    assert whole < cut  # eight ranks in a row against eight that lie two apart, in two nodes


def test_exchanges_behind_computation_cost_less() -> None:
    layout = Layout(gpus=64.0, sequence=4096.0, batch=128.0, ep=64.0)
    open_, hidden = (
        float(step_time(MODELS[1], replace(layout, expert_overlap=o), HW, FR).expert_s) for o in (0.0, 1.0)
    )
    assert 0 < hidden < open_
    alone = replace(layout, batch=64.0, expert_overlap=1.0)  # one micro-batch has nothing to hide behind
    assert float(step_time(MODELS[1], alone, HW, FR).expert_s) == pytest.approx(open_ / 2)
    held = [float(memory(MODELS[1], replace(layout, expert_overlap=o)).activations_bytes) for o in (0.0, 1.0)]
    assert held[1] == pytest.approx(2 * held[0])


def test_a_group_of_one_says_nothing() -> None:
    net = Network(HW, 1.0, 1.0, 1e-5)
    assert float(all_reduce_s(net, group(net, 1.0, 1.0), 1e9)) == 0.0
    assert float(dispatch_s(net, group(net, 1.0, 1.0), 1e9, 8.0)) == 0.0


@given(layout=layouts, model=st.integers(0, 2))
def test_frozen_weights_and_recorded_graphs_never_cost_time_or_memory(layout: Layout, model: int) -> None:
    plain = replace(layout, adapters=0.0, graphed=0.0)
    frozen, one, two = (replace(plain, **change) for change in ({"adapters": 1.0}, {"graphed": 1.0}, {"graphed": 2.0}))
    assert seconds(frozen, model=model) < seconds(plain, model=model)
    assert seconds(two, model=model) <= seconds(one, model=model) <= seconds(plain, model=model)
    assert memory(MODELS[model], frozen).total_bytes < memory(MODELS[model], plain).total_bytes


def test_gradients_of_experts_go_to_the_ranks_that_hold_the_same_ones() -> None:
    """Eight experts' ranks fill a node: their copies lie in other nodes, one NIC each, and nobody else shares them."""
    mixture = architecture("deepseek-v3").shape
    base = Layout(gpus=256.0, sequence=4096.0, batch=256.0, zero1=1.0, pp=4.0, overlap=0.0)
    few, many = (float(step_time(mixture, replace(base, ep=ep), HW, FR).data_s) for ep in (64.0, 8.0))
    assert many > 4 * few  # eight times the experts per rank, and copies to agree with


def test_a_window_leaves_out_scores_and_their_flops() -> None:
    full = architecture("llama3-70b").shape
    half = replace(full, window=128.0, windowed=0.5)
    assert float(half.attended(8192.0)) == 0.5 * 8192 + 0.5 * 256
    assert float(half.attended(100.0)) == 100  # a sequence within the window is seen whole
    assert seconds_of(half) < seconds_of(full)
    assert float(half.flops_per_token(8192.0)) < float(full.flops_per_token(8192.0))


def seconds_of(shape: Shape) -> float:
    layout = Layout(gpus=64.0, sequence=8192.0, batch=64.0, tp=8.0, zero1=1.0)
    return float(step_time(shape, layout, HW, FR).total_s)


def test_members_of_a_node_meet_one_after_another_unless_the_switch_reduces() -> None:
    def launches(members: float, reduces: float) -> float:
        net = Network(replace(HW, switch_reduces=reduces), 0.8, 0.8, 1e-4)
        return float(gather_s(net, group(net, members, 1.0), 0.0)) / 1e-4

    assert [launches(n, 0.0) for n in (2.0, 4.0, 8.0)] == pytest.approx([2, 3, 4])
    assert [launches(n, 1.0) for n in (2.0, 4.0, 8.0)] == pytest.approx([1, 1, 1])


def test_the_last_stage_has_the_logits_and_one_neighbour_the_others_two() -> None:
    """Whichever is slower sets the pace: logits as quick as a transfer are free."""
    layout = Layout(gpus=512.0, sequence=4096.0, batch=1024.0, tp=8.0, pp=8.0, overlap=0.0)
    none, small = (step_time(replace(MODELS[0], vocab=v), layout, HW, FR) for v in (0.0, 64.0))
    grown = float(small.compute_s + small.elementwise_s - none.compute_s - none.elementwise_s)
    assert grown > 0
    assert float(none.pipeline_s - small.pipeline_s) == pytest.approx(grown)
    alone = replace(layout, pp=1.0)
    assert float(step_time(MODELS[0], alone, HW, FR).pipeline_s) == 0
