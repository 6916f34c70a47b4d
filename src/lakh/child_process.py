"""Child processes: run a Python function in a process of its own and exchange messages with it.

    child = ChildProcess.start("lakh.tokens.loading.prefetch:fill_ring", request, pass_fds=[memory])
    child.channel.send(("free", 3))
    message = child.channel.receive(timeout_s=5.0)    # raises the child's own LakhError where it failed
    child.stop(timeout_s=5.0)

In the child, `main(channel, options)` runs with SIGINT and SIGTERM ignored, because the parent decides when work ends,
and with stdout redirected to stderr. The child ends with its parent: `receive` raises ChannelClosed when the parent
closes the channel or dies, and a thread ends a child that does not react within ORPHAN_GRACE_S. With `heartbeat_s` the
child also sends heartbeats, so that `Channel.silence_s` tells a busy child from a stopped one.

A message is 8 bytes of length (little endian) and a pickle, or JSON where the other side is not trusted. Standard
library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lakh import errors
from lakh.errors import LakhError

if TYPE_CHECKING:
    import asyncio

__all__ = [
    "AsyncChannel",
    "Channel",
    "ChannelClosed",
    "ChildCrashed",
    "ChildProcess",
    "die_with_parent",
    "exit_reason",
    "wait_readable",
]

LENGTH_BYTES = 8
MAX_MESSAGE_BYTES = 1 << 30
READ_BYTES = 1 << 18
ORPHAN_GRACE_S = 5.0  # how long a child may take to end after its parent closed the channel or died
KILL_TIMEOUT_S = 30.0  # how long the kernel may take to remove a killed process
PR_SET_PDEATHSIG = 1  # linux/prctl.h
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # from a terminal they reach children, too: the parent decides

Codec = Literal["pickle", "json"]


class ChannelClosed(EOFError):
    """The other side closed the channel or died."""


class ChildCrashed(RuntimeError):
    """The child raised something that is not a LakhError; the message is its traceback."""


@dataclass(frozen=True)
class _Failure:
    """The exception that ended a child, as it crosses the channel."""

    kind: Literal["lakh", "missing", "crash"]
    content: Any

    @staticmethod
    def of(error: BaseException) -> _Failure:
        if isinstance(error, LakhError):
            return _Failure("lakh", error.as_dict())
        if isinstance(error, ModuleNotFoundError):
            return _Failure("missing", error.name)
        return _Failure("crash", "".join(traceback.format_exception(error)))

    def exception(self) -> Exception:
        if self.kind == "lakh":
            return errors.from_dict(self.content)
        if self.kind == "missing":
            return ModuleNotFoundError(f"No module named {self.content!r}", name=self.content)
        return ChildCrashed(self.content)


@dataclass(frozen=True)
class _Heartbeat:
    pass


def pack(message: Any, codec: Codec = "pickle") -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL) if codec == "pickle" else json.dumps(message).encode()
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def _unpack(body: bytes | bytearray, codec: Codec) -> Any:
    message = pickle.loads(body) if codec == "pickle" else json.loads(body)
    if isinstance(message, _Failure):
        raise message.exception()
    return message


HEARTBEAT = pack(_Heartbeat())


class Channel:
    """Messages over one connected socket, or over a pipe to read and a pipe to write. Owns its descriptors.

    `send` may be called by several threads, `receive` by one.
    """

    def __init__(
        self,
        read_fd: int,
        write_fd: int | None = None,
        *,
        codec: Codec = "pickle",
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._read_fd, self._write_fd = read_fd, read_fd if write_fd is None else write_fd
        self._codec, self._max_bytes = codec, max_message_bytes
        self._buffer, self._at_end, self._closed = bytearray(), False, False
        self._lock = threading.Lock()
        self._heard_s = time.monotonic()

    @staticmethod
    def pair(codec: Codec = "pickle") -> tuple[Channel, Channel]:
        ours, theirs = socket.socketpair()
        return Channel(ours.detach(), codec=codec), Channel(theirs.detach(), codec=codec)

    def fileno(self) -> int:
        return self._read_fd

    def send(self, message: Any) -> None:
        """Blocks while the other side does not read. Raises ChannelClosed where there is no other side."""
        data = memoryview(pack(message, self._codec))
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._write_fd, data) :]
            except OSError:
                raise ChannelClosed("the other process has closed the channel") from None

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message. Raises TimeoutError, ChannelClosed, or the exception that ended the child."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            body = self._next_body()
            if body is not None:
                message = _unpack(body, self._codec)
                if not isinstance(message, _Heartbeat):
                    return message
            elif self._at_end:
                raise ChannelClosed("the other process has closed the channel")
            else:
                left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
                if not self._fill(left_s):
                    raise TimeoutError(f"no message within {timeout_s:g} s")

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether `receive` has something to return or raise at once; waits up to `timeout_s` for it."""
        deadline_s = time.monotonic() + timeout_s
        while not self._at_end and not self._has_message():
            if not self._fill(max(0.0, deadline_s - time.monotonic())):
                return False
        return True

    def silence_s(self) -> float:
        """Seconds since the other side last sent anything, heartbeats included."""
        while self._fill(0.0) and not self._at_end:
            pass
        return time.monotonic() - self._heard_s

    def close(self) -> None:
        if not self._closed:
            self._closed = self._at_end = True
            for descriptor in {self._read_fd, self._write_fd}:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def detach(self) -> int:
        """The descriptor, which the caller owns from now on."""
        self._closed = self._at_end = True
        return self._read_fd

    def _fill(self, timeout_s: float | None) -> bool:
        """Read what is there; False where nothing comes in time."""
        if self._at_end:
            return True
        if not wait_readable([self], timeout_s):
            return False
        try:
            data = os.read(self._read_fd, READ_BYTES)
        except OSError:
            data = b""
        self._buffer += data
        self._at_end = not data
        self._heard_s = time.monotonic()
        return True

    def _has_message(self) -> bool:
        """Whether the buffer holds a whole message that is not a heartbeat; heartbeats are removed."""
        while self._buffer.startswith(HEARTBEAT):
            del self._buffer[: len(HEARTBEAT)]
        return self._message_end() is not None

    def _next_body(self) -> bytearray | None:
        end = self._message_end()
        if end is None:
            return None
        body = self._buffer[LENGTH_BYTES:end]
        del self._buffer[:end]
        return body

    def _message_end(self) -> int | None:
        """Where the first message in the buffer ends; None while it is incomplete."""
        if len(self._buffer) < LENGTH_BYTES:
            return None
        size = int.from_bytes(self._buffer[:LENGTH_BYTES], "little")
        if size > self._max_bytes:  # not a message of ours: nothing that follows can be trusted
            self._at_end = True
            raise ChannelClosed(f"a message of {size:,} bytes exceeds the limit of {self._max_bytes:,}")
        return LENGTH_BYTES + size if len(self._buffer) >= LENGTH_BYTES + size else None


