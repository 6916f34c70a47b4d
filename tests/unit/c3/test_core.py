"""Runs the native core's tests under the address, undefined-behaviour and thread sanitizers."""

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
C3 = [path.stem for path in sorted((NATIVE / "src").glob("*.cpp")) if not path.stem.startswith("corpus")]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_the_native_core_passes_under(sanitizer, tmp_path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: apt-get install g++")
    program = tmp_path / "core_test"
    sources = [NATIVE / "test" / "core_test.cpp", *(NATIVE / "src" / f"{name}.cpp" for name in C3)]
    flags = ["-std=c++17", "-g1", "-O0", "-ffp-contract=off", f"-I{NATIVE / 'include'}", f"-I{NATIVE / 'src'}"]
    flags += SANITIZERS[sanitizer]

    def compile_one(source: Path) -> str:
        target = str(tmp_path / f"{source.stem}.o")
        subprocess.run([compiler, *flags, "-c", str(source), "-o", target], check=True, timeout=BUILD_TIMEOUT_S)
        return target

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compile_one, sources))
    link = [compiler, *SANITIZERS[sanitizer], "-pthread", "-o", str(program), *objects]
    subprocess.run(link, check=True, timeout=BUILD_TIMEOUT_S)
    done = subprocess.run([program], capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "WARNING" not in done.stderr
