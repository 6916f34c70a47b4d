"""The response queue: nothing is lost or mixed, and silence is an error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.server.backend import CompletionDelta, Usage
from lakh.server.backends.response_queue import ResponseQueue, merge_deltas
from lakh.server.request import RequestError
from lakh.server.tools.tool_call import ToolCallDelta

LOGPROBS = {"tokens": ["a"]}
pieces = st.builds(
    CompletionDelta,
    st.integers(0, 2),
    st.text("ab", max_size=3),
    st.sampled_from([None, None, None, "stop"]),
    st.lists(st.integers(0, 9), max_size=2).map(tuple),
    st.sampled_from([None, None, LOGPROBS]),
    tool_calls=st.sampled_from([(), (ToolCallDelta(0, "1", "f", "{}"),)]),
)


@given(st.lists(st.one_of(pieces, st.just(Usage(1, 2)), st.none()), max_size=12))
def test_merged_deltas_have_the_same_content(items: list[Any]) -> None:
    found = list(merge_deltas(items))

    def content(index: int, some: list[Any]) -> tuple[Any, ...]:
        mine = [item for item in some if isinstance(item, CompletionDelta) and item.index == index]
        return (
            "".join(piece.text for piece in mine),
            tuple(token for piece in mine for token in piece.tokens),
            sum(len(piece.tool_calls) for piece in mine),
            [piece.finish_reason for piece in mine if piece.finish_reason],
            sum(piece.logprobs is not None for piece in mine),
        )

    for index in range(3):
        assert content(index, found) == content(index, items)
    others = [item for item in items if not isinstance(item, CompletionDelta)]
    assert [item for item in found if not isinstance(item, CompletionDelta)] == others
    plain = [
        isinstance(item, CompletionDelta) and item.logprobs is None and item.finish_reason is None for item in found
    ]
    assert not any(
        plain[at] and isinstance(item, CompletionDelta) and item.logprobs is None and item.index == found[at].index
        for at, item in enumerate(found[1:])
    )  # everything mergeable is merged


def test_a_slow_reader_gets_fewer_larger_deltas_and_the_end() -> None:
    async def scenario() -> list[Any]:
        mailbox = ResponseQueue(timeout_s=60.0)
        for item in (
            CompletionDelta(0, "a"),
            CompletionDelta(0, "b"),
            CompletionDelta(0, "c", "stop"),
            Usage(3, 3),
            None,
        ):
            mailbox.put(item)
        found = [item async for item in mailbox.read()]
        assert mailbox.is_finished
        return found

    assert asyncio.run(scenario()) == [CompletionDelta(0, "abc", "stop"), Usage(3, 3)]


def test_silence_is_a_503_and_an_error_is_raised_as_it_is() -> None:
    async def read(mailbox: ResponseQueue) -> None:
        async for _ in mailbox.read():
            pass

    async def scenario() -> None:
        with pytest.raises(RequestError) as silent:
            await read(ResponseQueue(timeout_s=0.01))
        assert (silent.value.status, silent.value.code) == (503, "timeout")
        mailbox = ResponseQueue(timeout_s=60.0)
        mailbox.put(RuntimeError("broken"))
        with pytest.raises(RuntimeError, match="broken"):
            await read(mailbox)
        assert mailbox.is_finished

    asyncio.run(scenario())
