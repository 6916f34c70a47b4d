"""Programs of tests/native/compare_kernels.cpp: the kernels of native/engine, compiled for a processor and compared.

programs = KernelPrograms(tmp_path_factory.mktemp("objects"))
program = programs.link("g++", {"avx2": ["-mavx2", "-mfma", "-mf16c"]})    # flags of avx2.cpp
printed = run(program)    # fails unless all kernels that the CPU runs are equal
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["ENGINE", "NATIVE_TESTS", "KernelPrograms", "run"]

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ROOT / "native" / "engine"
NATIVE_TESTS = ROOT / "tests" / "native"
FLAGS = ["-O1", "-std=c++17", "-Wall", "-Wextra", f"-I{ENGINE}"]
COMMAND_TIMEOUT_S = 240


def run(*command: str | Path) -> str:
    """What the command prints; it must exit with 0."""
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}"
    return done.stdout


class KernelPrograms:
    """Compiles each file once for the programs that use the same compiler and flags for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, ...], Path] = {}
        self._programs = 0

    def compile(self, compiler: str, source: Path, *flags: str) -> Path:
        """The object file of a source."""
        command = (compiler, *FLAGS, *flags, "-c", str(source))
        if command not in self._made:
            target = self._folder / f"{len(self._made)}.o"
            run(*command, "-o", target)
            self._made[command] = target
        return self._made[command]

    def link(
        self, compiler: str, flags_of: Mapping[str, list[str]], replaced: Mapping[str, Path] | None = None
    ) -> Path:
        """The comparing program, with flags for some files and other sources in place of some."""
        engine = {source.stem: source for source in sorted(ENGINE.glob("*.cpp"))} | dict(replaced or {})
        sources = {"compare_kernels": NATIVE_TESTS / "compare_kernels.cpp"} | engine
        objects = [self.compile(compiler, source, *flags_of.get(name, [])) for name, source in sources.items()]
        program = self._folder / f"compare_{self._programs}"
        self._programs += 1
        run(compiler, *objects, "-o", program, "-lpthread")
        return program
