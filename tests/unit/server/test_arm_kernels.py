"""The NEON kernels of native/engine equal the portable ones, also when the tests run on another processor.

There they run in QEMU's user mode after a cross compilation.
"""

import platform
import shutil
from pathlib import Path

import pytest
from tests.kernel_programs import KernelPrograms, run

IS_ARM = platform.machine() == "aarch64"
CROSS, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
EMULATOR = [] if IS_ARM else [QEMU, "-L", "/usr/aarch64-linux-gnu"]
HAS_DOTPROD = not IS_ARM or "asimddp" in Path("/proc/cpuinfo").read_text(errors="replace").split()
ARM_FLAGS = {"dotprod": ["-march=armv8.2-a+dotprod"]}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not shutil.which(CROSS), reason=f"no {CROSS}: apt-get install g++-aarch64-linux-gnu"),
    pytest.mark.skipif(not (IS_ARM or shutil.which(QEMU)), reason=f"no {QEMU}: apt-get install qemu-user"),
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> KernelPrograms:
    return KernelPrograms(tmp_path_factory.mktemp("objects"))


def test_kernels_of_the_dot_product_equal_the_portable_ones(programs: KernelPrograms) -> None:
    printed = run(*EMULATOR, programs.link(CROSS, ARM_FLAGS))
    assert ("dotprod: " in printed) == HAS_DOTPROD


@pytest.mark.skipif(IS_ARM, reason="QEMU chooses the CPU")
def test_a_cpu_without_the_dot_product_uses_the_portable_kernels(programs: KernelPrograms) -> None:
    printed = run(EMULATOR[0], "-cpu", "cortex-a53", *EMULATOR[1:], programs.link(CROSS, ARM_FLAGS))
    assert "dotprod: " not in printed
    assert "portable: " in printed
