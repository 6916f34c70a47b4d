"""Code that runs in the sandbox. Standard library only: it is passed to a bare interpreter.

    zygote.py     first process: forks the others for every program, enforces their limits, never reads a test
    candidate.py  process that runs the model's code and answers calls
    examiner.py   process that runs the tests and calls the candidate
    commands.py   process that compiles and runs programs of other languages
    values.py     plain data as JSON: all that candidate and examiner exchange; messages.py carries it, and
                  packed_rows.py makes long lists of equal rows short
    relay.py      in a container, in front of the zygote: reads requests from stdin

There are two processes because a test that shares one with the code under test can be read, and its result forged. The
candidate is forked from a process that never held a test, gets the arguments of one call at a time, and can only
answer. The examiner compares the answer with the reference, out of the candidate's reach.
"""

from __future__ import annotations

import base64
import functools
import marshal
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

__all__ = ["command_line"]

MODULES = ("messages", "packed_rows", "values", "candidate", "examiner", "commands", "zygote", "relay")

# Creates the modules under their own names from the code in argv[1]: none of our files is needed in the sandbox.
_START = """
import binascii, marshal, sys
codes = marshal.loads(binascii.a2b_base64(sys.argv[1]))
for name in ("lakh", "lakh.evals", "lakh.evals.sandboxed"):
    sys.modules[name] = type(sys)(name)
    sys.modules[name].__path__ = []
for name, code in codes.items():
    full = "lakh.evals.sandboxed." + name
    module = sys.modules[full] = type(sys)(full)
    setattr(sys.modules["lakh.evals.sandboxed"], name, module)
    exec(code, vars(module))
del sys.argv[1:]
sys.modules["lakh.evals.sandboxed.START"].main()
"""


@functools.cache
def command_line(*, start: str = "zygote", as_text: bool = False) -> tuple[str, ...]:
    """The arguments after the interpreter and its flags. `as_text` is for a Python of another version than ours."""
    codes: dict[str, str | CodeType] = {}
    for name in MODULES[: MODULES.index(start) + 1]:
        path = Path(__file__).parent / f"{name}.py"
        codes[name] = path.read_text(encoding="utf-8") if as_text else _code(f"{__name__}.{name}", path)
    return "-c", _START.replace("START", start), base64.b64encode(marshal.dumps(codes)).decode()


def _code(name: str, path: Path) -> CodeType:
    """From Python's cache next to the source, which is quicker than compiling; without the path on the host."""
    code = SourceFileLoader(name, str(path)).get_code(name)
    assert code is not None, "a source file has code"
    return _renamed(code, f"<{name}>")


def _renamed(code: CodeType, name: str) -> CodeType:
    inner = (_renamed(one, name) if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.replace(co_filename=name, co_consts=tuple(inner))
