"""The x86 kernels of native/engine equal the portable ones, also when the tests run on another processor.

On another processor AVX2 runs in QEMU's user mode after a cross compilation. QEMU has no AVX-512, so the VNNI kernels
are compiled against SIMDe, which implements each of their intrinsics in portable C. Tiles of AMX are emulated on every
processor (tests/native/emulated_tiles.h). The vector kernels have no intrinsics: their vectors of 32 and 64 bytes run
everywhere.
"""

import platform
import shutil
from pathlib import Path

import pytest
from tests.kernel_programs import ENGINE, NATIVE_TESTS, KernelPrograms, run

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
VNNI = [*AVX512, "-mavx512vnni", "-Wno-maybe-uninitialized"]
AMX = [*VNNI, "-mamx-tile", "-mamx-int8"]
X86_FLAGS = {
    "amx": AMX,
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
EMULATED_TILES = ["-D__AMX_TILE__", "-D__AMX_INT8__", "-include", str(NATIVE_TESTS / "emulated_tiles.h")]
EMULATED_FILES = {"amx_permission": NATIVE_TESTS / "emulated_permission.cpp"}

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
    if "amx_int8" in CPU_FLAGS:
        assert "amx: the same bits as vnni" in printed


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++: apt-get install g++")
@pytest.mark.skipif(
    not (HAS_VNNI or Path("/usr/include/simde").exists()), reason="no SIMDe: apt-get install libsimde-dev"
)
def test_vnni_and_amx_kernels_equal_the_portable_ones(programs: KernelPrograms, tmp_path: Path) -> None:
    if HAS_VNNI:  # vectors are those of the CPU, tiles are emulated
        flags = {**X86_FLAGS, "amx": [*VNNI, *EMULATED_TILES]}
    else:
        (tmp_path / "immintrin.h").write_text(SIMDE_HEADER)
        macros = ["__AVX512VNNI__", "__AVX512VL__", "__AVX512BW__", "__F16C__", "SIMDE_NO_NATIVE"]
        simde = [f"-I{tmp_path}", "-Wno-unused-parameter", ANY_CPU, *(f"-D{macro}" for macro in macros)]
        flags = {"vnni": simde, "amx": [*simde, *EMULATED_TILES], "vector_kernels_avx512": WIDE_VECTORS}
    printed = run(programs.link("g++", flags, EMULATED_FILES))
    assert "\nvnni: " in printed
    assert "amx: the same bits as vnni" in printed


@pytest.mark.skipif(not shutil.which(CROSS), reason=f"needs {CROSS}")
def test_amx_kernels_use_tiles_and_release_them(programs: KernelPrograms) -> None:
    assembly = run(CROSS.replace("g++", "objdump"), "-d", programs.compile(CROSS, ENGINE / "amx.cpp", *AMX))
    products = 3  # 8 bits without and with minimums, 4 bits
    assert assembly.count("ldtilecfg") == assembly.count("tilerelease") == products
    assert assembly.count("tdpbssd") >= 4 * 2  # without and with minimums: two groups, two halves of a panel


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++: apt-get install g++")
def test_wide_vectors_equal_the_portable_ones(programs: KernelPrograms) -> None:
    flags = ["-Wno-builtin-macro-redefined", "-D__AVX2__", "-D__FMA__", ANY_CPU]
    printed = run(programs.link("g++", {"vector_kernels_avx2": flags, "vector_kernels_avx512": WIDE_VECTORS}))
    assert "avx2 vectors: " in printed
    assert "avx512 vectors: " in printed
