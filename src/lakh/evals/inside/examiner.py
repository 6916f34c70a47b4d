"""The process that holds the tests: runs them, and asks the candidate's process for every call of the code under test.

Order of a run: the reference, which gives helpers and imports that tests use; then, in place of the names under test,
stand-ins that ask; then the tests. Only after their end is the nonce written, to a pipe that no candidate ever had.

An answer is plain data, rebuilt here. What is no plain data stays over there, and the stand-in for it equals nothing
but itself: an object that claims to equal everything is never asked.
"""

from __future__ import annotations

import builtins
import functools
import json
import marshal
import os
import random
import resource
import types
from typing import Any

from lakh.evals.inside import values

WORDS_CHARS = 300
LARGEST_KEPT_CHARS = 1 << 16


class CandidateGone(BaseException):
    """The other process ended. No Exception, so that no test catches it."""


class CandidateLied(BaseException):
    """The other process sent what no honest one sends."""


class CandidateFailed(Exception):
    """The candidate raised an error of its own making."""


class Line:
    """The pipes to the candidate's process."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._inbox = requests, values.Inbox(replies)

    def ask(self, *request: Any) -> list[Any]:
        try:
            values.send_bytes(self._requests, marshal.dumps(list(request)))  # to read, not from, the candidate
        except BrokenPipeError:
            raise CandidateGone from None
        return self.hear()

    def hear(self) -> list[Any]:
        try:
            body = self._inbox.next()
            reply = None if body is None else values.parse(body.decode())
        except (ValueError, RecursionError) as error:
            raise CandidateLied(str(error)) from None
        if reply is None:
            raise CandidateGone
        if not isinstance(reply, list) or len(reply) < 3:
            raise CandidateLied("an answer of no known form")
        if reply[0] == "error":
            raise _as_error(reply)
        return reply

    def form(self, value: Any) -> Any:
        return values.encode(value, _only_kept)

    def value(self, form: Any) -> Any:
        try:
            return values.decode(form, lambda number: Kept(self, ["h", number]))
        except Exception as error:  # noqa: BLE001 - many ways to be wrong, all of them the candidate's
            raise CandidateLied(f"an answer that is no value ({type(error).__name__})") from None


def _only_kept(value: Any) -> Any:
    if isinstance(value, Kept):
        return object.__getattribute__(value, "_target")
    raise TypeError(f"a {type(value).__name__} cannot be sent to the code under test")


class Kept:
    """Stands for a name of the candidate's, or for a thing that it keeps: an instance, an iterator."""

    def __init__(self, line: Line, target: list[Any]) -> None:
        object.__setattr__(self, "_line", line)
        object.__setattr__(self, "_target", target)

    def _ask(self, what: str, *values_: Any) -> Any:
        line: Line = object.__getattribute__(self, "_line")
        reply = line.ask(what, object.__getattribute__(self, "_target"), *[line.form(value) for value in values_])
        return line.value(reply[1])

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        line: Line = object.__getattribute__(self, "_line")
        forms = [line.form(list(arguments)), line.form(named)]
        reply = line.ask("call", object.__getattribute__(self, "_target"), *forms)
        if reply[2] is not None:
            _change_in_place(arguments, line.value(reply[2]))
        return line.value(reply[1])

    def __getattr__(self, name: str) -> Any:
        return Kept._ask(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        Kept._ask(self, "set", name, value)

    def __iter__(self) -> Any:
        return iter(Kept._ask(self, "list"))

    def __next__(self) -> Any:
        return Kept._ask(self, "next")[0]

    def __len__(self) -> int:
        return int(Kept._ask(self, "len"))

    def __getitem__(self, key: Any) -> Any:
        return Kept._ask(self, "item", key)

    def __str__(self) -> str:
        return str(Kept._ask(self, "str"))

    def __bool__(self) -> bool:
        return True

    __hash__ = object.__hash__


def _change_in_place(before: tuple[Any, ...], after: Any) -> None:
    """What the call did to its arguments, done here too."""
    if not isinstance(after, list) or len(after) != len(before):
        raise CandidateLied("arguments came back in another number")
    for old, new in zip(before, after, strict=True):
        if isinstance(old, list | bytearray) and isinstance(new, list | bytearray):
            old[:] = new
        elif isinstance(old, dict | set) and isinstance(new, dict | set):
            old.clear()
            old.update(new)


def _as_error(reply: list[Any]) -> BaseException:
    """The error that the candidate raised, as the nearest built-in one; StopIteration could end a test early."""
    kinds = [str(kind) for kind in reply[1]] if isinstance(reply[1], list) else []
    words, where = str(reply[2])[:WORDS_CHARS], str(reply[3])[:40] if len(reply) > 3 else ""
    for name in kinds:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind not in (StopIteration, StopAsyncIteration):
            if name == "Exception" and kinds[0] != name:
                break
            try:
                error: BaseException = kind(words)
            except TypeError:  # a few take other arguments
                error = CandidateFailed(words)
            told = f"{kinds[0]}: {words}{where}" if words else f"{kinds[0]}{where}"
            error.lakh_words = told  # type: ignore[attr-defined]
            return error
    failed = CandidateFailed(words)
    failed.lakh_words = f"{kinds[0] if kinds else 'an error'}: {words}{where}"  # type: ignore[attr-defined]
    return failed


def serve(line: Any, receive: Any) -> None:
    """Examine one candidate after another, as the zygote sends them."""
    while True:
        order, descriptors = receive(line)
        used_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        hard_s = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used_s) + order["cpu_s"], hard_s))
        random.seed(0)
        examine(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        line.send(b".")


@functools.lru_cache(maxsize=256)
def _compiled(text: str, name: str) -> types.CodeType:
    """Samples of one problem come one after another: their test is compiled once."""
    return compile(text, name, "exec", dont_inherit=True)


def _code(text: str, name: str) -> types.CodeType:
    if len(text) > LARGEST_KEPT_CHARS:
        return compile(text, name, "exec", dont_inherit=True)
    return _compiled(text, name)


def examine(order_fd: int, verdict_fd: int, requests: int, replies: int) -> None:
    order = json.loads(values.read_all(order_fd))
    line = Line(requests, replies)
    space: dict[str, Any] = {"__name__": "test"}
    stage = "<test>"
    try:
        line.hear()  # the candidate's code has run to its end
        stage = "<reference>"
        exec(_code(order["reference"], "<reference>"), space)
        stage = "<test>"
        for name in order["names"]:
            space[name] = Kept(line, ["n", name])
        exec(_code(order["test"], "<test>"), space)
        said = f"passed {order['nonce']}"
    except MemoryError as error:
        said = "memory " + _describe(error)
    except CandidateGone:
        said = "gone "
    except CandidateLied as error:
        said = f"failed {error}"
    except BaseException as error:  # noqa: BLE001 - whatever a test may raise
        told = hasattr(error, "lakh_words")
        said = ("broken " if stage == "<reference>" and not told else "failed ") + _describe(error)
    os.write(verdict_fd, said.encode("utf-8", "replace")[:4096])


def _describe(error: BaseException) -> str:
    words = getattr(error, "lakh_words", "")
    if not words:
        words = f"{type(error).__name__}: {str(error)[:WORDS_CHARS]}".rstrip(": ")
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<test>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return words + (f" (test line {line})" if line and "(solution line" not in words else "")
