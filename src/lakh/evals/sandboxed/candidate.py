"""The process that holds the model's code: runs it once, then answers calls until the examiner closes the pipe.

Whatever the code does here to builtins, frames, descriptors or this module only changes its own answers. There is no
test and no verdict in this process: it was forked before a test was sent, and gets one call's arguments at a time.
"""

from __future__ import annotations

import marshal
import os
import sys
from collections.abc import Callable
from typing import Any

from lakh.evals.sandboxed import messages, values

MESSAGE_CHARS = 300
OPERATIONS: dict[str, Callable[..., Any]] = {
    "get": getattr,
    "list": list,
    "next": lambda iterator: [next(iterator)],
    "len": len,
    "item": lambda container, key: container[key],
    "str": str,
}
WARM_UP = """
from typing import Dict, List, Optional, Tuple
import math
def f(numbers: List[float], word: str, rest: Tuple[bool]) -> Optional[Dict[str, int]]:
    \"\"\" Like programs of benchmarks. \"\"\"
    found = {}
    for index, number in enumerate(sorted(numbers)):
        if number > 1 and len(word) == 1:
            found[word] = found.get(word, 0) + index
    return found
"""


def serve(source_fd: int, requests: int, replies: int) -> None:
    source = messages.read_all(source_fd).decode("utf-8", "surrogatepass")
    os.close(source_fd)
    answer_calls(source, requests, replies)


def answer_calls(source: str, requests: int, replies: int) -> None:
    module = type(sys)("solution")
    sys.modules["solution"] = module
    try:
        exec(compile(source, "<solution>", "exec", dont_inherit=True), vars(module))
    except BaseException as error:  # noqa: BLE001 - whatever a program may raise, SystemExit too
        messages.send(replies, _error(error))
        return
    messages.send(replies, ["ok", None, None])
    handler, reader = CallHandler(vars(module)), messages.MessageReader(requests)
    while (request := reader.next()) is not None:
        try:
            messages.send(replies, handler.answer(marshal.loads(request)))
        except BaseException as error:  # noqa: BLE001
            messages.send(replies, _error(error))


def warm_up() -> None:
    """Answer two calls in this process: what Python does once, on first use, is then done before the forks."""
    requests, request_writer = os.pipe()
    reply_reader, replies = os.pipe()
    for _ in range(2):
        messages.send_bytes(
            request_writer, marshal.dumps(["call", ["n", "f"], ["l", ["l", 1.5, 2], "a", ["t", True]], ["d"]])
        )
    os.close(request_writer)
    answer_calls(WARM_UP, requests, replies)
    messages.close(requests, reply_reader, replies)
    del sys.modules["solution"]


class CallHandler:
    """Performs calls on the program's names. Objects that are not plain data stay here and are sent as handles."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._handles: dict[int, Any] = {}

    def answer(self, request: list[Any]) -> list[Any]:
        what, target, *rest = request
        if target[0] == "n":
            if target[1] not in self._names:
                raise NameError(f"name '{target[1]}' is not defined")
            target_object = self._names[target[1]]
        else:
            target_object = self._handles[target[1]]
        parts = [values.decode(part, self._handles.__getitem__) for part in rest]
        if what == "call":
            arguments, named = parts
            result = target_object(*arguments, **named)
            changed = None
            if values.holds_mutable(arguments):
                after = self._form(arguments)
                changed = after if after != rest[0] else None
            return ["ok", self._form(result), changed]
        if what == "set":
            setattr(target_object, parts[0], parts[1])
            return ["ok", None, None]
        return ["ok", self._form(OPERATIONS[what](target_object, *parts)), None]

    def _form(self, value: Any) -> Any:
        return values.encode(value, self._keep)

    def _keep(self, value: Any) -> Any:
        number = len(self._handles)
        self._handles[number] = value
        return ["h", number]


def _error(error: BaseException) -> list[Any]:
    """Types, message and line of an error. str() runs the program's own code, so anything may happen here."""
    try:
        line = messages.last_line_in(error, "<solution>") or (isinstance(error, SyntaxError) and error.lineno)
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return ["error", kinds, str(error)[:MESSAGE_CHARS], f" (solution line {line})" if line else ""]
    except BaseException:  # noqa: BLE001
        return ["error", ["Exception"], "an error that cannot be described", ""]
