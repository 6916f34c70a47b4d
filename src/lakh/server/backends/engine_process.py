"""A backend with an engine in a child process, so the API's event loop and the engine never share Python's GIL.

    lakh serve: API, event loop  ── one socket pair (lakh.child_process) ──  child: engine and its thread

Messages to the child: ("submit", id, request), ("cancel", id), ("drain",). From it: (EngineStatus, description) once
the model is loaded, then EngineStatus, and lists of (id, CompletionDelta | Usage | exception | None). If the child
dies, every request ends with a 503 and `died` says how.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable
from typing import Any

from lakh.child_process import AsyncChannel, ChannelClosed, ChildProcess
from lakh.errors import PeerLost
from lakh.server.backend import CompletionDelta, ModelCard, Usage, wait_until
from lakh.server.backends.engine_process_main import EngineStatus
from lakh.server.backends.response_queue import ResponseQueue, response_timeout_s
from lakh.server.metrics import MetricFamily
from lakh.server.request import CompletionRequest, RequestError

__all__ = ["EngineProcessBackend"]

MAIN = "lakh.server.backends.engine_process_main:main"
LOAD_TIMEOUT_S = 900.0  # a large model from a slow disk, and the capture of CUDA graphs
CLOSE_S = 5.0  # for the child to end by itself


class EngineProcessBackend:
    def __init__(self, load: dict[str, Any], *, max_waiting: int, on_death: Callable[[], None] = lambda: None) -> None:
        """`load`: the arguments of `load_engine`. Returns when the model is ready; raises the child's errors."""
        self._on_death = on_death
        self.died: str | None = None
        """How the child ended, if it was not asked to."""
        self._closed = False
        self._ids = itertools.count()
        self._responses: dict[int, ResponseQueue] = {}
        self._channel: AsyncChannel | None = None
        self._reading: asyncio.Task[None] | None = None
        self._child = ChildProcess.start(MAIN, load, max_waiting)
        try:
            self.status, self.description = self._child.channel.receive(LOAD_TIMEOUT_S)
        except (ChannelClosed, TimeoutError) as error:
            reason = self._child.exit_reason() if isinstance(error, ChannelClosed) else f"{error}"
            self._child.kill()
            found = f"ended before its model was loaded ({reason})"
            raise PeerLost("engine process", found, "see what it printed; out of memory is likely") from None
        except BaseException:
            self._child.kill()
            raise

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def num_running(self) -> int:
        return self.status.num_running

    @property
    def num_waiting(self) -> int:
        return self.status.num_waiting

    def models(self) -> list[ModelCard]:
        return [] if self.died else self.status.models

    def metric_families(self) -> list[MetricFamily]:
        return self.status.metric_families

    async def start(self) -> None:
        self._channel = await AsyncChannel.open(self._child.channel)
        self._reading = asyncio.create_task(self._read(self._channel))

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionDelta | Usage, None]:
        if self.died or self._closed or self._channel is None:
            raise _engine_gone()
        number, responses = next(self._ids), ResponseQueue(response_timeout_s(request))
        self._responses[number] = responses
        try:
            self._channel.send(("submit", number, request))
            async for item in responses.read():
                yield item
        finally:
            del self._responses[number]
            if not responses.is_finished:
                self._channel.send(("cancel", number))

    async def drain(self, timeout_s: float) -> None:
        await wait_until(lambda: not self._responses, timeout_s)
        if self._channel is not None:
            self._channel.send(("drain",))  # the rest ends with the text it has
        await wait_until(lambda: not self._responses or self.died is not None, CLOSE_S)

    async def close(self) -> None:
        self._closed = True
        if self._reading is not None:
            self._reading.cancel()
        if self._channel is not None:
            self._channel.close()
        await asyncio.to_thread(self._child.stop, CLOSE_S)

    async def _read(self, channel: AsyncChannel) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                message = await channel.receive()
                if isinstance(message, EngineStatus):
                    self.status = message
                    continue
                for number, item in message:
                    if number in self._responses:
                        self._responses[number].put(item)
        if not self._closed:
            self.died = "closed its connection"
            for responses in self._responses.values():
                responses.put(_engine_gone())
            await asyncio.to_thread(self._child.stop, CLOSE_S)
            self.died = f"ended ({self._child.exit_reason()})"
            self._on_death()


def _engine_gone() -> RequestError:
    return RequestError(None, "the engine process has ended", status=503, code="engine_gone")
