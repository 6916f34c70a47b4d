"""Faults that tests, demos and plans can request, e.g. `kill(rank=1, step=12)`. The trainer injects them.

kill(rank=R, step=S)    SIGKILL rank R when it is about to begin step S
stop(rank=R, step=S)    SIGSTOP rank R: alive to the kernel, silent to its peers
exit(rank=R, step=S)    the process exits with an error
lose(rank=R, step=S)    SIGKILL rank R, and its device is gone: a restart runs on one device less
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal, get_args

from lakh.errors import UserError

__all__ = ["Fault"]

FaultKind = Literal["kill", "stop", "exit", "lose"]


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    rank: int
    step: int

    @staticmethod
    def parse(text: str) -> Fault:
        """Parse `kill(rank=1, step=12)`."""
        kinds = ", ".join(f"{kind}(rank=1, step=12)" for kind in get_args(FaultKind))
        wrong = UserError(f"--fault {text}", "is not a fault", f"write one of {kinds}")
        try:
            call = ast.parse(text.strip(), mode="eval").body
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
                raise wrong
            numbers = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        except (SyntaxError, ValueError):
            raise wrong from None
        kind = call.func.id
        fits = kind in get_args(FaultKind) and set(numbers) == {"rank", "step"}
        if not fits or not all(type(n) is int and n >= 0 for n in numbers.values()):
            raise wrong
        return Fault(kind, rank=numbers["rank"], step=numbers["step"])  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.kind}(rank={self.rank}, step={self.step})"
