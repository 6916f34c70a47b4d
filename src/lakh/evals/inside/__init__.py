"""What runs behind the walls. Standard library only: this code is handed to a bare interpreter in the sandbox.

    values.py     plain data as JSON and back: all that ever passes between candidate and examiner
    candidate.py  the process that holds the model's code and answers calls
    examiner.py   the process that holds the tests, and asks
    commands.py   the process that compiles and runs programs of other languages
    zygote.py     the first process: forks the others for every program, watches their limits, never sees a test
    relay.py      before it, in a container: takes orders as frames on stdin

Two processes, because a test that shares a process with the code under test can be read and its end can be forged. The
candidate is forked from a process that never held a test, gets only the arguments of each call, and can only answer;
whether the answer is right is decided, with the reference at hand, where the candidate cannot look.
"""

from __future__ import annotations

import base64
import functools
import marshal
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

__all__ = ["command_line"]

MODULES = ("values", "candidate", "examiner", "commands", "zygote", "relay")

# Makes the modules under their own names from the code in argv[1], without any file of ours behind the walls.
_START = """
import binascii, marshal, sys
codes = marshal.loads(binascii.a2b_base64(sys.argv[1]))
for name in ("lakh", "lakh.evals", "lakh.evals.inside"):
    sys.modules[name] = type(sys)(name)
    sys.modules[name].__path__ = []
for name, code in codes.items():
    full = "lakh.evals.inside." + name
    module = sys.modules[full] = type(sys)(full)
    setattr(sys.modules["lakh.evals.inside"], name, module)
    exec(code, vars(module))
del sys.argv[1:]
sys.modules["lakh.evals.inside.START"].main()
"""


@functools.cache
def command_line(*, start: str = "zygote", as_text: bool = False) -> tuple[str, ...]:
    """What follows the interpreter and its flags. `as_text` is for a Python of another version than ours."""
    codes: dict[str, str | CodeType] = {}
    for name in MODULES[: MODULES.index(start) + 1]:
        path = Path(__file__).parent / f"{name}.py"
        codes[name] = path.read_text(encoding="utf-8") if as_text else _code(f"{__name__}.{name}", path)
    return "-c", _START.replace("START", start), base64.b64encode(marshal.dumps(codes)).decode()


def _code(name: str, path: Path) -> CodeType:
    """As Python keeps it beside the text, which is quicker than compiling that; but no path of ours goes inside."""
    code = SourceFileLoader(name, str(path)).get_code(name)
    assert code is not None, "a text has code"
    return _renamed(code, f"<{name}>")


def _renamed(code: CodeType, name: str) -> CodeType:
    inner = (_renamed(one, name) if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.replace(co_filename=name, co_consts=tuple(inner))
