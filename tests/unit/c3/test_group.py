"""Communicators without torch, over the native core. Ranks are threads, on one host or on emulated ones."""

import threading
import time
import urllib.request
from datetime import timedelta

import numpy as np
import pytest
from bench.comm.emulation import emulate_links
from torch.distributed import HashStore

from lakh.c3 import native
from lakh.c3.group import CommGroup
from lakh.c3.metrics import find_slowest_rank, serve_metrics
from lakh.c3.native import FailureCause
from lakh.c3.topology import WIRES, Link, Topology, Wire
from lakh.errors import LakhError, PeerError, PeerTimeout, UserError

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(native.open_library() is None, reason="the native core is not built: apt-get install g++"),
]
F32, SUM, AVG = native.DTYPES["f32"], native.OPS["sum"], native.OPS["avg"]
ONE_HOST = [("h", "", "")] * 4
FOUR_HOSTS = [(f"h{rank}", "", "") for rank in range(4)]
RACKS = [(f"h{rank // 2}", f"r{rank // 4}", "") for rank in range(8)]
UNEQUAL = [("a", "", ""), ("a", "", ""), ("b", "", "")]


def with_ranks(places, body, timeout_s: float = 60.0, topology=None):
    """Run `body(group)` in one thread per rank. Returns each result or error."""
    store = HashStore()
    found = [None] * len(places)

    def one(rank: int) -> None:
        group = None
        try:
            group = CommGroup.join(store, rank, len(places), timeout_s=timeout_s, place=places[rank], topology=topology)
            found[rank] = body(group)
        except LakhError as error:
            found[rank] = error
        finally:
            if group is not None:
                group.close()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 30)
        assert not thread.is_alive(), "a rank hangs"
    return found


def reduce_all(group, values, op=SUM, **extra):
    address = values.ctypes.data
    group.run("all_reduce", F32, op, -1, address, address, values.size, **extra)
    return values


@pytest.mark.parametrize("algorithm", ["flat", "halving_doubling", "ring", "hierarchical", None])
@pytest.mark.parametrize("places", [ONE_HOST, FOUR_HOSTS, RACKS, UNEQUAL], ids=["host", "hosts", "racks", "unequal"])
def test_all_reduce_gives_identical_bits_on_all_ranks(places, algorithm) -> None:
    size = len(places)
    inputs = [
        [np.random.default_rng(10 * r + n).normal(size=n).astype(np.float32) for n in (1, 999, 70_001)]
        for r in range(size)
    ]

    def body(group):
        group.schedules.algorithm = algorithm
        return [reduce_all(group, values.copy(), AVG) for values in inputs[group.rank]]

    found = with_ranks(places, body)
    for index in range(3):
        expected = np.mean([row[index].astype(np.float64) for row in inputs], axis=0)
        for result in found:
            assert not isinstance(result, LakhError), result
            np.testing.assert_allclose(result[index], expected, rtol=1e-5, atol=1e-6)  # a few roundings of float32
            assert np.array_equal(result[index], found[0][index])


def test_a_distant_peer_gets_more_connections_and_chunks_of_any_size_arrive_in_order() -> None:
    far, near = [("a", "", "z0"), ("b", "", "z1")], [("a", "", ""), ("b", "", "")]
    count = 100_001  # 400 KB: seven chunks of 64 KB, the last one ragged

    def body(group):
        group.schedules.algorithm = "ring"
        ramp = np.arange(count, dtype=np.float32)
        assert np.array_equal(reduce_all(group, ramp.copy()), 2 * ramp)
        return group.counters()["connections"]

    for places, streams in ((near, 2), (far, 3)):
        wires = {**WIRES, "host": Wire(2, 64, 64), "zone": Wire(3, 64, 64)}
        found = with_ranks(places, body, topology=Topology(tuple(places), wires=wires))
        assert found == [streams + 1] * 2, found  # plus the control connection


