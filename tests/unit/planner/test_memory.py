"""Memory: what is known from papers, and laws that hold for every layout."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.planner.catalogue import architecture
from lakh.planner.layout import FULL, NONE, SELECTIVE, Layout
from lakh.planner.memory import memory

MODEL = architecture("llama3-70b").shape
BASE = Layout(gpus=1024.0, sequence=8192.0, batch=1024.0, zero1=1.0, gradient_bytes=4.0)
powers = st.sampled_from([1.0, 2.0, 4.0, 8.0])


def total(layout: Layout) -> float:
    return float(memory(MODEL, layout).total_bytes)


def test_adamw_in_mixed_precision_needs_sixteen_bytes_per_parameter() -> None:
    used = memory(MODEL, replace(BASE, gpus=1.0, batch=1.0, zero1=0.0, gradient_bytes=2.0))
    states = used.weights_bytes + used.gradients_bytes + used.optimizer_bytes
    assert float(states) == pytest.approx(16 * float(MODEL.parameters), rel=0.001)


def test_activations_of_a_plain_block_are_those_of_the_paper() -> None:
    """Korthikanti et al. (arXiv 2205.05198): s b h (10 + 24/t + 5 a s / (h t)) bytes per layer without sequence
    parallelism, s b h (34/t + 5 a s / (h t)) with it."""
    shape = architecture("gpt3-175b").shape
    s, h, a, t, layers = 2048.0, 12288.0, 96.0, 8.0, 96.0
    plain = Layout(gpus=8.0, sequence=s, batch=1.0, tp=t, flash=0.0)
    expected = layers * s * h * (10 + 24 / t + 5 * a * s / (h * t))
    assert float(memory(shape, plain).activations_bytes) == pytest.approx(expected)
    parallel = replace(plain, sequence_parallel=1.0)
    assert float(memory(shape, parallel).activations_bytes) == pytest.approx(
        layers * s * h * (34 / t + 5 * a * s / (h * t))
    )


@given(
    tp=powers,
    pp=powers,
    cp=powers,
    size=st.sampled_from([1.0, 2.0]),
    recompute=st.sampled_from([NONE, SELECTIVE, FULL]),
)
def test_no_parallel_degree_makes_a_gpu_fuller(tp: float, pp: float, cp: float, size: float, recompute: int) -> None:
    here = replace(BASE, tp=tp, pp=pp, cp=cp, micro_batch=size, recompute=float(recompute), sequence_parallel=1.0)
    for axis in ("tp", "pp", "cp"):
        more = replace(here, **{axis: 2 * getattr(here, axis)})
        if more.micro_batches >= 1:
            assert total(more) <= total(here) * (1 + 1e-9), axis


@given(shard=st.sampled_from([1.0, 8.0, 64.0, 512.0]), tp=powers)
def test_sharding_over_more_ranks_never_makes_a_gpu_fuller(shard: float, tp: float) -> None:
    here = replace(BASE, tp=tp, shard=shard, zero1=0.0)
    gathered = memory(MODEL, here).gathered_bytes
    assert total(replace(here, shard=2 * shard)) <= total(here) + (0 if gathered else 3e9 / tp)  # two gathered layers


def test_recomputation_and_smaller_micro_batches_keep_less() -> None:
    kept = [total(replace(BASE, flash=0.0, recompute=float(policy))) for policy in (NONE, SELECTIVE, FULL)]
    assert kept == sorted(kept, reverse=True)
    assert total(replace(BASE, micro_batch=1.0)) < total(replace(BASE, micro_batch=2.0, batch=2048.0))


def test_offload_takes_the_optimizer_out_of_the_gpu() -> None:
    assert float(memory(MODEL, replace(BASE, offload=1.0)).optimizer_bytes) == 0.0


def test_whole_experts_over_more_ranks_weigh_what_cut_ones_do() -> None:
    mixture = architecture("deepseek-v3").shape
    cut = replace(BASE, tp=4.0, ep=8.0, experts_whole=0.0)
    whole = replace(cut, experts_whole=1.0, ep=32.0)
    assert float(memory(mixture, whole).weights_bytes) == pytest.approx(float(memory(mixture, cut).weights_bytes))
    fewer = replace(whole, ep=8.0)
    assert float(memory(mixture, fewer).weights_bytes) > float(memory(mixture, cut).weights_bytes)


def test_experts_that_exist_once_are_shared_by_nobody() -> None:
    """DeepSeek-V3 over 64 of 64 ranks: ZeRO-1 has no second copy of an expert to cut its optimizer states up over."""
    mixture = architecture("deepseek-v3").shape
    layout = replace(BASE, gpus=64.0, ep=64.0)
    once = float(memory(mixture, layout).optimizer_bytes)
    assert once == pytest.approx(float(mixture.parameters) / 64 * 12)
    half = float(memory(mixture, replace(layout, ep=32.0)).optimizer_bytes)
    assert half == pytest.approx(once)  # twice the experts, each shared by two
    assert float(memory(mixture, replace(layout, gpus=512.0)).optimizer_bytes) == pytest.approx(once / 8)