def wait_readable(channels: Sequence[Channel], timeout_s: float | None) -> list[Channel]:
    """The channels with bytes to read, or whose other side is gone. Ask `poll` first: a channel may hold a buffer."""
    poller = select.poll()
    for channel in channels:
        poller.register(channel.fileno(), select.POLLIN)
    ready = {descriptor for descriptor, _ in poller.poll(None if timeout_s is None else 1000 * timeout_s)}
    return [channel for channel in channels if channel.fileno() in ready]


class AsyncChannel:
    """A channel inside an asyncio event loop. `send` never blocks; it does nothing once the channel is closed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, buffered: bytes) -> None:
        self._reader, self._writer, self._buffered = reader, writer, buffered
        self._heard_s = time.monotonic()

    @staticmethod
    async def open(channel: Channel) -> AsyncChannel:
        """Takes the channel's descriptor over."""
        import asyncio  # 40 ms, which processes without an event loop need not pay

        link = socket.socket(fileno=channel.detach())
        link.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=link, limit=MAX_MESSAGE_BYTES)
        return AsyncChannel(reader, writer, bytes(channel._buffer))

    def send(self, message: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(pack(message))

    async def receive(self) -> Any:
        while True:
            try:
                size = int.from_bytes(await self._read(LENGTH_BYTES), "little")
                body = await self._read(size)
            except (OSError, EOFError):
                raise ChannelClosed("the other process has closed the channel") from None
            self._heard_s = time.monotonic()
            message = _unpack(body, "pickle")
            if not isinstance(message, _Heartbeat):
                return message

    def silence_s(self) -> float:
        return time.monotonic() - self._heard_s

    def close(self) -> None:
        self._writer.close()

    async def _read(self, count: int) -> bytes:
        if not self._buffered:
            return await self._reader.readexactly(count)
        start, self._buffered = self._buffered[:count], self._buffered[count:]
        return start + (await self._reader.readexactly(count - len(start)) if len(start) < count else b"")


class ChildProcess:
    """A running child. `start` runs a Python function; the constructor runs any command that speaks over `channel`."""

    def __init__(
        self,
        command: Sequence[str],
        channel: Channel,
        *,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """`options` go to subprocess.Popen; stdin is /dev/null unless they say otherwise."""
        self.channel = channel
        options = {"stdin": subprocess.DEVNULL} | options
        self.process = subprocess.Popen(command, pass_fds=pass_fds, env=env, **options)

    @staticmethod
    def start(
        target: str,
        *arguments: Any,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        heartbeat_s: float = 0.0,
    ) -> ChildProcess:
        """Call `target`, "module:function", as function(channel, *arguments) in a fresh interpreter.

        A fresh interpreter and not a fork: none of our threads, files or locks, and no second run of the caller's main
        module. `env` is added to this process's environment.
        """
        ours, theirs = Channel.pair()
        code = "from lakh.child_process import _child_main; _child_main()"
        command = [sys.executable, "-c", code, str(theirs.fileno()), target, repr(heartbeat_s)]
        environment = None if env is None else {**os.environ, **env}
        child: ChildProcess | None = None
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # inherited, until it ignores them
        try:
            try:
                child = ChildProcess(command, ours, pass_fds=[theirs.fileno(), *pass_fds], env=environment)
            finally:
                theirs.close()
                signal.pthread_sigmask(signal.SIG_SETMASK, before)  # may raise KeyboardInterrupt
            with contextlib.suppress(ChannelClosed):  # the first `receive` says so
                ours.send(arguments)
        except BaseException:
            ours.close()  # the child ends by itself where the interrupt came before it was known here
            if child is not None:
                child.kill()
            raise
        return child

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self.process.poll()

    def exit_reason(self, timeout_s: float = ORPHAN_GRACE_S) -> str:
        """How it ended; waits up to `timeout_s` for a child that is about to end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        return exit_reason(self.process.returncode)

    def stop(self, timeout_s: float) -> None:
        """Close the channel, give the child `timeout_s` to end by itself, then kill it."""
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
            return
        self.kill()

    def kill(self) -> None:
        self.channel.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(KILL_TIMEOUT_S)


def exit_reason(code: int | None) -> str:
    """An exit code in words: "killed by SIGKILL", "exit code 1", "still running"."""
    if code is None:
        return "still running"
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def die_with_parent(parent_pid: int, number: int = signal.SIGTERM) -> None:
    """Ask the kernel to signal this process when its parent ends (Linux). For processes without a channel.

    The kernel counts the end of the parent's *thread* that started us: use it only where that is the main thread.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent died before we asked
        os.kill(os.getpid(), number)


# --- in the child ---------------------------------------------------------------------------------------------------


def _child_main() -> None:
    descriptor, target, heartbeat_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.dup2(2, 1)  # the parent's stdout carries results; a library's prints do not belong there
    threading.Thread(target=_end_with_parent, args=(descriptor,), name="lakh-parent", daemon=True).start()
    channel = Channel(descriptor)
    code = 0
    try:
        arguments = channel.receive()
        if heartbeat_s:
            threading.Thread(target=_beat, args=(channel, heartbeat_s), name="lakh-heartbeat", daemon=True).start()
        module, _, function = target.partition(":")
        getattr(importlib.import_module(module), function)(channel, *arguments)
    except ChannelClosed:
        pass
    except Exception as error:  # noqa: BLE001 - the outermost frame of this process: the parent raises it
        code = error.exit_code if isinstance(error, LakhError) else 1
        with contextlib.suppress(ChannelClosed, OSError):
            channel.send(_Failure.of(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of libraries must not keep a finished child alive


def _end_with_parent(descriptor: int) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLRDHUP)
    poller.poll()
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)


def _beat(channel: Channel, every_s: float) -> None:
    with contextlib.suppress(ChannelClosed):
        while True:
            time.sleep(every_s)
            channel.send(_Heartbeat())
