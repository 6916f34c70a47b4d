"""The process that holds the tests: runs them, and sends every call of the code under test to the candidate's process.

It runs the reference, which defines helpers and imports for the tests, puts proxies in place of the names under test,
runs the tests, and writes the nonce to a pipe that no candidate ever had.

An answer is plain data, rebuilt here. Other objects stay in the candidate's process, and their proxies equal nothing
but themselves: the __eq__ of an object that claims to equal everything is never called.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import json
import marshal
import os
import random
import resource
import types
from typing import Any

from lakh.evals.sandboxed import messages, values

MESSAGE_CHARS = 300
LARGEST_CACHED_CHARS = 1 << 16


class CandidateExited(BaseException):
    """The other process ended. Not an Exception, so that no test catches it."""


class InvalidReply(BaseException):
    """The other process sent something that the protocol does not allow."""


class CandidateError(Exception):
    """The candidate raised an error that is not built in."""


class CandidateConnection:
    """The pipes to the candidate's process."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._reader = requests, messages.MessageReader(replies)

    def request(self, *parts: Any) -> list[Any]:
        try:
            messages.send_bytes(self._requests, marshal.dumps(list(parts)))  # only the candidate reads marshal
        except BrokenPipeError:
            raise CandidateExited from None
        return self.receive()

    def receive(self) -> list[Any]:
        try:
            body = self._reader.next()
            reply = None if body is None else messages.parse_json(body.decode())
        except (ValueError, RecursionError) as error:
            raise InvalidReply(str(error)) from None
        if reply is None:
            raise CandidateExited
        if not isinstance(reply, list) or len(reply) < 3:
            raise InvalidReply("a reply of no known form")
        if reply[0] == "error":
            raise _as_error(reply)
        return reply

    def form(self, value: Any) -> Any:
        return values.encode(value, _handle_of)

    def value(self, form: Any) -> Any:
        try:
            return values.decode(form, lambda number: RemoteObject(self, ["h", number]))
        except Exception as error:  # noqa: BLE001 - many ways to be wrong, all of them the candidate's
            raise InvalidReply(f"a reply that is not a value ({type(error).__name__})") from None


def _handle_of(value: Any) -> Any:
    if isinstance(value, RemoteObject):
        return object.__getattribute__(value, "_target")
    raise TypeError(f"a {type(value).__name__} cannot be sent to the code under test")


class RemoteObject:
    """A proxy for a name of the candidate's, or for an object that stays there: an instance, an iterator."""

    def __init__(self, connection: CandidateConnection, target: list[Any]) -> None:
        object.__setattr__(self, "_connection", connection)
        object.__setattr__(self, "_target", target)

    def _request(self, what: str, *values_: Any) -> Any:
        connection: CandidateConnection = object.__getattribute__(self, "_connection")
        target = object.__getattribute__(self, "_target")
        reply = connection.request(what, target, *[connection.form(value) for value in values_])
        return connection.value(reply[1])

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        connection: CandidateConnection = object.__getattribute__(self, "_connection")
        forms = [connection.form(list(arguments)), connection.form(named)]
        reply = connection.request("call", object.__getattribute__(self, "_target"), *forms)
        if reply[2] is not None:
            _change_in_place(arguments, connection.value(reply[2]))
        return connection.value(reply[1])

    def __getattr__(self, name: str) -> Any:
        return RemoteObject._request(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        RemoteObject._request(self, "set", name, value)

    def __iter__(self) -> Any:
        return iter(RemoteObject._request(self, "list"))

    def __next__(self) -> Any:
        return RemoteObject._request(self, "next")[0]

    def __len__(self) -> int:
        return int(RemoteObject._request(self, "len"))

    def __getitem__(self, key: Any) -> Any:
        return RemoteObject._request(self, "item", key)

    def __str__(self) -> str:
        return str(RemoteObject._request(self, "str"))

    def __bool__(self) -> bool:
        return True

    __hash__ = object.__hash__


def _change_in_place(before: tuple[Any, ...], after: Any) -> None:
    """Apply to the arguments here what the call did to its copies."""
    if not isinstance(after, list) or len(after) != len(before):
        raise InvalidReply("arguments came back in another number")
    for old, new in zip(before, after, strict=True):
        if isinstance(old, list | bytearray) and isinstance(new, list | bytearray):
            old[:] = new
        elif isinstance(old, dict | set) and isinstance(new, dict | set):
            old.clear()
            old.update(new)


def _as_error(reply: list[Any]) -> BaseException:
    """The candidate's error as the nearest built-in one, except StopIteration, which could end a test early."""
    kinds = [str(kind) for kind in reply[1]] if isinstance(reply[1], list) else []
    message, where = str(reply[2])[:MESSAGE_CHARS], str(reply[3])[:40] if len(reply) > 3 else ""
    error: BaseException = CandidateError(message)
    for name in kinds:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind not in (StopIteration, StopAsyncIteration):
            if name != "Exception" or kinds[0] == name:
                with contextlib.suppress(TypeError):  # a few take other arguments
                    error = kind(message)
            break
    name = kinds[0] if kinds else "an error"
    error.lakh_description = f"{name}: {message}{where}" if message else f"{name}{where}"  # type: ignore[attr-defined]
    return error


def serve(connection: Any) -> None:
    """Examine one candidate after another, as the zygote sends them."""
    while True:
        request, descriptors = messages.receive_packet(connection)
        used_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        hard_s = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used_s) + request["cpu_s"], hard_s))
        for space in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
            soft, hard = resource.getrlimit(space)
            if soft != resource.RLIM_INFINITY:
                resource.setrlimit(space, (request["memory_bytes"], hard))
        random.seed(0)
        examine(*descriptors)
        messages.close(*descriptors)
        connection.send(b".")


@functools.lru_cache(maxsize=256)  # consecutive samples of one problem share their test
def _compile(text: str, name: str) -> types.CodeType:
    return compile(text, name, "exec", dont_inherit=True)


def _code(text: str, name: str) -> types.CodeType:
    return (_compile if len(text) <= LARGEST_CACHED_CHARS else _compile.__wrapped__)(text, name)


def examine(test_fd: int, outcome_fd: int, requests: int, replies: int) -> None:
    test = json.loads(messages.read_all(test_fd))
    connection = CandidateConnection(requests, replies)
    namespace: dict[str, Any] = {"__name__": "test"}
    stage = "<test>"
    try:
        connection.receive()  # the candidate's code has run to its end
        stage = "<reference>"
        exec(_code(test["reference"], "<reference>"), namespace)
        stage = "<test>"
        for name in test["names"]:
            namespace[name] = RemoteObject(connection, ["n", name])
        exec(_code(test["test"], "<test>"), namespace)
        outcome = f"passed {test['nonce']}"
    except MemoryError as error:
        outcome = "memory " + _describe(error)
    except CandidateExited:
        outcome = "exited "
    except InvalidReply as error:
        outcome = f"failed {error}"
    except BaseException as error:  # noqa: BLE001 - whatever a test may raise
        from_candidate = hasattr(error, "lakh_description")
        outcome = ("broken " if stage == "<reference>" and not from_candidate else "failed ") + _describe(error)
    os.write(outcome_fd, outcome.encode("utf-8", "replace")[:4096])


def _describe(error: BaseException) -> str:
    text = getattr(error, "lakh_description", "")
    if not text:
        text = f"{type(error).__name__}: {str(error)[:MESSAGE_CHARS]}".rstrip(": ")
    line = messages.last_line_in(error, "<test>")
    return text + (f" (test line {line})" if line and "(solution line" not in text else "")
