"""Stores: values and counts that expire; a failing Redis is a quick miss and is used again later."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.errors import UserError
from lakh.server import store as stores
from lakh.server.store import MemoryCacheStore, RedisCacheStore, open_store


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def patient(url: str, secret: bytes | None = None, **options: Any) -> RedisCacheStore:
    """On a busy machine a working Redis may take more than 20 ms."""
    return RedisCacheStore(url, secret, limit_s=10.0, **options)


async def written(store: RedisCacheStore) -> None:
    """Until all writes are done."""
    await asyncio.gather(*store._writes)


def test_memory_entries_expire_and_count() -> None:
    async def main() -> None:
        clock = Clock()
        store = MemoryCacheStore(clock=clock)
        store.put("a", b"1", ttl_s=10)
        assert await store.get("a") == b"1"
        assert [await store.increment("n", amount, ttl_s=10) for amount in (1, 5, 0)] == [1, 6, 6]
        clock.now_s += 10
        assert await store.get("a") is None
        assert await store.increment("n", 2, ttl_s=10) == 2

    asyncio.run(main())


@given(sizes=st.lists(st.integers(0, 4000), max_size=40))
def test_memory_keeps_the_newest_within_its_bytes(sizes: list[int]) -> None:
    async def main() -> None:
        store = MemoryCacheStore(max_bytes=10_000)
        for number, size in enumerate(sizes):
            store.put(str(number), b"x" * size, ttl_s=60)
            assert store._bytes <= 10_000
            assert await store.get(str(number)) == b"x" * size

    asyncio.run(main())


def test_redis_stores_and_counts_for_all_servers(redis_server: Any) -> None:
    async def main() -> None:
        one, other = (patient(redis_server.url, b"of all servers") for _ in range(2))
        one.put("a", b"\xff\x00", ttl_s=60)
        await written(one)
        assert await other.get("a") == b"\xff\x00"
        assert await other.get("b") is None
        assert await one.increment("n", 2, ttl_s=60) == 2
        assert await other.increment("n", 3, ttl_s=60) == 5
        one.put("gone", b"1", ttl_s=0.001)
        await written(one)
        await asyncio.sleep(0.05)
        assert await other.get("gone") is None
        await one.close()
        await other.close()

    asyncio.run(main())


def test_a_killed_redis_is_a_miss_and_is_used_again_after_a_restart(redis_server: Any) -> None:
    async def main() -> None:
        clock = Clock()
        store = patient(redis_server.url, clock=clock)
        store.put("a", b"1", ttl_s=60)
        await written(store)
        redis_server.kill()
        assert await store.get("a") is None
        assert await store.increment("n", 1, ttl_s=60) is None
        assert not store.is_up
        failures = store.num_failures
        for _ in range(50):  # it is not asked during the pause
            assert await store.get("a") is None
        assert store.num_failures == failures
        redis_server.start()
        clock.now_s += stores.RETRY_S
        assert await store.increment("n", 7, ttl_s=60) == 7
        assert store.is_up
        await store.close()

    asyncio.run(main())


def test_a_hanging_redis_costs_a_request_its_limit_once(redis_server: Any) -> None:
    async def main() -> None:
        clock = Clock()
        store = RedisCacheStore(redis_server.url, clock=clock)
        os.kill(redis_server.process.pid, signal.SIGSTOP)
        try:
            for late in range(1, stores.MAX_LATE + 1):
                for _ in range(4):  # only the first call waits
                    assert await store.get("a") is None
                assert store.num_failures == late
                assert store.is_up == (late < stores.MAX_LATE)
                clock.now_s += stores.LATE_PAUSE_S
            assert await store.get("a") is None  # down: the pause is longer
            assert store.num_failures == stores.MAX_LATE
        finally:
            os.kill(redis_server.process.pid, signal.SIGCONT)
        await store.close()

    asyncio.run(main())


def test_a_missing_redis_is_no_error(tmp_path: Any) -> None:
    async def main() -> None:
        store = RedisCacheStore(f"unix://{tmp_path}/none.sock")
        assert await store.get("a") is None
        store.put("a", b"1", ttl_s=1)
        await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("address", ["", "disk", "http://a:1", "redis://u:secret@h:port", "redis://h:1/x?db=y"])
def test_an_invalid_cache_address_is_a_user_error_without_the_password(address: str) -> None:
    with pytest.raises(UserError) as caught:
        open_store(address)
    assert "secret" not in str(caught.value)


def test_cache_off_has_no_store() -> None:
    assert open_store("off") is None
    assert isinstance(open_store("memory"), MemoryCacheStore)


def test_values_that_another_secret_signed_count_as_missing(redis_server: Any) -> None:
    async def main() -> None:
        ours, twin, stranger = (patient(redis_server.url, secret) for secret in (b"a" * 16, b"a" * 16, None))
        ours.put("text:1", b"def f(): pass", ttl_s=60)
        await written(ours)
        assert await twin.get("text:1") == b"def f(): pass"
        assert await stranger.get("text:1") is None
        raw = await ours._redis.get("lakh:text:1")
        for forged in (b"", b"def f(): evil()", raw[:-1] + b"!", b"\0" * 32 + b"def f(): evil()"):
            await ours._redis.set("lakh:text:1", forged)
            assert await ours.get("text:1") is None
        await ours._redis.set("lakh:text:2", raw)  # a value of another key
        assert await ours.get("text:2") is None
        assert ours.num_forged == 5
        for store in (ours, twin, stranger):
            await store.close()

    asyncio.run(main())


def test_a_key_of_another_type_is_missing_and_the_store_stays_up(redis_server: Any) -> None:
    async def main() -> None:
        store = patient(redis_server.url, b"of all servers")
        store.put("text", b"1", ttl_s=60)
        await written(store)
        await store._redis.rpush("lakh:list", "x")
        await store._redis.set("lakh:words", "not a number")
        assert await store.get("list") is None
        assert await store.increment("list", 1, ttl_s=60) is None
        assert await store.increment("words", 1, ttl_s=60) is None
        assert await store.get("text") == b"1"  # not paused
        assert await store.increment("n", 2, ttl_s=60) == 2
        assert (store.is_up, store.num_failures, store.num_forged) == (True, 0, 3)
        store.put("list", b"2", ttl_s=60)  # a completion replaces it
        await written(store)
        assert await store.get("list") == b"2"
        await store._redis.config_set("maxmemory", 1)  # a refusal of every key is a failure
        assert await store.increment("n", 1, ttl_s=60) is None
        assert not store.is_up
        await store.close()

    asyncio.run(main())
