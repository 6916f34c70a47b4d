"""The version of a build, from git tags."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

import lakh

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def provider() -> ModuleType:
    spec = importlib.util.spec_from_file_location("version_from_tag", ROOT / "scripts/packaging/version_from_tag.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "src" / "lakh").mkdir(parents=True)
    (tmp_path / "src" / "lakh" / "__init__.py").write_text('"""x"""\n__version__ = "0.2.0"\n')
    return tmp_path


def git(root: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    subprocess.run(["git", "-C", str(root), *identity, *words], check=True, capture_output=True, timeout=30)


def test_without_git_the_source_decides(provider: ModuleType, project: Path) -> None:
    assert provider.build_version(project) == "0.2.0"
    assert provider.declared_version(ROOT) == lakh.__version__


def test_an_sdist_keeps_its_version(provider: ModuleType, project: Path) -> None:
    (project / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: lakh\nVersion: 0.2.0.dev7+gabc\n")
    assert provider.build_version(project) == "0.2.0.dev7+gabc"


@pytest.mark.skipif(shutil.which("git") is None, reason="no git: apt-get install git")
def test_tags_decide_in_a_checkout(provider: ModuleType, project: Path) -> None:
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "one")
    assert provider.build_version(project).startswith("0.2.0.dev1+g")
    git(project, "tag", "ready/someone")  # other tags do not count
    git(project, "tag", "v0.1.0")
    with pytest.raises(ValueError, match="make them equal"):
        provider.build_version(project)
    git(project, "commit", "-q", "--allow-empty", "-m", "two")
    assert provider.build_version(project).startswith("0.2.0.dev1+g")
    git(project, "tag", "v0.2.0")
    assert provider.build_version(project) == "0.2.0"