@pytest.mark.parametrize("places", [FOUR_HOSTS, ONE_HOST], ids=["hosts", "host"])
def test_every_operation_between_hosts(places) -> None:
    size = len(places)

    def body(group):
        rank = group.rank
        mine = np.arange(1000, dtype=np.float32) + rank
        everyone = np.empty(1000 * size, np.float32)
        group.run("all_gather", F32, -1, -1, mine.ctypes.data, everyone.ctypes.data, 1000)
        assert np.array_equal(everyone.reshape(size, 1000)[:, 0], np.arange(size))
        part = np.empty(1000, np.float32)
        group.run("reduce_scatter", F32, SUM, -1, everyone.ctypes.data, part.ctypes.data, 1000)
        assert np.array_equal(part, size * (np.arange(1000) + rank))
        data = mine.copy()
        group.run("broadcast", F32, -1, 2, 0, data.ctypes.data, 1000)
        assert data[0] == 2
        total = mine.copy()
        group.run("reduce", F32, SUM, 1, mine.ctypes.data, total.ctypes.data, 1000)
        assert rank != 1 or total[0] == sum(range(size))
        group.run("gather", F32, -1, 0, mine.ctypes.data, everyone.ctypes.data, 1000)
        group.run("scatter", F32, -1, 0, everyone.ctypes.data, part.ctypes.data, 1000)
        assert np.array_equal(part, mine)
        sends = [10 * (rank + 1)] * size
        receives = [10 * (r + 1) for r in range(size)]
        splits = [sum(sends[:i]) for i in range(size + 1)] + [sum(receives[:i]) for i in range(size + 1)]
        given, got = np.full(sum(sends), rank, np.float32), np.empty(sum(receives), np.float32)
        group.run("all_to_all", F32, -1, -1, given.ctypes.data, got.ctypes.data, 0, splits=splits)
        assert np.array_equal(np.unique(got), np.arange(size))
        group.run("barrier", 6, -1, -1, 0, 0, 0)
        return "ok"

    assert with_ranks(places, body) == ["ok"] * size


@pytest.mark.parametrize("places", [FOUR_HOSTS, RACKS, UNEQUAL, ONE_HOST], ids=["hosts", "racks", "unequal", "host"])
def test_a_part_may_overlap_the_gathered_or_scattered_buffer(places) -> None:
    def body(group):
        for count in (1, 999, 300_001):
            everyone = np.full((group.size, count), -1, np.float32)
            mine = everyone[group.rank]
            mine[:] = group.rank
            group.run("all_gather", F32, -1, -1, mine.ctypes.data, everyone.ctypes.data, count)
            assert (everyone == np.arange(group.size)[:, None]).all()
            everyone += group.rank
            group.run("reduce_scatter", F32, SUM, -1, everyone.ctypes.data, mine.ctypes.data, count)
            assert (mine == group.size * group.rank + sum(range(group.size))).all()
        return "ok"

    assert with_ranks(places, body) == ["ok"] * len(places)


@pytest.mark.parametrize("places", [FOUR_HOSTS, RACKS, UNEQUAL, ONE_HOST], ids=["hosts", "racks", "unequal", "host"])
def test_zero_elements_are_valid(places) -> None:
    def body(group):
        there = np.zeros(1, np.float32).ctypes.data
        for operation, op, root in (
            ("all_reduce", AVG, -1),
            ("reduce_scatter", SUM, -1),
            ("all_gather", -1, -1),
            ("broadcast", -1, 1),
            ("reduce", SUM, 1),
            ("gather", -1, 0),
            ("scatter", -1, 0),
        ):
            group.run(operation, F32, op, root, there, there, 0)
        group.run("all_reduce", F32, SUM, -1, there, there, 0, codec="int4")
        # only one pair exchanges data
        mine, other = group.rank, 1 - group.rank
        counts = [int(mine < 2 and rank == other) for rank in range(group.size)]
        offsets = [sum(counts[:rank]) for rank in range(group.size + 1)]
        given, got = np.full(1, mine, np.float32), np.full(1, -1, np.float32)
        group.run("all_to_all", F32, -1, -1, given.ctypes.data, got.ctypes.data, 0, splits=2 * offsets)
        assert got[0] == (other if mine < 2 else -1)
        return float(reduce_all(group, np.ones(3, np.float32))[0])

    assert with_ranks(places, body) == [len(places)] * len(places)


def test_zero_elements_on_one_rank_only_is_an_error_on_all_ranks() -> None:
    def body(group):
        reduce_all(group, np.ones(10 * (group.rank > 0), np.float32))

    for places in (FOUR_HOSTS, ONE_HOST):
        found = with_ranks(places, body)
        assert all(isinstance(error, LakhError) for error in found), found
        assert any(error.cause == FailureCause.INVALID and "disagree" in str(error) for error in found), found


def test_every_call_on_a_closed_group_reports_it() -> None:
    group = CommGroup.join(HashStore(), 0, 1, place=ONE_HOST[0])
    server = serve_metrics(group)
    group.close()
    group.close()
    group.abort("again")
    group.set_timeout(1.0)
    there = np.ones(4, np.float32).ctypes.data
    for call in (
        lambda: group.run("all_reduce", F32, SUM, -1, there, there, 4),
        lambda: group.start("all_reduce", F32, SUM, -1, there, there, 4),
        lambda: group.wait(1),
        lambda: group.send(0, 0, there, 4),
        lambda: group.recv(-1, 0, there, 4),
        lambda: group.wait_message(1, 0.1),
    ):
        with pytest.raises(UserError, match="the group was closed"):
            call()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
        assert 'lakh_c3_up{rank="0"} 0' in answer.read().decode()
    server.close()


