"""Values that the shell completes, asked through the real bash."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHELL = """
lakh() { %(python)s -m lakh "$@"; }
export -f lakh
eval "$(lakh completion bash)"
compopt() { :; }  # only works while bash itself completes
export COMP_LINE=%(line)r COMP_POINT=%(point)d COMP_CWORD=%(index)d
COMP_WORDS=(%(words)s)
_lakh_completion %(executable)s
printf '%%s\\n' "${COMPREPLY[@]}"
"""


def completed(line: str, folder: Path) -> list[str]:
    """What bash offers at the end of this line. Bash splits words at : and = too."""
    parts = line.replace(":", " : ").replace("=", " = ").split() + ([""] if line.endswith((" ",)) else [])
    executable = folder / "lakh"
    executable.write_text(f'#!/bin/sh\nexec {sys.executable} -m lakh "$@"\n')
    executable.chmod(0o755)
    script = SHELL % {
        "python": sys.executable,
        "executable": executable,
        "line": line,
        "point": len(line),
        "index": len(parts) - 1,
        "words": " ".join(f"'{part}'" for part in parts),
    }
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "run.toml").write_text("")
    return tmp_path


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("lakh tra", ["train"]),
        ("lakh train lap", ["laptop"]),
        ("lakh config check sizes:code_1", ["code_160m", "code_1b"]),
        ("lakh train laptop --set optim.l", ["optim.lr="]),
        ("lakh train laptop --set train.backend=c", ["c3"]),
        ("lakh eval runs/mine --task humaneval,mbpp-s", ["humaneval,mbpp-sanitized"]),
        ("lakh resume ", ["runs/mine"]),
        ("lakh plan estimate --model llama3-4", ["llama3-405b"]),
        ("lakh plan estimate --cluster llama3", ["llama3-24k-ib", "llama3-24k-roce"]),
    ],
)
def test_values_are_completed(line: str, offered: list[str], folder: Path) -> None:
    assert completed(line, folder) == offered
