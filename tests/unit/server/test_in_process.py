"""An engine in this process: what waits for its text to be read waits in the queue, as far as clients can tell."""

from __future__ import annotations

import asyncio
import threading

import pytest

from lakh.server.backend import Usage
from lakh.server.backends.in_process import MAX_NEW_CHARS, InProcessBackend
from lakh.server.engine import Engine
from lakh.server.request import RequestError, parse

PATIENCE_S = 30.0


def test_texts_that_wait_to_be_read_count_as_the_queue(engine: Engine) -> None:
    prompt, suffix = "def add(", "x" * (MAX_NEW_CHARS + 1)  # is cut to what the context holds, once it is read

    async def story() -> None:
        backend, permit = InProcessBackend(engine, max_waiting=2), threading.Event()
        for _ in range(2):  # both threads have something to do
            backend.encoders.submit(permit.wait, PATIENCE_S)

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

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))
