"""The block pool never loses or duplicates a block, finds prefixes, and keeps tenants apart."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lakh.server.model.block_pool import BlockPool, Lease, _below

SIZE = 4


def check(pool: BlockPool, leases: list[Lease]) -> None:
    """Every block is either free, cached, or owned by one lease."""
    cached_blocks = [node.block for root in pool._roots.values() for node in _below(root)]
    own = [block for lease in leases for block in lease.blocks[len(lease.nodes) :]]
    removed = {node.block for lease in leases for node in lease.nodes if node.is_removed}
    everything = sorted([*pool._free, *cached_blocks, *own, *removed])
    assert everything == list(range(pool.num_blocks))
    held = {node.block for lease in leases for node in lease.nodes}
    assert pool.num_available == pool.num_blocks - len(held) - len(own)


def num_cached(pool: BlockPool) -> int:
    return sum(len(_below(root)) for root in pool._roots.values())


def cache_tokens(pool: BlockPool, tokens: list[int], space: str = "") -> None:
    lease = pool.open(space, [*tokens, -1])
    assert pool.extend(lease, len(tokens))
    pool.close(lease, tokens)


def test_cached_prefixes_are_found_to_the_token() -> None:
    pool = BlockPool(16, SIZE)
    cache_tokens(pool, list(range(10)))
    for length, cached in ((11, 10), (10, 9), (5, 4), (1, 0)):
        lease = pool.open("", [*range(length)])
        assert lease.num_cached == cached
        assert (lease.copy is not None) == (cached % SIZE != 0)
        pool.close(lease)
    other = pool.open("", [0, 1, 2, 3, 4, 99, 100])
    assert other.num_cached == 5
    check(pool, [other])


def test_spaces_do_not_share_tokens() -> None:
    pool = BlockPool(16, SIZE)
    cache_tokens(pool, list(range(12)), "mine")
    assert pool.open("mine", list(range(13))).num_cached == 12
    assert pool.open("yours", list(range(13))).num_cached == 0
    assert pool.open(("mine", 1), list(range(13))).num_cached == 0


def test_sequences_with_a_common_prefix_share_blocks() -> None:
    pool = BlockPool(8, SIZE)
    first, second = pool.open("", list(range(9))), pool.open("", list(range(9)))
    assert pool.extend(first, 9)
    assert pool.extend(second, 9)
    assert pool.num_available == 2
    pool.share(first, list(range(8)))
    pool.share(second, list(range(8)))
    assert first.blocks[:2] == second.blocks[:2]
    assert pool.num_available == 4
    check(pool, [first, second])


def test_eviction_is_least_recently_used_and_skips_leased_blocks() -> None:
    pool = BlockPool(4, SIZE)
    held = pool.open("", [*range(5)])
    assert pool.extend(held, 4)
    pool.share(held, [*range(4)])
    cache_tokens(pool, [10, 11, 12, 13])
    cache_tokens(pool, [20, 21, 22, 23])
    pool.close(pool.open("", [10, 11, 12, 13, 0]))  # used again
    cache_tokens(pool, [30, 31, 32, 33])
    cache_tokens(pool, [40, 41, 42, 43])
    lengths = [pool.open("", [n, n + 1, n + 2, n + 3, 0]).num_cached for n in (0, 10, 20, 40)]
    assert lengths == [4, 4, 0, 4]


def test_a_failed_extend_changes_nothing() -> None:
    pool = BlockPool(3, SIZE)
    lease = pool.open("", [1, 2])
    assert pool.extend(lease, 8)
    before = list(lease.blocks)
    assert not pool.extend(lease, 17)
    assert list(lease.blocks) == before
    check(pool, [lease])


def test_extending_a_prompt_does_not_accumulate_blocks() -> None:
    pool = BlockPool(64, SIZE)
    for length in range(1, 40):
        cache_tokens(pool, list(range(length)))
    assert num_cached(pool) == 10


def test_reset_keeps_leased_blocks() -> None:
    pool = BlockPool(8, SIZE)
    lease = pool.open("", list(range(9)))
    assert pool.extend(lease, 9)
    pool.share(lease, list(range(8)))
    cache_tokens(pool, [50, 51, 52, 53])
    pool.reset()
    assert num_cached(pool) == 0
    check(pool, [lease])
    pool.close(lease, list(range(9)))
    assert pool.num_available == 8
    assert pool.open("", list(range(9))).num_cached == 0


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=22)


@settings(max_examples=150)
@given(
    story=st.lists(
        st.tuples(st.sampled_from(["open", "close", "abort", "share", "forget"]), tokens, st.integers(0, 5)),
        max_size=40,
    ),
    num_blocks=st.integers(2, 12),
)
def test_no_sequence_of_operations_loses_or_duplicates_a_block(
    story: list[tuple[str, list[int], int]], num_blocks: int
) -> None:
    pool = BlockPool(num_blocks, SIZE)
    open_rows: list[tuple[Lease, list[int]]] = []
    for what, ids, pick in story:
        if what == "open":
            lease = pool.open(pick % 2, ids)
            assert lease.num_cached < len(ids)
            if pool.extend(lease, len(ids)):
                open_rows.append((lease, ids))
            else:
                pool.close(lease, ids[: lease.num_cached])
        elif what == "forget":
            pool.reset()
        elif open_rows:
            lease, mine = open_rows[pick % len(open_rows)]
            if what == "share":
                pool.share(lease, mine)
            else:
                pool.close(lease, mine if what == "close" else ())
                open_rows.remove((lease, mine))
        check(pool, [lease for lease, _ in open_rows])
    for lease, mine in open_rows:
        pool.close(lease, mine)
    assert pool.num_available == num_blocks