@pytest.mark.parametrize(("codec", "error"), [("bf16", 2**-7), ("int8", 0.02), ("int4", 0.3)])
def test_codecs_have_small_errors_and_error_feedback(codec, error) -> None:
    steps, count = 30, 5000
    truth = np.random.default_rng(1).normal(size=count).astype(np.float32)

    def body(group):
        residual = np.zeros(count, np.float32)
        total = np.zeros(count, np.float64)
        first = None
        for step in range(steps):
            values = truth.copy()
            reduce_all(group, values, AVG, codec=codec, residual=residual.ctypes.data, seed=step)
            first = values if first is None else first
            total += values
        return first, total / steps

    found = with_ranks(FOUR_HOSTS[:2], body)
    for first, average in found:
        assert np.abs(first - truth).max() < error * np.abs(truth).max()
        assert np.array_equal(first, found[0][0])
        # the error of one step is added to the next: the average over steps converges
        assert np.abs(average - truth).max() < 0.1 * error * np.abs(truth).max() + 1e-3


def test_the_core_emulates_slow_links(tmp_path) -> None:
    topology = Topology(tuple(FOUR_HOSTS[:2]), {"host": Link(20e6, 1000)})

    def body(group):
        emulate_links(group, topology, str(tmp_path / "links"))
        reduce_all(group, np.ones(100_000, np.float32))
        return group.counters()["bytes_sent"]

    assert all(sent >= 400_000 for sent in with_ranks(FOUR_HOSTS[:2], body))


def test_an_emulated_delay_applies_to_every_operation(tmp_path) -> None:
    topology = Topology(tuple(FOUR_HOSTS[:2]), {"host": Link(50e6, 20_000)})

    def body(group):
        emulate_links(group, topology, str(tmp_path / "links"))
        group.schedules.algorithm = "ring"  # two stages, one after the other
        times_s = []
        for count in (10, 10, 50_000, 10):
            began_s = time.monotonic()
            assert (reduce_all(group, np.ones(count, np.float32)) == 2).all()
            times_s.append(time.monotonic() - began_s)
        return times_s

    for times_s in with_ranks(FOUR_HOSTS[:2], body):
        # both stages of each; a rank may begin while the other's first message is in flight
        assert min(times_s[1:]) > 0.02, times_s
        assert sum(times_s) > 8 * 0.02 - 0.02, times_s


def test_a_slow_host_sends_its_input_once_and_all_ranks_have_the_same_sum() -> None:
    topology = Topology(tuple(FOUR_HOSTS), {"host": Link(50e6)}, {"//h1": 12.5e6})
    inputs = [np.random.default_rng(rank).normal(size=200_001).astype(np.float32) for rank in range(4)]

    def body(group):
        plan = group.schedules.get("all_reduce", 200_001, 4)
        return reduce_all(group, inputs[group.rank].copy()), plan, group.counters()["bytes_sent"]

    found = with_ranks(FOUR_HOSTS, body, topology=topology)
    expected = np.sum([values.astype(np.float64) for values in inputs], axis=0)
    for result, plan, _ in found:
        assert np.array_equal(result, found[0][0])
        assert np.allclose(result, expected, atol=1e-5)
        assert "unequal parts" in plan.reason
    sent = [sent for _, _, sent in found]
    assert 200_001 * 4 <= sent[1] < 1.01 * 200_001 * 4  # plus a few headers
    assert min(sent[0], sent[2], sent[3]) > 1.6 * 200_001 * 4


def test_a_disagreement_over_the_network_is_an_error_on_all_ranks() -> None:
    def body(group):
        reduce_all(group, np.ones(10 + (group.rank == 0), np.float32))

    found = with_ranks(FOUR_HOSTS, body)
    assert all(isinstance(error, LakhError) for error in found)
    assert any("disagree" in str(error) for error in found)


def test_a_missing_rank_is_a_timeout_and_not_a_hang() -> None:
    def body(group):
        if group.rank:
            reduce_all(group, np.ones(10, np.float32))

    for places in (ONE_HOST[:2], FOUR_HOSTS[:2]):
        found = with_ranks(places, body, timeout_s=1.0)
        assert isinstance(found[1], PeerError)


@pytest.mark.parametrize("timeout_s", [0.30, 0.51, 0.52, 0.53])
def test_a_late_rank_is_a_timeout_wherever_the_deadline_lies_between_two_checks(timeout_s: float) -> None:
    ended = threading.Event()

    def body(group):
        if group.rank == 0:  # alive, and never enters the collective
            assert ended.wait(20)
            return
        group.set_timeout(timeout_s)
        try:
            reduce_all(group, np.ones(10, np.float32))
        finally:
            ended.set()

    error = with_ranks(ONE_HOST[:2], body)[1]
    assert isinstance(error, PeerTimeout)
    assert error.cause == FailureCause.TIMEOUT


