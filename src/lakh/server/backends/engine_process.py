"""A backend with an engine in a child process, so the API's event loop and the engine never share Python's GIL.

    lakh serve: API, event loop  ── one socket pair (lakh.child_process) ──  child: engine and its thread

Messages to the child: ("submit", id, request), ("cancel", id), ("drain",),
("adapter", id, name, folder or None). From it: (EngineStatus, description) once
the model is loaded, then EngineStatus at least every half second, and lists of (id, CompletionDelta | Usage | exception
| None).

If the child dies, every running request ends with a 503 and a new child is started, at most `max_restarts` times in
RESTART_WINDOW_S; then `died` says how it ended. A child that is silent for SILENT_S (stopped, or out of CPU time) makes
the server not ready; after DEAD_S it is killed and replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from lakh.child_process import AsyncChannel, ChannelClosed, ChildCrashed, ChildProcess
from lakh.errors import LakhError, PeerLost
from lakh.server.backend import BackendHealth, CompletionDelta, ModelCard, Usage, wait_until
from lakh.server.backends.engine_process_main import EngineStatus
from lakh.server.backends.response_queue import ResponseQueue, response_timeout_s
from lakh.server.metrics import MetricFamily, counter
from lakh.server.request import CompletionRequest, RequestError

__all__ = ["MAX_RESTARTS", "EngineProcessBackend"]

log = logging.getLogger(__name__)

MAIN = "lakh.server.backends.engine_process_main:main"
LOAD_TIMEOUT_S = 900.0  # a large model from a slow disk, and the capture of CUDA graphs
CLOSE_S = 5.0  # for the child to end by itself
SILENT_S = 3.0
DEAD_S = 60.0
MAX_RESTARTS = 3
RESTART_WINDOW_S = 600.0


class EngineProcessBackend:
    def __init__(
        self,
        load: dict[str, Any],
        *,
        max_waiting: int,
        on_death: Callable[[], None] = lambda: None,
        max_restarts: int = MAX_RESTARTS,
    ) -> None:
        """`load`: the arguments of `load_engine`. Returns when the model is ready; raises the child's errors. Calls
        `on_death` when the child ended and is not restarted.
        """
        self._arguments = ({**load, "adapters": dict(load.get("adapters") or {})}, max_waiting)
        self._on_death, self._max_restarts = on_death, max_restarts
        self.died: str | None = None
        """How the child ended, if it was not asked to and is not restarted."""
        self._restarting: str | None = None
        """How the last child ended, while another one loads."""
        self._deaths_s: list[float] = []
        self._closed = False
        self._ids = itertools.count()
        self._responses: dict[int, ResponseQueue] = {}
        self._channel: AsyncChannel | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._start_child()

    def _start_child(self) -> None:
        self._child = ChildProcess.start(MAIN, *self._arguments)
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
        return [] if self.health().problem else self.status.models

    def health(self) -> BackendHealth:
        if self.died:
            return BackendHealth(f"the engine process {self.died}", is_alive=False)
        if self._restarting:
            return BackendHealth(f"the engine process {self._restarting} and is restarting")
        silence_s = 0.0 if self._channel is None else self._channel.silence_s()
        if silence_s > SILENT_S:
            return BackendHealth(f"the engine process has been silent for {silence_s:.0f} s")
        return BackendHealth(self.status.health.problem)  # it ends by itself if only a restart helps

    def metric_families(self) -> list[MetricFamily]:
        restarts = counter("engine_restarts_total", "Restarts of the engine's process.", len(self._deaths_s))
        return [*self.status.metric_families, restarts]

    async def start(self) -> None:
        self._channel = await AsyncChannel.open(self._child.channel)
        self._tasks = [asyncio.create_task(self._supervise()), asyncio.create_task(self._kill_if_silent())]

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionDelta | Usage, None]:
        if self.died or self._restarting or self._closed or self._channel is None:
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

    async def load_adapter(self, name: str, folder: str) -> None:
        await self._command("adapter", name, folder)
        self._arguments[0]["adapters"][name] = folder  # also for a child that is started later

    async def unload_adapter(self, name: str) -> None:
        await self._command("adapter", name, None)
        self._arguments[0]["adapters"].pop(name, None)

    async def _command(self, *command: Any) -> None:
        """Returns when the child has done it and reported its models; raises the child's error."""
        if self.died or self._restarting or self._closed or self._channel is None:
            raise _engine_gone()
        number, responses = next(self._ids), ResponseQueue(LOAD_TIMEOUT_S)
        self._responses[number] = responses
        try:
            self._channel.send((command[0], number, *command[1:]))
            async for _ in responses.read():
                pass
        finally:
            del self._responses[number]

    async def drain(self, timeout_s: float) -> None:
        await wait_until(lambda: not self._responses, timeout_s)
        if self._channel is not None:
            self._channel.send(("drain",))  # the rest ends with the text it has
        await wait_until(lambda: not self._responses or self.died is not None, CLOSE_S)

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._channel is not None:
            self._channel.close()
        if self._restarting:  # a thread waits for it to load
            await asyncio.to_thread(self._child.kill)
        else:
            await asyncio.to_thread(self._child.stop, CLOSE_S)

    async def _supervise(self) -> None:
        """Read what the child sends; start another one when it ends."""
        while True:
            assert self._channel is not None
            await self._read(self._channel)
            if self._closed:
                return
            self._restarting = "closed its connection"
            for responses in self._responses.values():
                responses.put(_engine_gone())
            self._channel.close()
            await asyncio.to_thread(self._child.stop, CLOSE_S)
            reason = self._restarting = f"ended ({self._child.exit_reason()})"
            now_s = time.monotonic()
            self._deaths_s.append(now_s)
            if sum(at_s > now_s - RESTART_WINDOW_S for at_s in self._deaths_s) > self._max_restarts:
                self._give_up(reason)
                return
            log.warning("the engine process %s: starting another", reason)
            try:
                await asyncio.to_thread(self._start_child)
            except (LakhError, ChildCrashed, ModuleNotFoundError, OSError) as error:
                if not self._closed:
                    self._give_up(f"{reason}, and cannot be restarted: {error}")
                return
            self._channel = await AsyncChannel.open(self._child.channel)
            self._restarting = None
            log.warning("the engine process serves again")

    def _give_up(self, reason: str) -> None:
        self.died = reason
        self._on_death()

    async def _read(self, channel: AsyncChannel) -> None:
        """Until the child ends."""
        with contextlib.suppress(ChannelClosed, LakhError, ChildCrashed):  # the last two: what ended it
            while True:
                message = await channel.receive()
                if isinstance(message, EngineStatus):
                    self.status = message
                    continue
                for number, item in message:
                    if number in self._responses:
                        self._responses[number].put(item)

    async def _kill_if_silent(self) -> None:
        while True:
            await asyncio.sleep(SILENT_S)
            if not self._restarting and self._channel is not None and self._channel.silence_s() > DEAD_S:
                log.error("the engine process has been silent for %.0f s: killing it", DEAD_S)
                self._child.process.kill()


def _engine_gone() -> RequestError:
    return RequestError(None, "the engine process has ended", status=503, code="engine_gone")
