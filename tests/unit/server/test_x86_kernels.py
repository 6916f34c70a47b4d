"""The x86 kernels of native/engine equal the portable ones, also when the tests run on another processor.

On another processor AVX2 runs in QEMU's user mode after a cross compilation. QEMU has no AVX-512, so the VNNI kernels
are compiled against SIMDe, which implements each of their intrinsics in portable C. The vector kernels have no
intrinsics: their vectors of 32 and 64 bytes run everywhere.
"""

import platform
import shutil
from pathlib import Path

import pytest
from tests.kernel_programs import KernelPrograms, run

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
HAS_VNNI = "avx512_vnni" in CPU_FLAGS
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


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> KernelPrograms:
    return KernelPrograms(tmp_path_factory.mktemp("objects"))


@pytest.mark.skipif(
    not (shutil.which(CROSS) and ("avx2" in CPU_FLAGS if IS_X86 else shutil.which(QEMU))),
    reason=f"needs {CROSS} and a CPU with AVX2 or {QEMU} (qemu-user)",
)
def test_kernels_of_the_instruction_sets_equal_the_portable_ones(programs: KernelPrograms) -> None:
    printed = run(*EMULATOR, programs.link(CROSS, X86_FLAGS))
    assert "avx2: " in printed
    assert "avx2 vectors: " in printed
    if "avx_vnni" in CPU_FLAGS:
        assert "avx_vnni: " in printed
    if HAS_VNNI:
        assert "vnni: " in printed
        assert "avx512 vectors: " in printed


@pytest.mark.skipif(HAS_VNNI, reason="this CPU runs the VNNI kernels: the test above compares them")
@pytest.mark.skipif(not shutil.which("g++"), reason="no g++: apt-get install g++")
@pytest.mark.skipif(not Path("/usr/include/simde").exists(), reason="no SIMDe: apt-get install libsimde-dev")
def test_vnni_kernels_equal_the_portable_ones(programs: KernelPrograms, tmp_path: Path) -> None:
    (tmp_path / "immintrin.h").write_text(SIMDE_HEADER)
    macros = ["__AVX512VNNI__", "__AVX512VL__", "__AVX512BW__", "__F16C__", "SIMDE_NO_NATIVE"]
    flags = [f"-I{tmp_path}", "-Wno-unused-parameter", ANY_CPU, *(f"-D{macro}" for macro in macros)]
    assert "vnni: " in run(programs.link("g++", {"vnni": flags, "vector_kernels_avx512": WIDE_VECTORS}))


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++: apt-get install g++")
def test_wide_vectors_equal_the_portable_ones(programs: KernelPrograms) -> None:
    flags = ["-Wno-builtin-macro-redefined", "-D__AVX2__", "-D__FMA__", ANY_CPU]
    printed = run(programs.link("g++", {"vector_kernels_avx2": flags, "vector_kernels_avx512": WIDE_VECTORS}))
    assert "avx2 vectors: " in printed
    assert "avx512 vectors: " in printed
