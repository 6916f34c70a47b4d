"""An engine in a process of its own, as a backend: the faces' event loop and the engine never share Python's lock.

    lakh serve: faces, event loop  ── one socket pair, pickled messages ──  child: engine, worker's thread

The child loads the model, then serves requests as local.py does, and writes pieces as they come; what is ready at the
same moment leaves in one message. It ends when the socket closes, also while it loads, so it never outlives its parent,
and leaves signals to it. A child that dies ends every request with a 503, and `died` says so; no wait for it is without
a limit.

Messages to the child: ("ask", number, request), ("leave", number), ("drain",). From it: ("ready", EngineStatus, words) or
("failed", error) once, then ("figures", EngineStatus) and ("pieces", [(number, CompletionDelta | Usage | _Refusal | error | None)]).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from lakh.errors import LakhError, PeerLost, from_dict
from lakh.server.backends.response_queue import ResponseQueue, response_timeout_s
from lakh.server.backend import MetricFamily, ModelCard, CompletionDelta, Usage
from lakh.server.gc_control import keep_quiet
from lakh.server.request import RequestError, CompletionRequest

if TYPE_CHECKING:
    from lakh.server.engine import Engine

__all__ = ["ProcessBackend", "load_engine"]

LOAD_TIMEOUT_S = 900.0  # a large model from a slow disk, and the capture of graphs
CLOSE_S = 5.0  # for the child to end by itself
FIGURES_EVERY_S = 0.1
MAX_MESSAGE_BYTES = 64 << 20
POLL_S = 0.02
LOOK_MS = 500
SWITCH_S = 0.0005  # of the child's threads: the engine waits no longer for the one that reads and writes messages
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True)
class EngineStatus:
    """What the child says of itself, a few times a second."""

    num_running: int = 0
    num_waiting: int = 0
    models: list[ModelCard] = field(default_factory=list)
    metric_families: list[MetricFamily] = field(default_factory=list)


class _Refusal(NamedTuple):
    """A RequestError on its way."""

    param: str | None
    message: str
    status: int
    code: str | None
    retry_after_s: float


class EngineProcessBackend:
    def __init__(self, load: dict[str, Any], *, max_waiting: int, on_death: Callable[[], None] = lambda: None) -> None:
        """`load`: what `load_engine` takes. Returns once the model is ready; raises what its loading
        raises.
        """
        ours, theirs = socket.socketpair()
        # Not with -m: what the child pickles would then be of the module __main__, which here is another.
        code = "import sys; from lakh.server.backends.engine_process import main; main(int(sys.argv[1]))"
        command = [sys.executable, "-c", code, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._socket, self._on_death = ours, on_death
        self.died: str | None = None
        """How, where it ended and nobody asked it to."""
        self._closed = False
        self._numbers = itertools.count()
        self._asked: dict[int, ResponseQueue] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self.figures = EngineStatus()
        try:
            ours.settimeout(LOAD_TIMEOUT_S)
            ours.sendall(_packed({"load": load, "max_waiting": max_waiting}))
            kind, *rest = _receive(ours)
        except (OSError, EOFError):
            ended = self._process.poll()
            self._kill()
            found = f"ended before its model was loaded (exit code {ended})"
            raise PeerLost("engine process", found, "see what it printed; out of memory is likely") from None
        except BaseException:
            self._kill()
            raise
        if kind != "ready":
            self._kill()
            raise from_dict(rest[0]) if kind == "failed" else ModuleNotFoundError(f"no {rest[0]}", name=rest[0])
        self.figures, self.words = rest
        ours.setblocking(False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_running(self) -> int:
        return self.figures.num_running

    @property
    def num_waiting(self) -> int:
        return self.figures.num_waiting

    def models(self) -> list[ModelCard]:
        return [] if self.died else self.figures.models

    def metric_families(self) -> list[MetricFamily]:
        return self.figures.metric_families

    async def start(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=MAX_MESSAGE_BYTES)
        self._reading = asyncio.create_task(self._read(reader))

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionDelta | Usage, None]:
        if self.died or self._closed or self._writer is None:
            raise _gone()
        number, mailbox = next(self._numbers), ResponseQueue(response_timeout_s(request))
        self._asked[number] = mailbox
        try:
            self._send(("ask", number, request))
            async for item in mailbox.read():
                yield item
        finally:
            del self._asked[number]
            if not mailbox.is_over:
                self._send(("leave", number))

    async def drain(self, deadline_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self._asked:
                    await asyncio.sleep(POLL_S)
        self._send(("drain",))  # what is left ends with what it has
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._asked and not self.died:
                    await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        self._closed = True
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()  # the child ends when its socket does
        else:
            self._socket.close()
        await asyncio.to_thread(self._kill, CLOSE_S)

    # --- inside ---

    def _send(self, message: tuple[Any, ...]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(_packed(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            while True:
                size = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]
                kind, what = pickle.loads(await reader.readexactly(size))
                if kind == "figures":
                    self.figures = what
                    continue
                for number, item in what:
                    if number in self._asked:
                        is_refusal = isinstance(item, _Refusal)
                        self._asked[number].put(RequestError(**item._asdict()) if is_refusal else item)
        if not self._closed:
            self.died = "closed its connection"
            for mailbox in self._asked.values():
                mailbox.put(_gone())
            await asyncio.to_thread(self._kill, CLOSE_S)
            self.died = f"ended with exit code {self._process.returncode}"
            self._on_death()

    def _kill(self, after_s: float = 0.0) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(after_s)
            return
        self._process.kill()
        self._process.wait(CLOSE_S)


def _gone() -> RequestError:
    return RequestError(None, "the engine's process has ended", status=503, code="engine_gone")


def load_engine(load: dict[str, Any]) -> Engine:
    """Arguments of Engine.load, and `threads` (of the CPU) and `follow_s`: look for newer checkpoints so often."""
    import torch

    from lakh.server.engine import Engine
    from lakh.server.weights.follow import CheckpointFollower

    load = dict(load)
    threads, follow_s = load.pop("threads", None), load.pop("follow_s", None)
    if threads:
        torch.set_num_threads(threads)
    engine = Engine.load(**load)
    if follow_s is not None:
        CheckpointFollower(engine, load["path"], every_s=follow_s, swapped=_say).start()
    engine.warm_up()
    keep_quiet()  # a full collection took a fifth of a second, under load
    return engine


def _say(folder: str, seconds: float) -> None:
    sys.stderr.write(f"now with the weights of {folder}; no step for {seconds * 1e3:.1f} ms\n")


# --- in the child -------------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides when work ends
        signal.signal(number, signal.SIG_IGN)
    link = socket.socket(fileno=descriptor)
    options = _receive(link)
    try:
        from lakh.server.backends.in_process import InProcessBackend

        with _only_while_open(link):
            engine = load_engine(options["load"])
    except LakhError as error:
        _tell(link, ("failed", error.as_dict()))
        return
    except ModuleNotFoundError as error:
        _tell(link, ("missing", error.name))
        return
    sys.setswitchinterval(SWITCH_S)
    backend = InProcessBackend(engine, max_waiting=options["max_waiting"])
    words = f"{engine.name} ({engine.spec.parameters:,} parameters, {engine.device})"
    _tell(link, ("ready", _figures(backend), words))
    link.setblocking(False)
    try:
        asyncio.run(_serve(backend, link))
    finally:
        engine.close()


@contextlib.contextmanager
def _only_while_open(link: socket.socket) -> Iterator[None]:
    """Loading reads nothing from the parent, for minutes: a thread looks whether there still is one."""
    is_over = threading.Event()
    poll = select.poll()
    poll.register(link, 0)  # a closed end is told unasked

    def watch() -> None:
        while not is_over.is_set():
            if poll.poll(LOOK_MS) and not is_over.is_set():
                os._exit(1)  # nobody is left to be told

    threading.Thread(target=watch, name="lakh-parent", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _tell(link: socket.socket, message: Any) -> None:
    with contextlib.suppress(OSError):  # the parent has gone: so will we
        link.sendall(_packed(message))


async def _serve(backend: Any, link: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=link, limit=MAX_MESSAGE_BYTES)
    outbox: list[tuple[int, Any]] = []
    beginning: dict[int, asyncio.Task[None]] = {}
    leaving: dict[int, Callable[[], None]] = {}
    loop = asyncio.get_running_loop()

    def flush() -> None:
        if outbox and not writer.is_closing():
            writer.write(_packed(("pieces", outbox)))
        outbox.clear()

    def put(number: int, item: Any) -> None:
        if not outbox:
            loop.call_soon(flush)  # once, after all that is ready now
        outbox.append((number, item))

    async def begin(number: int, request: CompletionRequest) -> None:
        """No task waits for a request at work: its pieces go from the worker's calls straight into the outbox."""

        def hear(item: CompletionDelta | Usage | Exception | None) -> None:
            if item is None or isinstance(item, Exception):
                leaving.pop(number, None)
            put(number, _portable(item) if isinstance(item, Exception) else item)

        try:
            leaving[number] = await backend.begin(request, hear)
        except Exception as error:  # noqa: BLE001 - it crosses the socket
            put(number, _portable(error))
        finally:
            beginning.pop(number, None)

    async def tell() -> None:
        last = None
        while True:
            await asyncio.sleep(FIGURES_EVERY_S)
            figures = _figures(backend)
            if figures != last and not writer.is_closing():
                writer.write(_packed(("figures", figures)))
                last = figures

    telling = asyncio.create_task(tell())
    try:
        while True:
            size = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]
            kind, *rest = pickle.loads(await reader.readexactly(size))
            if kind == "ask":
                beginning[rest[0]] = asyncio.create_task(begin(*rest))
            elif kind == "leave" and rest[0] in beginning:
                beginning[rest[0]].cancel()
            elif kind == "leave" and rest[0] in leaving:
                leaving.pop(rest[0])()
            elif kind == "drain":
                await backend.drain(0.0)
    except (OSError, EOFError):
        pass  # the parent has gone, or closed: so do we
    finally:
        telling.cancel()
        for task in beginning.values():
            task.cancel()
        for leave in leaving.values():
            leave()
        await backend.close()


def _portable(error: Exception) -> Any:
    """An error as it crosses the socket; one that is a bug of ours as words, which the face logs as a 500."""
    if isinstance(error, RequestError):
        return _Refusal(error.param, error.message, error.status, error.code, error.retry_after_s)
    return error if isinstance(error, LakhError) else RuntimeError(f"{type(error).__name__}: {error}")


def _figures(backend: Any) -> EngineStatus:
    return EngineStatus(backend.num_running, backend.num_waiting, backend.models(), backend.metric_families())


def _packed(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def _receive(link: socket.socket) -> Any:
    """One message from a blocking socket; EOFError where it ends."""

    def exactly(count: int) -> bytes:
        got = bytearray()
        while len(got) < count:
            piece = link.recv(count - len(got))
            if not piece:
                raise EOFError
            got += piece
        return bytes(got)

    return pickle.loads(exactly(_LENGTH.unpack(exactly(_LENGTH.size))[0]))
