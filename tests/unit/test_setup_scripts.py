"""scripts/install and scripts/system-packages, with fake pip, apt-get and sudo: what a first user sees."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "env", "tee", "awk", "touch", "rm", "true", "mkdir", "cat")
OLD_PYTHON = '#!/bin/bash\n[ "$1" = -V ] && echo "Python 3.9.2"\n[ "$1" = -c ] && exit 1\nexit 0\n'
PIP = """#!/bin/bash
echo "Collecting torch"
echo "  Downloading torch-2.13.0-cp311-manylinux.whl (180.2 MB)"
echo "Installing collected packages: numpy, torch"
"""


class Checkout:
    """A folder with the scripts and a PATH of only the fake commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        shutil.copytree(ROOT / "scripts", folder / "scripts")
        for name in TOOLS:
            found = shutil.which(name)
            assert found, name
            (self.bin / name).symlink_to(found)
        self.command("id", "#!/bin/bash\necho 1000\n")
        self.command("python3", "#!/bin/bash\nexit 0\n")

    def command(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(script)
        path.chmod(0o755)

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", f"scripts/{script}", *arguments], cwd=self.folder, capture_output=True, text=True, timeout=30,
            env={"PATH": str(self.bin), "HOME": str(self.folder), **environment},
        )  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_python_that_does_not_exist_is_not_called_old(checkout: Checkout) -> None:
    for script in ("system-packages", "install"):
        done = checkout.run(script, "demo", PYTHON="python3.99")
        assert "older than 3.11" not in done.stderr
        assert "python3-venv" not in done.stderr
    assert done.returncode == 2
    assert done.stderr.startswith("error: PYTHON=python3.99: no such command; ")


def test_an_old_python_is_named_with_its_version(checkout: Checkout) -> None:
    checkout.command("python3.9", OLD_PYTHON)
    done = checkout.run("install", "demo", PYTHON="python3.9")
    assert done.returncode == 2
    assert done.stderr.strip() == "error: python3.9: is Python 3.9.2, older than 3.11; set PYTHON=python3.11 or newer"


def test_installing_shows_a_line_per_download_and_keeps_the_log(checkout: Checkout) -> None:
    (checkout.folder / ".venv" / "bin").mkdir(parents=True)
    python = checkout.folder / ".venv" / "bin" / "python"
    python.write_text(PIP)
    python.chmod(0o755)
    done = checkout.run("install", "demo")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "installing lakh[demo] into .venv (log: .venv/install.log)"
    assert "  downloading torch-2.13.0-cp311-manylinux.whl (180.2 MB)" in lines
    assert "  installing 2 packages" in lines
    assert "Collecting torch" in (checkout.folder / ".venv" / "install.log").read_text()


def test_a_failed_install_names_the_log(checkout: Checkout) -> None:
    (checkout.folder / ".venv" / "bin").mkdir(parents=True)
    python = checkout.folder / ".venv" / "bin" / "python"
    python.write_text("#!/bin/bash\necho 'ERROR: No matching distribution found for torch'\nexit 1\n")
    python.chmod(0o755)
    done = checkout.run("install", "demo")
    assert done.returncode == 2
    assert "ERROR: No matching distribution" in done.stdout
    assert ".venv/install.log" in done.stderr


@pytest.mark.parametrize(("user", "sudo"), [("1000", "sudo "), ("0", "")])
def test_missing_system_packages_give_one_line_to_copy(checkout: Checkout, user: str, sudo: str) -> None:
    checkout.command("id", f"#!/bin/bash\necho {user}\n")
    if user == "0":  # root tries by itself; what still fails is printed
        checkout.command("apt-get", "#!/bin/bash\nexit 100\n")
    for name in ("c++", "git", "java", "ip", "redis-server", "chromium"):
        checkout.command(name, "#!/bin/bash\n")
    done = checkout.run("system-packages")
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == f"    {sudo}apt-get install -y bubblewrap"


def test_packages_are_installed_where_that_is_allowed(checkout: Checkout) -> None:
    checkout.command("apt-get", "#!/bin/bash\nexit 1\n")
    checkout.command("sudo", '#!/bin/bash\necho "$@" >> sudo.log\n')
    checkout.run("system-packages")
    asked = (checkout.folder / "sudo.log").read_text()
    assert re.search(r"apt-get install -y -qq bubblewrap g\+\+ ", asked)


def test_servers_that_only_tests_start_are_installed_by_make_test_alone(checkout: Checkout) -> None:
    checkout.command("apt-get", "#!/bin/bash\nexit 1\n")
    checkout.command("sudo", '#!/bin/bash\necho "$@" >> sudo.log\n')
    checkout.run("system-packages")
    log = checkout.folder / "sudo.log"
    assert "prometheus" not in log.read_text()
    if Path("/usr/sbin/slurmd").exists():
        return  # installed already
    checkout.run("system-packages", "tests")
    for package in ("prometheus", "munge", "slurmctld", "slurmd", "slurm-client"):
        assert f"apt-get install -y -qq --no-install-recommends {package}\n" in log.read_text()


def test_set_up_runs_again_when_something_is_missing(checkout: Checkout) -> None:
    """A stamp of an environment that was removed, or of one that was built without the compiler found now."""
    venv = checkout.folder / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / ".setup").touch()
    checkout.run("system-packages")  # no lakh in it
    assert not (venv / ".setup").exists()
    assert (venv / ".without-compiler").exists()
    (venv / "bin" / "lakh").write_text("#!/bin/sh\n")
    (venv / "bin" / "lakh").chmod(0o755)
    (venv / ".setup").touch()
    checkout.run("system-packages")
    assert (venv / ".setup").exists()
    checkout.command("c++", "#!/bin/bash\n")
    checkout.run("system-packages")
    assert not (venv / ".setup").exists()


def test_the_demo_installs_no_engine_and_no_test_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def packages(extra: str) -> set[str]:
        found: set[str] = set()
        for line in extras[extra]:
            inner = re.fullmatch(r"lakh\[(.*)\]", line)
            found |= set().union(*map(packages, inner[1].split(","))) if inner else {re.split(r"[<>=;\[ ]", line)[0]}
        return found

    assert not packages("demo") & {"apache-beam", "pyspark", "moto", "pytest", "mkdocs", "mypy"}
    assert re.search(r"^demo: setup-demo$", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="not a git checkout")
def test_what_the_readme_writes_is_ignored_by_git() -> None:
    text = (ROOT / "README.md").read_text()
    written = set(re.findall(r"--out (\S+)|> (\S+\.toml)", text))
    paths = {next(filter(None, pair)) for pair in written}
    assert {"corpus", "tokenizer", "tokens", "export", "run.toml"} <= paths
    for path in paths | {"demo"}:
        shown = f"{path}/" if "." not in path else path
        done = subprocess.run(["git", "check-ignore", "-q", shown], cwd=ROOT, env=dict(os.environ), timeout=30)
        assert done.returncode == 0, path
