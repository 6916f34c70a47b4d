"""Tenants share the engine fairly, whatever one of them sends."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.server.backend import CompletionDelta
from lakh.server.backends.encoder_threads import NUM_THREADS, THREADS_PER_TENANT, EncoderThreads
from lakh.server.backends.in_process import InProcessBackend
from lakh.server.engine import Engine, SamplingParams
from lakh.server.fairness import Share, ShareCounts, has_room
from lakh.server.request import RequestError, parse
from lakh.server.sequence import Sequence

TIMEOUT_S = 60.0
A, B, C = (Share(name, name) for name in "abc")
SALTED = [Share("gateway", f"gateway\0{number}") for number in range(3)]
shares = st.lists(st.sampled_from([A, B, C, *SALTED]), max_size=40)


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    assert ShareCounts([A, A]).next_to_start([A, A, A]) == 0


def test_the_tenant_with_the_fewest_running_is_next() -> None:
    assert ShareCounts([A, A, B]).next_to_start([A, A, B, C]) == 3
    assert ShareCounts([A, A, B]).next_to_start([A, A, B]) == 2
    assert ShareCounts([SALTED[0], SALTED[0], SALTED[1]]).next_to_start([SALTED[0], SALTED[1], SALTED[2]]) == 2
    assert ShareCounts([*SALTED, A]).next_to_start([SALTED[0], A]) == 1  # three salts are still one tenant


def test_only_a_share_with_nothing_running_preempts_and_the_youngest_of_the_largest() -> None:
    assert ShareCounts([A, B, A]).to_preempt(C, [A, B, A]) == 2
    assert ShareCounts([A, B]).to_preempt(C, [A, B]) is None  # nobody has more than one
    assert ShareCounts([A, A, B]).to_preempt(B, [A, A, B]) is None
    assert ShareCounts([]).to_preempt(B, []) is None
    running = [SALTED[0], SALTED[0], A, A, A]
    assert ShareCounts(running).to_preempt(SALTED[1], running) == 1  # inside its tenant, not from another


@given(waiting=shares, most=st.integers(1, 20))
def test_a_share_below_its_part_always_has_room_and_the_queue_is_bounded(waiting: list[Share], most: int) -> None:
    queue: list[Share] = []
    for share in waiting:
        if has_room(queue, share, most):
            queue.append(share)
        else:
            assert len(queue) >= most
            tenants = {one.tenant for one in queue} | {share.tenant}
            assert sum(one.tenant == share.tenant for one in queue) >= most // len(tenants)
    assert len(queue) <= 3 * most


def submit(engine: Engine, tenant: str, count: int, max_tokens: int = 8) -> list[Sequence]:
    prompt = engine.prompts.encode(f"def {tenant}(")
    sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0)
    seqs = [
        engine.make_sequence(prompt, sampling, copy=copy, cache_space=tenant, tenant=tenant) for copy in range(count)
    ]
    engine.submit(*seqs)
    return seqs


def test_a_tenant_with_many_choices_does_not_delay_another(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.max_seqs = 4
    greedy = submit(engine, "greedy", 32, max_tokens=40)
    for _ in range(3):
        engine.step()
    assert engine.num_running == 4
    (late,) = submit(engine, "late", 1)
    num_steps = 0
    while late.finish_reason is None:
        engine.step()
        num_steps += 1
    assert num_steps <= 10  # its prompt and eight tokens: it took the place of a younger choice at once
    assert engine.counters.preempted_seqs == 1
    while any(seq.finish_reason is None for seq in greedy):
        engine.step()
    assert engine.pool.num_used == 0


def test_slots_are_shared_equally_while_all_have_work(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.max_seqs = 6
    everybody = [*submit(engine, "a", 20), *submit(engine, "b", 20), *submit(engine, "c", 6)]
    seen: Counter[str] = Counter()
    while any(seq.tenant == "c" and seq.finish_reason is None for seq in everybody):
        engine.step()
        for seq in engine.scheduler.running:
            seen[seq.tenant] += 1
    assert max(seen["a"], seen["b"]) <= 2 * min(seen["a"], seen["b"])
    engine.abort(*everybody)


def test_a_full_queue_refuses_the_tenant_that_filled_it(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.max_seqs = 2

    async def scenario() -> None:
        backend = InProcessBackend(engine, max_waiting=8)

        async def ask(tenant: str, n: int = 1) -> str:
            request = parse({"prompt": "def add(", "n": n, "max_tokens": 60, "temperature": 0}, tenant)
            return "".join([item.text async for item in backend.complete(request) if isinstance(item, CompletionDelta)])

        greedy = asyncio.create_task(ask("greedy", 64))
        while backend.num_waiting < 60:
            await asyncio.sleep(0.001)
        with pytest.raises(RequestError) as refused:
            await ask("greedy")
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
        texts = [await ask("other") for _ in range(10)]  # one at a time, as an editor does
        assert len(set(texts)) == 1
        assert backend.num_waiting > 8
        greedy.cancel()
        await asyncio.gather(greedy, return_exceptions=True)
        await backend.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_prompts_and_forms_of_one_tenant_do_not_delay_those_of_another() -> None:
    threads, permit = EncoderThreads(), threading.Event()
    order: list[str] = []
    greedy = [threads.submit(A, lambda: permit.wait(TIMEOUT_S)) for _ in range(20)]
    try:
        assert threads.submit(B, lambda: "first").result(TIMEOUT_S) == "first"  # while everything of A hangs
        blocked = [threads.submit(B, lambda: permit.wait(TIMEOUT_S)) for _ in range(NUM_THREADS - THREADS_PER_TENANT)]
        late = [threads.submit(share, lambda name=share.tenant: order.append(name)) for share in (A, A, C)]
        left_out = threads.submit(C, lambda: order.append("cancelled"))
        assert left_out.cancel()
        failing = threads.submit(C, lambda: 1 // 0)
    finally:
        permit.set()
    for work in (*greedy, *blocked, *late):
        work.result(TIMEOUT_S)
    with pytest.raises(ZeroDivisionError):
        failing.result(TIMEOUT_S)
    assert order == ["c", "a", "a"]  # the tenant with nothing running is next
    threads.close()
    assert not threads._running
