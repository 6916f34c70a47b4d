"""The process that holds the model's code: runs it once, then answers calls until nobody asks any more.

Whatever the code does here to builtins, frames, descriptors or this very module changes its own answers only. There is
no test here, no verdict, and nothing to find: the process was forked before a test was sent, and gets one call's
arguments at a time.
"""

from __future__ import annotations

import marshal
import os
import sys
from typing import Any

from lakh.evals.inside import values

WORDS_CHARS = 300
REHEARSAL = """
from typing import Dict, List, Optional, Tuple
import math
def f(numbers: List[float], word: str, rest: Tuple[bool]) -> Optional[Dict[str, int]]:
    \"\"\" As programs of benchmarks look. \"\"\"
    found = {}
    for index, number in enumerate(sorted(numbers)):
        if number > 1 and len(word) == 1:
            found[word] = found.get(word, 0) + index
    return found
"""


def answer_calls(source_fd: int, requests: int, replies: int) -> None:
    source = values.read_all(source_fd).decode("utf-8", "surrogatepass")
    os.close(source_fd)
    module = type(sys)("solution")
    sys.modules["solution"] = module
    try:
        exec(compile(source, "<solution>", "exec", dont_inherit=True), vars(module))
    except BaseException as error:  # noqa: BLE001 - whatever a program may raise, SystemExit too
        values.send(replies, _error(error))
        return
    values.send(replies, ["ok", None, None])
    answers, inbox = Answers(vars(module)), values.Inbox(requests)
    while (request := inbox.next()) is not None:
        try:
            values.send(replies, answers.to(marshal.loads(request)))
        except BaseException as error:  # noqa: BLE001
            values.send(replies, _error(error))


def rehearse() -> None:
    """Answer a few calls here and now: what Python does once, on first use, is done before there are children."""
    source = os.memfd_create("rehearsal")
    os.write(source, REHEARSAL.encode())
    requests, ask = os.pipe()
    hear, replies = os.pipe()
    for _ in range(2):
        values.send_bytes(ask, marshal.dumps(["call", ["n", "f"], ["l", ["l", 1.5, 2], "a", ["t", True]], ["d"]]))
    os.close(ask)
    answer_calls(source, requests, replies)
    for descriptor in (requests, hear, replies):
        os.close(descriptor)
    del sys.modules["solution"]


class Answers:
    """What the program says when asked; what is no plain data is kept here, and known by a number."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._kept: dict[int, Any] = {}

    def to(self, request: list[Any]) -> list[Any]:
        what, target, *rest = request
        if target[0] == "n":
            if target[1] not in self._names:
                raise NameError(f"name '{target[1]}' is not defined")
            thing = self._names[target[1]]
        else:
            thing = self._kept[target[1]]
        parts = [values.decode(part, self._kept.__getitem__) for part in rest]
        if what == "call":
            arguments, named = parts
            result = thing(*arguments, **named)
            changed = None
            if values.holds_mutable(arguments):
                after = self._form(arguments)
                changed = after if after != rest[0] else None
            return ["ok", self._form(result), changed]
        if what == "get":
            return ["ok", self._form(getattr(thing, parts[0])), None]
        if what == "set":
            setattr(thing, parts[0], parts[1])
            return ["ok", None, None]
        if what == "list":
            return ["ok", self._form(list(thing)), None]
        if what == "next":
            return ["ok", self._form([next(thing)]), None]
        if what == "len":
            return ["ok", len(thing), None]
        if what == "item":
            return ["ok", self._form(thing[parts[0]]), None]
        return ["ok", str(thing), None]

    def _form(self, value: Any) -> Any:
        return values.encode(value, self._keep)

    def _keep(self, value: Any) -> Any:
        number = len(self._kept)
        self._kept[number] = value
        return ["h", number]


def _error(error: BaseException) -> list[Any]:
    """Kinds, words and line of an error. The words are the program's own code, so anything may happen here."""
    try:
        where, trace = "", error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "<solution>":
                where = f" (solution line {trace.tb_lineno})"
            trace = trace.tb_next
        if where == "" and isinstance(error, SyntaxError) and error.lineno:
            where = f" (solution line {error.lineno})"
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return ["error", kinds, str(error)[:WORDS_CHARS], where]
    except BaseException:  # noqa: BLE001
        return ["error", ["Exception"], "an error that cannot be described", ""]
