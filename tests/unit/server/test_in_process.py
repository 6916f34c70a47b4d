"""The in-process backend: requests that wait for an encoder thread count as waiting."""

from __future__ import annotations

import asyncio
import threading

import pytest

from lakh.server.backend import Usage
from lakh.server.backends.in_process import MAX_NEW_CHARS, InProcessBackend
from lakh.server.engine import Engine
from lakh.server.request import RequestError, parse

TIMEOUT_S = 30.0


def test_texts_that_wait_for_an_encoder_thread_count_as_waiting(engine: Engine) -> None:
    prompt, suffix = "def add(", "x" * (MAX_NEW_CHARS + 1)  # cut to the context when it is tokenized

    async def scenario() -> None:
        backend, permit = InProcessBackend(engine, max_waiting=2), threading.Event()
        for _ in range(2):  # both encoder threads are busy
            backend.encoders.submit(permit.wait, TIMEOUT_S)

        async def ask(number: int) -> list[object]:
            request = parse({"prompt": prompt + str(number), "suffix": suffix, "max_tokens": 2})
            return [item async for item in backend.complete(request)]

        waiting = [asyncio.create_task(ask(number)) for number in range(2)]
        while backend.num_waiting < 2:
            await asyncio.sleep(0.001)
        with pytest.raises(RequestError) as caught:
            await ask(2)
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        permit.set()
        for answer in await asyncio.gather(*waiting):
            assert isinstance(answer[-1], Usage)
        assert backend.num_waiting == 0
        await backend.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))
