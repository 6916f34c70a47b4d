"""Laws of the step-time model: they hold for every layout, with any calibration."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.planner.calibration.fit import calibration_for
from lakh.planner.catalogue import load_model
from lakh.planner.execution_plan import FULL, NONE, ExecutionPlan
from lakh.planner.memory import memory_use
from lakh.planner.timing.collectives import Fabric, all_gather_s, all_reduce_s, all_to_all_s, dispatch_s
from lakh.planner.timing.elementwise import elementwise_traffic
from lakh.planner.timing.gemm import gemm_s
from lakh.planner.timing.step_time import StepTime, step_time
from lakh.spec.cluster import Cluster, load_cluster
from lakh.spec.collective_cost import collective_cost
from lakh.spec.model import Model, SlidingWindow

MODELS = [load_model(name) for name in ("llama3-70b", "deepseek-v3", "gpt3-175b")]
CLUSTER = load_cluster("llama3-24k-roce")
EFFICIENCY = calibration_for("H100")[0].efficiency
powers = st.sampled_from([1.0, 2.0, 4.0, 8.0])
layouts = st.builds(
    ExecutionPlan,
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
    eager_loss=st.sampled_from([0.0, 1.0]),
    eager_rotary=st.sampled_from([0.0, 1.0]),
    eager=st.sampled_from([0.0, 1.0]),
    native_attention=st.sampled_from([0.0, 1.0]),
    flash=st.sampled_from([0.0, 1.0]),
    zero=st.sampled_from([0.0, 1.0, 2.0]),
    chunks_ahead=st.sampled_from([1.0, 2.0]),
    sequence_parallel=st.sampled_from([0.0, 1.0]),
    whole_experts=st.sampled_from([0.0, 1.0]),
    node_dispatch=st.sampled_from([0.0, 1.0]),
    expert_overlap=st.sampled_from([0.0, 1.0]),
    cuda_graphs=st.sampled_from([0.0, 1.0, 2.0]),
    adapters=st.sampled_from([0.0, 1.0]),
    recompute_latent=st.sampled_from([0.0, 1.0]),
    recompute_expert_activation=st.sampled_from([0.0, 1.0]),
)


def parts(layout: ExecutionPlan, cluster: Cluster = CLUSTER, model: int = 0) -> StepTime:
    return step_time(MODELS[model], layout, cluster, EFFICIENCY)


def seconds(layout: ExecutionPlan, cluster: Cluster = CLUSTER, model: int = 0) -> float:
    return float(parts(layout, cluster, model).total_s)


def at_half_speed(cluster: Cluster, part: str) -> Cluster:
    node, *outside = cluster.tiers
    if part == "node":
        node = replace(node, bandwidth_GBps=node.bandwidth_GBps / 2)
    elif part == "network":
        outside = [replace(tier, bandwidth_GBps=tier.bandwidth_GBps / 2) for tier in outside]
    else:
        return replace(cluster, gpu=replace(cluster.gpu, **{part: getattr(cluster.gpu, part) / 2}))
    return replace(cluster, tiers=(node, *outside))


@pytest.mark.slow
@given(
    layout=layouts,
    model=st.integers(0, 2),
    part=st.sampled_from(["dense_bf16_TFLOPs", "memory_bandwidth_GBps", "node", "network"]),
)
def test_slower_hardware_never_makes_a_step_faster(layout: ExecutionPlan, model: int, part: str) -> None:
    slower = at_half_speed(CLUSTER, part)
    assert seconds(layout, model=model) <= seconds(layout, slower, model=model) * (1 + 1e-9)


@given(layout=layouts, model=st.integers(0, 2))
def test_parts_of_a_step_are_finite_and_not_negative(layout: ExecutionPlan, model: int) -> None:
    step = step_time(MODELS[model], layout, CLUSTER, EFFICIENCY)
    parts = [float(getattr(step, f.name)) for f in fields(step)]
    assert min(parts) >= -1e-12
    assert sum(parts) == pytest.approx(float(step.total_s))
    assert np.isfinite(step.total_s)


@given(layout=layouts)
def test_arrays_of_layouts_give_the_times_of_single_ones(layout: ExecutionPlan) -> None:
    other = replace(layout, tp=2.0, micro_batch=1.0)
    both = replace(
        layout, **{f.name: np.array([getattr(layout, f.name), getattr(other, f.name)]) for f in fields(layout)}
    )
    together = step_time(MODELS[0], both, CLUSTER, EFFICIENCY).total_s
    assert together.tolist() == pytest.approx([seconds(layout), seconds(other)])


def test_step_time_depends_on_the_topology() -> None:
    layout = ExecutionPlan(gpus=8192.0, sequence=8192.0, batch=8192.0, pp=4.0)  # stages of 2,048 GPUs
    roce, infiniband = (load_cluster(f"llama3-24k-{kind}") for kind in ("roce", "ib"))
    assert seconds(layout, roce) > 1.005 * seconds(layout, infiniband)  # 1:7 between zones against full bisection
    inside = replace(layout, gpus=2048.0, batch=2048.0)
    assert seconds(inside, roce) == pytest.approx(seconds(inside, infiniband), rel=0.01)  # one zone: no difference


def test_recomputation_costs_a_third_and_a_bubble_shrinks_with_chunks() -> None:
    layout = ExecutionPlan(gpus=1024.0, sequence=4096.0, batch=2048.0, tp=8.0, pp=8.0)
    assert (
        1.15 < seconds(replace(layout, recompute=float(FULL))) / seconds(replace(layout, recompute=float(NONE))) < 1.45
    )
    plain, interleaved = (
        float(step_time(MODELS[0], replace(layout, chunks=c), CLUSTER, EFFICIENCY).bubble_s) for c in (1.0, 5.0)
    )
    assert interleaved == pytest.approx(plain / 5, rel=0.1)  # a little more traffic between stages


@pytest.mark.parametrize("part", ["recompute_latent", "recompute_expert_activation"])
def test_partial_recomputation_costs_less_than_full(part: str) -> None:
    layout = ExecutionPlan(gpus=1024.0, sequence=4096.0, batch=2048.0, pp=8.0, ep=64.0)
    plain, some, all_ = (seconds(replace(layout, **what), model=1) for what in ({}, {part: 1.0}, {"recompute": 2.0}))
    assert plain < some < all_
    assert seconds(replace(layout, **{part: 1.0}), model=0) == seconds(layout, model=0)  # a dense model has neither
    assert seconds(replace(layout, recompute=2.0, **{part: 1.0}), model=1) == all_  # nothing is repeated twice


def test_elementwise_work_is_counted() -> None:
    layout = ExecutionPlan(gpus=64.0, sequence=4096.0, batch=512.0, ep=8.0)
    plain = replace(MODELS[1], latent=None)
    assert plain.experts is not None
    for extra in ({"qk_norm": True}, {"experts": replace(plain.experts, bias=True)}):
        more = step_time(replace(plain, **extra), layout, CLUSTER, EFFICIENCY)
        assert more.elementwise_s > step_time(plain, layout, CLUSTER, EFFICIENCY).elementwise_s
    fused, eager = (float(elementwise_traffic(MODELS[0], replace(layout, eager=e), 1.0)[0]) for e in (0.0, 1.0))
    rotary = 4 * (64 + 8) * 128  # queries and keys of Llama 3 70B, read and written
    assert eager == pytest.approx(3 * (fused - rotary))


def test_products_are_padded_to_whole_tiles() -> None:
    def per_column(columns: float) -> float:
        return float(gemm_s(65536.0, 8192.0, columns, CLUSTER.gpu, EFFICIENCY)) / columns

    assert per_column(2880.0) == pytest.approx(per_column(3072.0) * 3072 / 2880, rel=0.01)
    assert per_column(640.0) < per_column(1152.0)  # narrow products have narrower tiles to choose from


def test_native_attention_kernels_matter_for_long_sequences() -> None:
    def gain(sequence: float) -> float:
        layout = ExecutionPlan(gpus=64.0, sequence=sequence, batch=64.0, tp=8.0)
        return seconds(replace(layout, native_attention=0.0)) / seconds(layout)

    assert 1.0 < gain(2048.0) < gain(8192.0) < gain(65536.0) < 1.66
    layout = ExecutionPlan(gpus=64.0, sequence=65536.0, batch=64.0, tp=8.0)
    old_part = load_cluster("a100-pod")
    assert seconds(replace(layout, native_attention=0.0), old_part) == seconds(layout, old_part)


def test_small_heads_spend_more_of_attention_on_exponentials() -> None:
    def score_s(head_dim: int) -> float:
        model = replace(MODELS[0], heads=8192 // head_dim, kv_heads=1024 // head_dim)
        far, near = (
            float(step_time(model, ExecutionPlan(gpus=8.0, sequence=s, batch=8.0), CLUSTER, EFFICIENCY).compute_s / s)
            for s in (65536.0, 32768.0)
        )
        return far - near  # what a longer sequence adds to each token: attention alone

    assert score_s(64) / score_s(128) == pytest.approx(2 / (1 + 0.5), rel=0.02)  # (1 + 64/64) / (1 + 64/128)
    assert score_s(256) < score_s(128)


def test_the_lean_schedule_and_zero_2_cost_traffic() -> None:
    layout = ExecutionPlan(
        gpus=1024.0, sequence=4096.0, batch=2048.0, tp=8.0, pp=8.0, chunks=5.0, zero=1.0, gradient_bytes=4.0
    )
    usual, lean, cut = (
        step_time(MODELS[0], replace(layout, **change), CLUSTER, EFFICIENCY)
        for change in ({}, {"chunks_ahead": 1.0}, {"zero": 2.0})
    )
    assert float(lean.pipeline_s) > float(usual.pipeline_s)
    assert float(lean.bubble_s) == pytest.approx(float(usual.bubble_s))
    assert float(cut.data_s) > float(usual.data_s)  # scattered once per round of micro-batches


def fabric(cluster: Cluster = CLUSTER, **efficiency: float) -> Fabric:
    plain = replace(EFFICIENCY, **{"node": 1.0, "nic": 1.0, "collective_us": 0.0, **efficiency})
    return Fabric(cluster, plain, cluster.gpus)


def fast_inside() -> Fabric:
    """Only the NICs limit it."""
    node, *outside = CLUSTER.tiers
    return fabric(replace(CLUSTER, tiers=(replace(node, bandwidth_GBps=1e6), *outside)))


def test_groups_that_share_a_node_share_its_nics() -> None:
    net = fabric()
    whole, alone = net.group(16.0, 1.0), net.group(2.0, 8.0)
    assert (float(whole.in_node), float(alone.in_node)) == (8, 1)
    size = 1e9
    assert float(all_reduce_s(alone, size)) == pytest.approx(2 * float(all_gather_s(alone, size)))
    assert float(all_gather_s(alone, size)) == pytest.approx(0.5 * size / 50e9, rel=0.01)
    # Eight members in a node have eight NICs for the same buffer.
    assert float(fast_inside().group(16.0, 1.0).gather_s_per_byte) * 8 == pytest.approx(float(alone.gather_s_per_byte))


@pytest.mark.parametrize("size_bytes", [1e3, 1e6, 1e9])
@pytest.mark.parametrize(("in_node", "nodes"), [(8, 1), (8, 4), (8, 128), (1, 16), (4, 2)])
def test_collectives_are_priced_by_the_schedules_of_spec(in_node: int, nodes: int, size_bytes: float) -> None:
    """Bytes are those of spec.collective_cost, which tests hold to c3's schedules: a ring inside the node, the outer
    tier of a hierarchical schedule on the NICs, whichever is slower; a flat all-to-all; latency comes on top."""
    net = fabric()
    group = net.group(float(in_node * nodes), CLUSTER.node_size / in_node)
    node_Bps, nic_Bps = (float(np.max(rate)) for rate in (group.node_Bps, group.nic_Bps))
    tiers = (in_node, nodes)

    def slower(operation: str) -> float:
        ring = collective_cost(operation, "ring", size_bytes, tiers).bytes_sent
        nic = collective_cost(operation, "hierarchical", size_bytes, tiers).tiers[1].bytes_sent
        return max(ring / node_Bps if in_node > 1 else 0.0, nic / nic_Bps)

    one_phase = float(all_gather_s(group, size_bytes)) - float(group.gather_latency_s)
    assert one_phase == pytest.approx(slower("all_gather")) == pytest.approx(slower("reduce_scatter"))
    assert float(all_reduce_s(group, size_bytes) - 2 * group.gather_latency_s) == pytest.approx(slower("all_reduce"))
    inner, outer = (tier.bytes_sent for tier in collective_cost("all_to_all", "flat", size_bytes, tiers).tiers)
    exchange = float(all_to_all_s(group, size_bytes)) - float(group.hop_s)
    assert exchange == pytest.approx(max(inner / node_Bps, outer / (nic_Bps * 0.95 * 0.8)))  # of a plain send


def test_a_tree_between_nodes_has_the_hops_of_halving_and_doubling() -> None:
    group = fabric().group(64.0, 1.0)
    stages = collective_cost("all_gather", "halving_doubling", 1.0, (8, 8)).tiers[1].stages
    assert float(all_gather_s(group, 0.0)) == pytest.approx(stages * float(group.hop_s))


def test_sending_once_per_node_reduces_nic_traffic() -> None:
    two_nodes = fast_inside().group(16.0, 1.0)
    token = 1e9
    latency = float(two_nodes.hop_s)
    plain = float(all_to_all_s(two_nodes, 8 * token)) - latency
    once = float(dispatch_s(two_nodes, token, 8.0)) - latency
    # Of eight copies four leave the node; one is enough unless all eight experts are in it (1 in 256).
    assert plain / once == pytest.approx(4 / (1 - 1 / 256), rel=1e-3)


def test_a_router_with_a_limit_of_nodes_sends_less() -> None:
    eight_nodes = fast_inside().group(64.0, 1.0)
    free, limited = (float(dispatch_s(eight_nodes, 1e9, 8.0, most)) for most in (0.0, 4.0))
    assert limited < free
    assert float(dispatch_s(eight_nodes, 1e9, 8.0, 8.0)) == pytest.approx(free)


def test_whole_experts_stay_in_a_node_where_split_ones_do_not() -> None:
    layout = ExecutionPlan(gpus=64.0, sequence=4096.0, batch=64.0, tp=2.0, ep=8.0, sequence_parallel=1.0)
    cut, whole = (
        float(step_time(MODELS[1], replace(layout, whole_experts=w), CLUSTER, EFFICIENCY).expert_s) for w in (0.0, 1.0)
    )
    assert whole < cut  # eight ranks in a row against eight that lie two apart, in two nodes


def test_overlapped_exchanges_cost_less() -> None:
    layout = ExecutionPlan(gpus=64.0, sequence=4096.0, batch=128.0, ep=64.0)
    open_, hidden = (
        float(step_time(MODELS[1], replace(layout, expert_overlap=o), CLUSTER, EFFICIENCY).expert_s) for o in (0.0, 1.0)
    )
    assert 0 < hidden < open_
    alone = replace(layout, batch=64.0, expert_overlap=1.0)  # one micro-batch has nothing to hide behind
    assert float(step_time(MODELS[1], alone, CLUSTER, EFFICIENCY).expert_s) == pytest.approx(open_ / 2)
    held = [float(memory_use(MODELS[1], replace(layout, expert_overlap=o)).activations_bytes) for o in (0.0, 1.0)]
    assert held[1] == pytest.approx(2 * held[0])


def test_the_first_forward_and_the_last_backward_pass_are_not_overlapped() -> None:
    layout = ExecutionPlan(gpus=64.0, sequence=4096.0, batch=64.0, ep=64.0)

    def exposed_share(micro_batches: int) -> float:
        plan = replace(layout, batch=64.0 * micro_batches)
        open_, hidden = (float(parts(replace(plan, expert_overlap=o), model=1).expert_s) for o in (0.0, 1.0))
        return hidden / open_

    always = exposed_share(1 << 20)
    assert 0 < always < 0.9
    for count in (2, 5, 32):
        assert exposed_share(count) == pytest.approx(1 / count + (1 - 1 / count) * always, rel=1e-4)


def test_an_exchange_longer_than_the_work_beside_it_sets_the_pace() -> None:
    layout = ExecutionPlan.of(gpus=64, sequence=4096, batch=512, ep=64, expert_overlap=1, node_dispatch=0)
    slow = at_half_speed(at_half_speed(at_half_speed(CLUSTER, "network"), "network"), "network")
    for cluster, sets_the_pace in ((CLUSTER, False), (slow, True)):
        apart = step_time(MODELS[1], replace(layout, expert_overlap=0.0), cluster, EFFICIENCY)
        both = step_time(MODELS[1], layout, cluster, EFFICIENCY)
        exchange, work = float(apart.expert_s), float(apart.total_s - apart.expert_s)
        together = float(both.total_s)
        assert max(exchange, work) <= together * 1.001
        assert together < exchange + work
        if sets_the_pace:  # the exchange alone, and what is outside the layers
            outside = float(both.fixed_s + both.optimizer_s + both.data_s + both.host_s)
            assert together - exchange < 0.2 * work + outside


def test_fp8_attention_and_fused_experts_take_less_time() -> None:
    layout = ExecutionPlan.of(gpus=8, sequence=4096, batch=64, low_precision=1)
    plain, narrow, fused = (
        parts(one, model=1)
        for one in (layout, replace(layout, narrow_attention=1.0), replace(layout, fused_experts=1.0))
    )
    assert float(narrow.compute_s) < float(plain.compute_s)
    assert float(narrow.elementwise_s) == float(plain.elementwise_s)
    assert float(fused.elementwise_s) < float(plain.elementwise_s)
    assert float(fused.compute_s) == float(plain.compute_s)


def test_a_group_of_one_costs_nothing() -> None:
    alone = fabric(collective_us=10.0).group(1.0, 1.0)
    assert float(all_reduce_s(alone, 1e9)) == float(dispatch_s(alone, 1e9, 8.0)) == 0.0


@pytest.mark.slow
@given(layout=layouts, model=st.integers(0, 2))
def test_adapters_and_cuda_graphs_never_add_time_or_memory(layout: ExecutionPlan, model: int) -> None:
    plain = replace(layout, adapters=0.0, cuda_graphs=0.0)
    frozen, one, two = (
        replace(plain, **change) for change in ({"adapters": 1.0}, {"cuda_graphs": 1.0}, {"cuda_graphs": 2.0})
    )
    assert seconds(frozen, model=model) < seconds(plain, model=model)
    assert seconds(two, model=model) <= seconds(one, model=model) <= seconds(plain, model=model)
    assert memory_use(MODELS[model], frozen).total_bytes < memory_use(MODELS[model], plain).total_bytes


def test_expert_gradients_are_reduced_among_ranks_with_the_same_experts() -> None:
    """The eight expert ranks fill a node, so copies of an expert are in other nodes and use one NIC each."""
    mixture = load_model("deepseek-v3")
    base = ExecutionPlan(gpus=256.0, sequence=4096.0, batch=256.0, zero=1.0, pp=4.0, overlap=0.0)
    few, many = (float(step_time(mixture, replace(base, ep=ep), CLUSTER, EFFICIENCY).data_s) for ep in (64.0, 8.0))
    assert many > 4 * few  # eight times the experts per rank, and copies to agree with


def test_a_sliding_window_reduces_scores_and_flops() -> None:
    full = load_model("llama3-70b")
    half = replace(full, sliding_window=SlidingWindow(tokens=128, share=0.5))
    assert half.attended_tokens(8192) == 0.5 * 8192 + 0.5 * 256
    assert half.attended_tokens(np.array([100.0, 8192.0])).tolist() == [100, 4224]
    assert half.attended_tokens(100) == 100  # a sequence within the window is seen whole
    assert seconds_of(half) < seconds_of(full)
    assert float(half.flops_per_token(8192.0)) < float(full.flops_per_token(8192.0))


def seconds_of(model: Model) -> float:
    layout = ExecutionPlan(gpus=64.0, sequence=8192.0, batch=64.0, tp=8.0, zero=1.0)
    return float(step_time(model, layout, CLUSTER, EFFICIENCY).total_s)


def test_a_narrow_window_costs_at_least_a_block_of_keys() -> None:
    layout = ExecutionPlan(gpus=8.0, sequence=32768.0, batch=8.0)

    def attention(tokens: int) -> float:
        window = SlidingWindow(tokens=tokens, share=0.5)
        return float(step_time(replace(MODELS[0], sliding_window=window), layout, CLUSTER, EFFICIENCY).compute_s)

    one, two, four, whole = (attention(tokens) for tokens in (128, 256, 512, 32768))
    assert four - two == pytest.approx(2 * (two - one))  # each key of a window costs the same
    per_key = (two - one) / 128
    everything = float(step_time(MODELS[0], layout, CLUSTER, EFFICIENCY).compute_s)
    assert whole == pytest.approx(everything)
    assert everything - one == pytest.approx(per_key * (16384 - 128 - 128 - 256))  # a block, and a short loop


def test_collective_latency_grows_with_the_node_unless_the_switch_reduces() -> None:
    def launches(members: float, cluster: str) -> float:
        group = fabric(load_cluster(cluster), collective_us=100.0).group(members, 1.0)
        return float(all_gather_s(group, 0.0)) / 1e-4

    assert [launches(n, "a100-pod") for n in (2.0, 4.0, 8.0)] == pytest.approx([2, 3, 4])
    assert [launches(n, "h100-pod") for n in (2.0, 4.0, 8.0)] == pytest.approx([1, 1, 1])


def test_logits_as_fast_as_a_transfer_are_free() -> None:
    """The slower of logits and transfer sets the pace."""
    layout = ExecutionPlan(gpus=512.0, sequence=4096.0, batch=1024.0, tp=8.0, pp=8.0, overlap=0.0)
    none, small = (step_time(replace(MODELS[0], vocab=v), layout, CLUSTER, EFFICIENCY) for v in (1, 64))
    grown = float(small.compute_s + small.elementwise_s - none.compute_s - none.elementwise_s)
    assert grown > 0
    assert float(none.pipeline_s - small.pipeline_s) == pytest.approx(grown)
    alone = replace(layout, pp=1.0)
    assert float(step_time(MODELS[0], alone, CLUSTER, EFFICIENCY).pipeline_s) == 0


def test_an_eager_loss_costs_traffic_and_the_host_once_per_micro_batch() -> None:
    layout = ExecutionPlan(gpus=64.0, sequence=4096.0, batch=256.0, tp=8.0)
    fused, eager = parts(layout), parts(replace(layout, eager_loss=1.0))
    micro_batches, logits = 32, 4096 * MODELS[0].vocab / 8
    traffic = micro_batches * logits * 32 / (CLUSTER.gpu.memory_Bps * EFFICIENCY.memory)  # 52 bytes instead of 20
    assert float(eager.elementwise_s - fused.elementwise_s) == pytest.approx(traffic)
    host = micro_batches * 3 * EFFICIENCY.host_us * 1e-6
    assert float(eager.host_s - fused.host_s) == pytest.approx(host)
    assert float(eager.compute_s) == float(fused.compute_s)


def test_eager_rotary_positions_cost_traffic() -> None:
    layout = ExecutionPlan(gpus=8.0, sequence=4096.0, batch=8.0)
    fused, eager = parts(layout), parts(replace(layout, eager_rotary=1.0))
    model = MODELS[0]
    values = 4096 * model.layers * (model.heads + model.kv_heads) * model.head_dim
    traffic = values * (38 + 1.5 * 20 - 12) / (CLUSTER.gpu.memory_Bps * EFFICIENCY.memory)  # bytes of three passes
    assert float(eager.elementwise_s - fused.elementwise_s) == pytest.approx(traffic)
    assert float(eager.compute_s) == float(fused.compute_s)
