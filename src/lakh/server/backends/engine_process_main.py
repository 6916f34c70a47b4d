"""The engine's process: loads the model, then serves its parent's requests (engine_process.py) until the channel
closes.

Items that are ready at the same moment leave in one message.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lakh.child_process import AsyncChannel, Channel, ChannelClosed
from lakh.errors import LakhError
from lakh.server.backend import BackendHealth, ModelCard
from lakh.server.gc_control import disable_full_collections
from lakh.server.metrics import MetricFamily
from lakh.server.request import CompletionRequest, RequestError

if TYPE_CHECKING:
    from lakh.server.backends.in_process import InProcessBackend
    from lakh.server.engine import Engine

__all__ = ["EngineStatus", "load_engine", "main"]

STATUS_EVERY_S = 0.1
HEARTBEAT_S = 0.5  # a status that did not change is sent this often: the parent takes silence for a stopped process
SWITCH_S = 0.0005  # thread switch interval: the engine waits no longer than this for the thread that handles messages


@dataclass(frozen=True)
class EngineStatus:
    num_running: int
    num_waiting: int
    models: list[ModelCard]
    health: BackendHealth
    metric_families: list[MetricFamily]


def load_engine(load: dict[str, Any]) -> Engine:
    """Arguments of Engine.load, `threads` (of the CPU), `follow_s` (poll for newer checkpoints this often),
    `served_name` (the model's name in the API) and `adapters` (names and folders).
    """
    import torch

    from lakh.compute_threads import ComputeThreads
    from lakh.server.engine import Engine
    from lakh.server.weights.follow import CheckpointFollower

    load = dict(load)
    threads, follow_s, served_name = (load.pop(name, None) for name in ("threads", "follow_s", "served_name"))
    adapters = load.pop("adapters", None) or {}
    if threads:
        torch.set_num_threads(threads)
    engine = Engine.load(**load)
    if not threads and engine.device.type == "cpu" and load.get("tensor", 1) == 1:
        engine.compute_threads = ComputeThreads(torch.get_num_threads())
    engine.name = served_name or engine.name
    for name, folder in adapters.items():
        engine.load_adapter(name, folder)
    if follow_s is not None:
        CheckpointFollower(engine, load["path"], every_s=follow_s, on_swap=_print_swap).start()
    engine.warm_up()
    disable_full_collections()  # one took a fifth of a second under load
    return engine


def _print_swap(folder: str, seconds: float) -> None:
    sys.stderr.write(f"now serving the weights of {folder}; swapped in {seconds * 1e3:.1f} ms\n")


def main(channel: Channel, load: dict[str, Any], max_waiting: int) -> None:
    from lakh.server.backends.in_process import InProcessBackend

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the parent's, when a terminal closes
    engine = load_engine(load)
    sys.setswitchinterval(SWITCH_S)
    backend = InProcessBackend(engine, max_waiting=max_waiting)
    channel.send((_status(backend), backend.description))
    try:
        asyncio.run(_serve(backend, channel))
    finally:
        engine.close()


async def _serve(backend: InProcessBackend, channel: Channel) -> None:
    server = _EngineServer(backend, await AsyncChannel.open(channel))
    reporting, serving = asyncio.create_task(server.report_status()), asyncio.create_task(server.serve())
    try:
        await asyncio.wait((reporting, serving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (reporting, serving):
            task.cancel()
        await asyncio.gather(reporting, serving, return_exceptions=True)
        server.cancel_all()
        await backend.close()


class _EngineServer:
    def __init__(self, backend: InProcessBackend, channel: AsyncChannel) -> None:
        self._backend, self._channel = backend, channel
        self._outbox: list[tuple[int, Any]] = []
        self._cancels: dict[int, Callable[[], object]] = {}
        self._loop = asyncio.get_running_loop()
        self._adapting: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Until the parent closes the channel."""
        try:
            while True:
                kind, *rest = await self._channel.receive()
                if kind == "submit":
                    self._cancels[rest[0]] = asyncio.create_task(self._submit(*rest)).cancel
                elif kind == "cancel" and rest[0] in self._cancels:
                    self._cancels.pop(rest[0])()
                elif kind == "adapter":
                    self._adapting = asyncio.create_task(self._adapt(*rest))
                elif kind == "drain":
                    await self._backend.drain(0.0)
        except ChannelClosed:
            pass

    async def report_status(self) -> None:
        """Until only a restart of this process helps."""
        last, sent_s = None, 0.0
        while last is None or last.health.is_alive:
            await asyncio.sleep(STATUS_EVERY_S)
            status, now_s = _status(self._backend), self._loop.time()
            if status != last or now_s - sent_s > HEARTBEAT_S:
                self._channel.send(status)
                last, sent_s = status, now_s

    def cancel_all(self) -> None:
        for cancel in self._cancels.values():
            cancel()

    async def _submit(self, number: int, request: CompletionRequest) -> None:
        """No task waits for a running request: its items go from the engine's updates straight to the outbox."""

        def on_item(item: Any) -> None:
            if item is None or isinstance(item, Exception):
                self._cancels.pop(number, None)
            self._put(number, item)

        try:
            self._cancels[number] = await self._backend.submit(request, on_item)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            on_item(error)

    async def _adapt(self, number: int, name: str, folder: str | None) -> None:
        """Load or unload an adapter. The new list of models leaves before the reply."""
        reply: Exception | None = None
        try:
            if folder is None:
                await self._backend.unload_adapter(name)
            else:
                await self._backend.load_adapter(name, folder)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            reply = error
        self._channel.send(_status(self._backend))
        self._put(number, reply)

    def _put(self, number: int, item: Any) -> None:
        if isinstance(item, Exception) and not isinstance(item, LakhError | RequestError):
            item = RuntimeError(f"{type(item).__name__}: {item}")  # a bug: the parent logs it; may not be picklable
        if not self._outbox:
            self._loop.call_soon(self._flush)  # once, after everything that is ready now
        self._outbox.append((number, item))

    def _flush(self) -> None:
        self._channel.send(self._outbox)
        self._outbox.clear()


def _status(backend: InProcessBackend) -> EngineStatus:
    return EngineStatus(
        backend.num_running, backend.num_waiting, backend.models(), backend.health(), backend.metric_families()
    )
