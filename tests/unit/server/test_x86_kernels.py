"""The x86 kernels of native/engine equal the portable ones, also when the tests run on another processor.

AVX2 runs in QEMU's user mode after a cross compilation. QEMU has no AVX-512, so the VNNI kernels are compiled against
SIMDe, which implements each of their intrinsics in portable C. The vector kernels for AVX2 have no intrinsics: their
vectors of 32 bytes run everywhere.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ENGINE = ROOT / "native" / "engine"
COMPARE = ROOT / "tests" / "native" / "compare_kernels.cpp"
FLAGS = ["-O1", "-std=c++17", "-Wall", "-Wextra", f"-I{ENGINE}"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
VNNI = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni"]
X86_FLAGS = {"avx2": AVX2, "vector_kernels_avx2": AVX2, "vnni": VNNI}
CROSS, QEMU, X86_ROOT = "x86_64-linux-gnu-g++", "qemu-x86_64", "/usr/x86_64-linux-gnu"
SIMDE_HEADER = """\
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#include <simde/x86/avx512.h>
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}"
    return done.stdout


def build(folder: Path, compiler: str, flags_of: dict[str, list[str]]) -> Path:
    objects = []
    for source in sorted(ENGINE.glob("*.cpp")):
        objects.append(folder / f"{source.stem}.o")
        run(compiler, *FLAGS, *flags_of.get(source.stem, []), "-c", source, "-o", objects[-1])
    run(compiler, *FLAGS, COMPARE, *objects, "-o", folder / "compare", "-lpthread")
    return folder / "compare"


@pytest.mark.skipif(not (shutil.which(CROSS) and shutil.which(QEMU)), reason=f"needs {CROSS} and {QEMU} (qemu-user)")
def test_avx2_kernels_equal_the_portable_ones(tmp_path: Path) -> None:
    printed = run(QEMU, "-cpu", "max", "-L", X86_ROOT, build(tmp_path, CROSS, X86_FLAGS))
    assert "avx2: " in printed
    assert "avx2 vectors: " in printed


@pytest.mark.skipif(
    not (shutil.which("g++") and Path("/usr/include/simde").exists()), reason="needs g++ and SIMDe (libsimde-dev)"
)
def test_vnni_kernels_equal_the_portable_ones(tmp_path: Path) -> None:
    (tmp_path / "immintrin.h").write_text(SIMDE_HEADER)
    macros = ["__AVX512VNNI__", "__AVX512VL__", "__AVX512BW__", "__F16C__", "__builtin_cpu_supports(name)=1"]
    flags = [f"-I{tmp_path}", "-Wno-unused-parameter", *(f"-D{macro}" for macro in macros)]
    assert "vnni: " in run(build(tmp_path, "g++", {"vnni": flags}))


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_vectors_of_avx2_equal_the_portable_ones(tmp_path: Path) -> None:
    macros = ["__AVX2__", "__FMA__", "__builtin_cpu_supports(name)=1"]
    flags = ["-Wno-builtin-macro-redefined", *(f"-D{macro}" for macro in macros)]
    assert "avx2 vectors: " in run(build(tmp_path, "g++", {"vector_kernels_avx2": flags}))
