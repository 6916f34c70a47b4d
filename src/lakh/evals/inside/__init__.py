"""What runs behind the walls. Standard library only: this code is handed as text to a bare interpreter in the sandbox.

    values.py     plain data as JSON and back: all that ever passes between candidate and examiner
    candidate.py  the process that holds the model's code and answers calls
    examiner.py   the process that holds the tests, and asks
    commands.py   the process that compiles and runs programs of other languages
    zygote.py     the first process: forks the others for every program, watches their limits, never sees a test

Two processes, because a test that shares a process with the code under test can be read and its end can be forged. The
candidate is forked from a process that never held a test, gets only the arguments of each call, and can only answer;
whether the answer is right is decided, with the reference at hand, where the candidate cannot look.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["command_line"]

MODULES = ("values", "candidate", "examiner", "commands", "zygote")

# Makes the modules under their own names from the texts in argv[1], without any file of ours behind the walls.
_START = """
import json, sys
texts = json.loads(sys.argv[1])
for name in ("lakh", "lakh.evals", "lakh.evals.inside"):
    sys.modules[name] = type(sys)(name)
    sys.modules[name].__path__ = []
for name, text in texts.items():
    full = "lakh.evals.inside." + name
    module = sys.modules[full] = type(sys)(full)
    setattr(sys.modules["lakh.evals.inside"], name, module)
    exec(compile(text, "<" + full + ">", "exec"), vars(module))
del sys.argv[1:]
sys.modules["lakh.evals.inside.zygote"].main()
"""


def command_line() -> list[str]:
    """What follows the interpreter and its flags."""
    import json

    folder = Path(__file__).parent
    texts = {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in MODULES}
    return ["-c", _START, json.dumps(texts)]
