"""Skips that the set-up should have prevented fail a run."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.skips import is_unexpected

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("reason", "anywhere", "with_system"),
    [
        ("needs an NVIDIA GPU", False, False),
        ("libnvrtc.so.13 was not found (pip install nvidia-cuda-nvrtc)", False, False),
        ("pip install xllamacpp", True, True),
        ("no redis-server: apt-get install redis-server", False, True),
        ("no C++ compiler: apt-get install g++", False, True),
        ("no aarch64-linux-gnu-g++: apt-get install g++-aarch64-linux-gnu", False, True),
        ("there is no docker and no podman (apt-get install podman runc runsc)", False, False),
    ],
)
def test_packages_of_the_setup_are_expected(reason: str, anywhere: bool, with_system: bool) -> None:
    assert is_unexpected(reason, with_system=False) == anywhere
    assert is_unexpected(reason, with_system=True) == with_system


@pytest.mark.parametrize(("reason", "exit_code"), [("needs an NVIDIA GPU", 0), ("pip install missing", 1)])
@pytest.mark.parametrize("processes", [(), ("-n", "1")])
def test_an_unexpected_skip_fails_the_run(
    tmp_path: Path, reason: str, exit_code: int, processes: tuple[str, ...]
) -> None:
    text = f"import pytest\ndef test_one(): pytest.skip({reason!r})\ndef test_two(): pass\n"
    (tmp_path / "test_it.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.skips", "-c", "/dev/null", *processes, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == exit_code, done.stdout
    assert f"1  {reason}" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("error: ") == bool(exit_code)
