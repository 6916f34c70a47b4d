"""Runs the native core's tests under the address, undefined-behaviour and thread sanitizers, and on ARM."""

import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[3] / "native"
SANITIZERS = {
    "address and undefined behaviour": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "threads": ["-fsanitize=thread"],
}
BUILD_TIMEOUT_S = 240
ARM, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
C3 = [path.stem for path in sorted((NATIVE / "src").glob("*.cpp")) if not path.stem.startswith("corpus")]


def build(folder: Path, compiler: str, flags: list[str]) -> Path:
    """The program of the native core's tests."""
    sources = [NATIVE / "test" / "core_test.cpp", *(NATIVE / "src" / f"{name}.cpp" for name in C3)]
    common = ["-std=c++17", "-ffp-contract=off", f"-I{NATIVE / 'include'}", f"-I{NATIVE / 'src'}"]

    def compile_one(source: Path) -> str:
        target = str(folder / f"{source.stem}.o")
        command = [compiler, *common, *flags, "-c", str(source), "-o", target]
        subprocess.run(command, check=True, timeout=BUILD_TIMEOUT_S)
        return target

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compile_one, sources))
    program = folder / "core_test"
    link = [compiler, *flags, "-pthread", "-o", str(program), *objects]
    subprocess.run(link, check=True, timeout=BUILD_TIMEOUT_S)
    return program


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "WARNING" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_the_native_core_passes_under(sanitizer: str, tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: apt-get install g++")
    run(build(tmp_path, compiler, ["-g1", "-O0", *SANITIZERS[sanitizer]]))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(platform.machine() == "aarch64", reason="this processor is an ARM one: the tests above run there")
@pytest.mark.skipif(not shutil.which(ARM), reason=f"no {ARM}: apt-get install g++-aarch64-linux-gnu")
@pytest.mark.skipif(not shutil.which(QEMU), reason=f"no {QEMU}: apt-get install qemu-user")
def test_the_native_core_passes_on_arm(tmp_path: Path) -> None:
    program = build(tmp_path, ARM, ["-O1", "-Wall", "-Wextra", "-Werror"])
    run(QEMU, "-L", "/usr/aarch64-linux-gnu", program)