def test_all_ranks_get_the_reason_of_an_abort() -> None:
    def body(group):
        if group.rank == 0:
            group.abort("no longer needed")
        reduce_all(group, np.ones(10, np.float32))

    for places in (ONE_HOST, FOUR_HOSTS):
        for error in with_ranks(places, body):
            assert isinstance(error, PeerError)
            assert error.cause == FailureCause.ABORTED


@pytest.mark.slow
def test_a_busy_rank_is_waited_for_even_when_its_buffers_are_full() -> None:
    """Unread data fills the window of a busy rank, and to the sender its kernel then looks like a cut link."""
    sent = np.arange(6_000_000, dtype=np.float32)  # 24 MB: more than connections hold

    def body(group):
        values, got, other = np.ones(6_000_000, np.float32), np.empty_like(sent), 1 - group.rank
        if group.rank == 1:
            time.sleep(4)  # longer than the 1.5 s without acknowledgements that mean a cut link
            message, _ = group.recv(other, 1, got.ctypes.data, got.nbytes)
        else:
            message = group.send(other, 1, sent.ctypes.data, sent.nbytes)
        reduce_all(group, values)
        group.wait_message(message, 60.0)
        return bool((values == 2).all()) and (group.rank == 0 or np.array_equal(got, sent))

    assert with_ranks(FOUR_HOSTS[:2], body) == [True, True]


def test_a_wrong_topology_is_refused_on_all_ranks(monkeypatch) -> None:
    lie = Topology(tuple([("one", "", "")] * 2))
    identities = iter(["this", "that"])
    monkeypatch.setattr(native, "host_identity", lambda: next(identities))
    for error in with_ranks(ONE_HOST[:2], lambda group: None, topology=lie):
        assert isinstance(error, UserError)
        assert "on one host" in str(error)


def test_a_missing_rank_is_a_timeout_of_the_rendezvous() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(PeerTimeout):
        CommGroup.join(store, 0, 2, name="alone")


def test_counters_are_served_for_prometheus() -> None:
    def body(group):
        reduce_all(group, np.ones(10, np.float32))
        server = serve_metrics(group)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        server.close()
        return text

    for rank, text in enumerate(with_ranks(ONE_HOST[:2], body)):
        assert f'lakh_c3_operations_total{{rank="{rank}"}} 1' in text
        assert f'lakh_c3_up{{rank="{rank}"}} 1' in text
        assert f'lakh_c3_place_info{{host="{ONE_HOST[rank][0]}",' in text
        assert f'lakh_c3_waited_for_microseconds_total{{peer="{1 - rank}",rank="{rank}"}}' in text


def test_the_slowest_rank_is_waited_for_and_does_not_wait() -> None:
    worst, reason = find_slowest_rank([[0, 0, 9_000_000], [10_000, 0, 9_000_000], [0, 0, 0]])
    assert worst == 2
    assert "rank 2" in reason
    assert find_slowest_rank([[0, 10], [10, 0]])[0] is None


def test_start_up_costs_each_rank_a_constant_number_of_requests() -> None:
    """No rank makes N requests: the tree bounds them, and connections are opened on first use."""

    class Counting(HashStore):
        def __init__(self) -> None:
            super().__init__()
            self.requests: dict[str, int] = {}

        def get(self, key: str) -> bytes:
            name = threading.current_thread().name
            self.requests[name] = self.requests.get(name, 0) + 1
            return super().get(key)

    store, size = Counting(), 64
    groups: list[CommGroup | None] = [None] * size

    def one(rank: int) -> None:
        groups[rank] = CommGroup.join(store, rank, size, place=(f"h{rank}", "", ""))

    threads = [threading.Thread(target=one, args=(rank,), name=str(rank)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(group is not None and group.counters()["connections"] == 0 for group in groups)
    assert max(store.requests.values()) <= 1 + 2 * 16 + 2
    for group in groups:
        assert group is not None
        group.close()


def test_a_late_rank_learns_immediately_that_the_group_has_ended() -> None:
    """A rank may leave before it was connected to the others; ranks that wait for it ask."""

    def body(group):
        if group.rank == 0:
            return None
        began = time.monotonic()
        with pytest.raises(PeerError, match="rank 0 has left the group"):
            reduce_all(group, np.ones(10, np.float32))
        failure = group.failure()
        assert failure.dead == (0,)
        assert failure.cause == FailureCause.LEFT
        assert not failure.is_certain  # it may be alive
        return time.monotonic() - began

    waited_s = with_ranks(FOUR_HOSTS[:2], body)[1]
    assert waited_s < 30  # the deadline of the operation itself is 60 s
