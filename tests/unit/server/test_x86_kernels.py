"""The x86 kernels of native/engine equal the portable ones, also when the tests run on another processor.

On another processor AVX2 runs in QEMU's user mode after a cross compilation. QEMU has no AVX-512, so the VNNI kernels
are compiled against SIMDe, which implements each of their intrinsics in portable C. The vector kernels have no
intrinsics: their vectors of 32 and 64 bytes run everywhere.
"""

import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ENGINE = ROOT / "native" / "engine"
COMPARE = ROOT / "tests" / "native" / "compare_kernels.cpp"
FLAGS = ["-O1", "-std=c++17", "-Wall", "-Wextra", f"-I{ENGINE}"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
VNNI = [*AVX512, "-mavx512vnni", "-Wno-maybe-uninitialized"]
X86_FLAGS = {
    "avx2": AVX2,
    "avx_vnni": [*AVX2, "-mavxvnni"],
    "vector_kernels_avx2": AVX2,
    "vector_kernels_avx512": AVX512,
    "vnni": VNNI,
}
IS_X86 = platform.machine() == "x86_64"
CROSS, QEMU, X86_ROOT = "g++" if IS_X86 else "x86_64-linux-gnu-g++", "qemu-x86_64", "/usr/x86_64-linux-gnu"
EMULATOR = [] if IS_X86 else [QEMU, "-cpu", "max", "-L", X86_ROOT]
CPU_FLAGS = Path("/proc/cpuinfo").read_text(errors="replace").split() if IS_X86 else []
SIMDE_HEADER = """\
#pragma once
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#include <simde/x86/avx512.h>
#ifndef _mm512_cvtepi32_ps  // SIMDe 0.7.4 does not have it
static inline __m512 _mm512_cvtepi32_ps(__m512i numbers) {
  int from[16];
  float to[16];
  _mm512_storeu_si512(from, numbers);
  for (int i = 0; i < 16; ++i) to[i] = (float)from[i];
  return _mm512_loadu_ps(to);
}
#endif
"""

ANY_CPU = "-D__builtin_cpu_supports(name)=1"
WIDE_VECTORS = ["-D__AVX512F__", "-D__AVX512BW__", "-D__AVX512VL__", "-D__AVX512DQ__", ANY_CPU]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict[str, list[str]]], Path]:
    """The comparing program of a compiler, with flags for some files. The others are compiled once for all programs."""
    folder = tmp_path_factory.mktemp("objects")
    made: dict[tuple[str, ...], Path] = {}

    def compile_object(compiler: str, source: Path, *flags: str) -> Path:
        command = (compiler, *FLAGS, *flags, "-c", str(source))
        if command not in made:
            run(*command, "-o", folder / f"{len(made)}.o")
            made[command] = folder / f"{len(made)}.o"
        return made[command]

    def link(compiler: str, flags_of: dict[str, list[str]]) -> Path:
        sources = [COMPARE, *sorted(ENGINE.glob("*.cpp"))]
        objects = [compile_object(compiler, source, *flags_of.get(source.stem, [])) for source in sources]
        program = tmp_path_factory.mktemp("program") / "compare"
        run(compiler, *objects, "-o", program, "-lpthread")
        return program

    return link


@pytest.mark.skipif(
    not (shutil.which(CROSS) and ("avx2" in CPU_FLAGS if IS_X86 else shutil.which(QEMU))),
    reason=f"needs {CROSS} and a CPU with AVX2 or {QEMU} (qemu-user)",
)
def test_kernels_of_the_instruction_sets_equal_the_portable_ones(build: Callable[..., Path]) -> None:
    printed = run(*EMULATOR, build(CROSS, X86_FLAGS))
    assert "avx2: " in printed
    assert "avx2 vectors: " in printed
    if "avx_vnni" in CPU_FLAGS:
        assert "avx_vnni: " in printed
    if "avx512_vnni" in CPU_FLAGS:
        assert "vnni: " in printed
        assert "avx512 vectors: " in printed


@pytest.mark.skipif(
    not (shutil.which("g++") and Path("/usr/include/simde").exists()), reason="needs g++ and SIMDe (libsimde-dev)"
)
def test_vnni_kernels_equal_the_portable_ones(build: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "immintrin.h").write_text(SIMDE_HEADER)
    macros = ["__AVX512VNNI__", "__AVX512VL__", "__AVX512BW__", "__F16C__", "SIMDE_NO_NATIVE"]
    flags = [f"-I{tmp_path}", "-Wno-unused-parameter", ANY_CPU, *(f"-D{macro}" for macro in macros)]
    assert "vnni: " in run(build("g++", {"vnni": flags, "vector_kernels_avx512": WIDE_VECTORS}))


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_wide_vectors_equal_the_portable_ones(build: Callable[..., Path]) -> None:
    flags = ["-Wno-builtin-macro-redefined", "-D__AVX2__", "-D__FMA__", ANY_CPU]
    printed = run(build("g++", {"vector_kernels_avx2": flags, "vector_kernels_avx512": WIDE_VECTORS}))
    assert "avx2 vectors: " in printed
    assert "avx512 vectors: " in printed
