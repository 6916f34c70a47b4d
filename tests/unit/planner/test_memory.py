"""Memory: published figures, and laws that hold for every layout."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.planner.catalogue import load_model
from lakh.planner.execution_plan import FULL, NONE, SELECTIVE, ExecutionPlan
from lakh.planner.memory import in_flight, memory_use

MODEL = load_model("llama3-70b")
BASE = ExecutionPlan(gpus=1024.0, sequence=8192.0, batch=1024.0, zero=1.0, gradient_bytes=4.0)
powers = st.sampled_from([1.0, 2.0, 4.0, 8.0])


def total(layout: ExecutionPlan) -> float:
    return float(memory_use(MODEL, layout).total_bytes)


def test_adamw_in_mixed_precision_needs_sixteen_bytes_per_parameter() -> None:
    used = memory_use(MODEL, replace(BASE, gpus=1.0, batch=1.0, zero=0.0, gradient_bytes=2.0))
    states = used.weights_bytes + used.gradients_bytes + used.optimizer_bytes
    assert float(states) == pytest.approx(16 * float(MODEL.parameters), rel=0.001)


def test_activations_of_a_plain_block_are_those_of_the_paper() -> None:
    """Korthikanti et al. (arXiv 2205.05198): s b h (10 + 24/t + 5 a s / (h t)) bytes per layer without sequence
    parallelism, s b h (34/t + 5 a s / (h t)) with it."""
    shape = load_model("gpt3-175b")
    s, h, a, t, layers = 2048.0, 12288.0, 96.0, 8.0, 96.0
    plain = ExecutionPlan(gpus=8.0, sequence=s, batch=1.0, tp=t, flash=0.0)
    expected = layers * s * h * (10 + 24 / t + 5 * a * s / (h * t))
    assert float(memory_use(shape, plain).activations_bytes) == pytest.approx(expected)
    parallel = replace(plain, sequence_parallel=1.0)
    assert float(memory_use(shape, parallel).activations_bytes) == pytest.approx(
        layers * s * h * (34 / t + 5 * a * s / (h * t))
    )


@given(
    tp=powers,
    pp=powers,
    cp=powers,
    size=st.sampled_from([1.0, 2.0]),
    recompute=st.sampled_from([NONE, SELECTIVE, FULL]),
)
def test_more_parallelism_never_increases_memory(tp: float, pp: float, cp: float, size: float, recompute: int) -> None:
    here = replace(BASE, tp=tp, pp=pp, cp=cp, micro_batch=size, recompute=float(recompute), sequence_parallel=1.0)
    for axis in ("tp", "pp", "cp"):
        more = replace(here, **{axis: 2 * getattr(here, axis)})
        if more.micro_batches >= 1:
            assert total(more) <= total(here) * (1 + 1e-9), axis


@given(shard=st.sampled_from([1.0, 8.0, 64.0, 512.0]), tp=powers)
def test_sharding_over_more_ranks_never_increases_memory(shard: float, tp: float) -> None:
    here = replace(BASE, tp=tp, shard=shard, zero=0.0)
    gathered = memory_use(MODEL, here).gathered_bytes
    assert total(replace(here, shard=2 * shard)) <= total(here) + (0 if gathered else 3e9 / tp)  # two gathered layers


@given(ep=st.sampled_from([1.0, 4.0, 32.0]), tp=powers, pp=powers, zero=st.sampled_from([1.0, 2.0]))
def test_more_expert_parallelism_never_increases_memory(ep: float, tp: float, pp: float, zero: float) -> None:
    mixture = load_model("deepseek-v3")
    here = replace(BASE, tp=tp, pp=pp, ep=ep, zero=zero)
    more, less = (float(memory_use(mixture, replace(here, ep=n)).total_bytes) for n in (2 * ep, ep))
    assert more <= less * (1 + 1e-9)


def test_recomputation_and_smaller_micro_batches_reduce_memory() -> None:
    kept = [total(replace(BASE, flash=0.0, recompute=float(policy))) for policy in (NONE, SELECTIVE, FULL)]
    assert kept == sorted(kept, reverse=True)
    assert total(replace(BASE, micro_batch=1.0)) < total(replace(BASE, micro_batch=2.0, batch=2048.0))


def test_offload_removes_optimizer_states_from_the_gpu() -> None:
    assert float(memory_use(MODEL, replace(BASE, offload=1.0)).optimizer_bytes) == 0.0


def test_whole_and_split_experts_take_the_same_memory() -> None:
    mixture = load_model("deepseek-v3")
    cut = replace(BASE, tp=4.0, ep=8.0, whole_experts=0.0)
    whole = replace(cut, whole_experts=1.0, ep=32.0)
    assert float(memory_use(mixture, whole).weights_bytes) == pytest.approx(
        float(memory_use(mixture, cut).weights_bytes)
    )
    fewer = replace(whole, ep=8.0)
    assert float(memory_use(mixture, fewer).weights_bytes) > float(memory_use(mixture, cut).weights_bytes)


def test_states_of_experts_without_copies_are_not_sharded() -> None:
    """DeepSeek-V3 over 64 of 64 ranks: no expert has a second copy over which ZeRO-1 could shard its states."""
    mixture = load_model("deepseek-v3")
    layout = replace(BASE, gpus=64.0, ep=64.0)
    once = float(memory_use(mixture, layout).optimizer_bytes)
    assert once == pytest.approx(float(mixture.parameters) / 64 * 12)
    half = float(memory_use(mixture, replace(layout, ep=32.0)).optimizer_bytes)
    assert half == pytest.approx(once)  # twice the experts, each shared by two
    assert float(memory_use(mixture, replace(layout, gpus=512.0)).optimizer_bytes) == pytest.approx(once / 8)


# --- pipelines: what a schedule holds, played ---


def played(pp: int, chunks: int, count: int, ahead: int, hop: float = 0.0) -> tuple[float, list[int]]:
    """Length of a step, in forward passes of a chunk (a backward pass is two), and the most chunks each stage holds."""
    orders = [list(_order(rank, pp, chunks, count, ahead if chunks > 1 else 1)) for rank in range(pp)]
    clock, at, held, most = [0.0] * pp, [0] * pp, [0] * pp, [0] * pp
    done: dict[tuple[str, int, int], float] = {}
    while any(at[rank] < len(orders[rank]) for rank in range(pp)):
        before = sum(at)
        for rank in range(pp):
            while at[rank] < len(orders[rank]):
                kind, chunk, batch = orders[rank][at[rank]]
                place = chunk * pp + rank
                near = place + (-1 if kind == "F" else 1)
                needs = (kind, near, batch) if 0 <= near < pp * chunks else ("F", place, batch) if kind == "B" else None
                if needs and needs not in done:
                    break
                ready = done[needs] + (hop if needs[1] != place else 0.0) if needs else 0.0
                clock[rank] = max(clock[rank], ready) + (1.0 if kind == "F" else 2.0)
                done[kind, place, batch] = clock[rank]
                held[rank] += 1 if kind == "F" else -1
                most[rank] = max(most[rank], held[rank])
                at[rank] += 1
        assert sum(at) > before, "the schedule waits for itself"
    return max(clock), most


def _order(rank: int, pp: int, chunks: int, count: int, ahead: int) -> Iterator[tuple[str, int, int]]:
    """Warm-up, then one forward and one backward in turn; micro-batches go through a chunk pp at a time."""

    def op(kind: str, i: int) -> tuple[str, int, int]:
        turn, rest = divmod(i, pp * chunks)
        chunk, batch = divmod(rest, pp)
        return kind, chunk if kind == "F" else chunks - 1 - chunk, turn * pp + batch

    total = count * chunks
    warm_up = min((chunks - 1) * pp + ahead * (pp - 1 - rank), total)
    yield from (op("F", i) for i in range(warm_up))
    for i in range(total - warm_up):
        yield op("F", warm_up + i)
        yield op("B", i)
    yield from (op("B", i) for i in range(total - warm_up, total))


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("ahead", [1, 2])
def test_micro_batches_in_flight_match_a_simulated_schedule(pp: int, chunks: int, rounds: int, ahead: int) -> None:
    count = pp * rounds
    layout = ExecutionPlan(
        gpus=float(pp), sequence=64.0, batch=float(count), pp=float(pp), chunks=float(chunks), chunks_ahead=float(ahead)
    )
    length, most = played(pp, chunks, count, ahead)
    assert [float(in_flight(layout, float(stage))) * chunks for stage in range(pp)] == pytest.approx(most)
    # Running ahead less costs no bubble: (pp - 1) / (chunks x micro-batches) of the work, whichever it is.
    assert length == pytest.approx(3 * count * chunks * (1 + (pp - 1) / (chunks * count)))


def test_the_lean_schedule_exposes_every_transfer() -> None:
    calm = played(8, 4, 64, 2)[0]
    lean, ahead = (played(8, 4, 64, n, hop=0.05)[0] - calm for n in (1, 2))
    assert lean == pytest.approx(2 * 0.05 * 4 * 64, rel=0.1)  # two transfers per chunk and micro-batch
    assert ahead < lean / 3


def test_llama_3_405b_fits_where_it_was_trained() -> None:
    """TP8, PP16, 8K tokens without recomputation on GPUs of 80 GB, gradients and optimizer states sharded, one layer
    less on the first and the last stage (arXiv 2407.21783, section 3.3.2): 16,384 GPUs with 16 micro-batches each."""
    shape = load_model("llama3-405b")
    meta = ExecutionPlan(gpus=16384.0, sequence=8192.0, batch=2048.0, tp=8.0, pp=16.0, chunks=8.0, zero=2.0,
                  sequence_parallel=1.0, gradient_bytes=4.0)  # fmt: skip
    limit = 79.6 * 2**30 * 0.97
    assert float(memory_use(shape, meta).total_bytes) <= limit
    # On 8,192 GPUs there are 32 micro-batches, and the usual schedule would hold more than 16 of them.
    fewer = replace(meta, gpus=8192.0)
    assert float(memory_use(shape, fewer).total_bytes) > limit
    assert float(memory_use(shape, replace(fewer, chunks_ahead=1.0)).total_bytes) <= limit
    # Without ZeRO-2 float32 gradients of a whole stage, 12 GiB, would not fit beside the activations.
    assert float(memory_use(shape, replace(meta, zero=1.0)).total_bytes) > limit


def test_zero_2_keeps_gradients_of_two_chunks() -> None:
    base = replace(BASE, pp=8.0, chunks=5.0)
    whole, cut = (float(memory_use(MODEL, replace(base, zero=z)).gradients_bytes) for z in (1.0, 2.0))
    assert cut == pytest.approx(whole * (2 / 5 + 1 / 128))


@given(chunks=st.sampled_from([1.0, 2.0, 5.0]), pp=powers, recompute=st.sampled_from([NONE, SELECTIVE, FULL]))
def test_memory_saving_options_never_increase_memory(chunks: float, pp: float, recompute: int) -> None:
    here = replace(BASE, pp=pp, chunks=chunks, recompute=float(recompute))
    assert total(replace(here, zero=2.0)) <= total(here)
    assert total(replace(here, chunks_ahead=1.0)) <= total(here)


@pytest.mark.parametrize("pp", [1.0, 8.0])
def test_selective_recomputation_never_needs_more_memory_than_none(pp: float) -> None:
    for flash in (0.0, 1.0):
        none, selective = (
            total(replace(BASE, pp=pp, flash=flash, recompute=float(policy))) for policy in (NONE, SELECTIVE)
        )
        assert selective <= none
