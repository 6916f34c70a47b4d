"""The wheel that `python -m build` makes: a light lakh without torch, with its recipes, clusters and native core."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, and that from a copy: the build folder of the checkout is neither used nor touched."""
    pytest.importorskip("build", reason="pip install build to run this")
    base = tmp_path_factory.mktemp("install")
    ignored = shutil.ignore_patterns(".venv", "build", ".git", "site", "demo", "runs", "*cache*")
    shutil.copytree(ROOT, base / "source", ignore=ignored)
    command = [sys.executable, "-m", "build", "--outdir", base / "dist", base / "source"]
    subprocess.run(command, check=True, timeout=400, stdout=subprocess.DEVNULL)
    assert len(list((base / "dist").glob("lakh-*.tar.gz"))) == 1
    (made,) = (base / "dist").glob("lakh-*.whl")
    return made


@pytest.fixture(scope="module")
def checked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """What check_wheel.py says of the wheel, and the environment in which it installed nothing else."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    check = [sys.executable, str(ROOT / "scripts" / "packaging" / "check_wheel.py"), str(wheel), "--keep", str(folder)]
    return subprocess.run(check, capture_output=True, text=True, timeout=500, check=False), folder


@pytest.fixture(scope="module")
def lakh(checked: tuple[subprocess.CompletedProcess[str], Path]) -> Path:
    return checked[1] / "bin" / "lakh"


def test_the_wheel_passes_its_check(checked: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """Its files and tag, and every command in an environment of its own."""
    done, _ = checked
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 50, done.stdout


def run(lakh: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([lakh, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_light_commands_work(lakh: Path, tmp_path: Path) -> None:
    assert run(lakh, "--help", cwd=tmp_path).returncode == 0
    checked = run(lakh, "config", "check", "laptop", "--json", cwd=tmp_path)
    assert json.loads(checked.stdout)["ok"], checked.stderr
    assert json.loads(run(lakh, "config", "check", str(ROOT / "recipes" / "laptop.py"), "--json", cwd=tmp_path).stdout)[
        "ok"
    ]


def test_doctor_reports_what_is_missing_and_what_is_built(lakh: Path, tmp_path: Path) -> None:
    done = run(lakh, "doctor", "--json", cwd=tmp_path)
    found = {item["what"]: item for item in json.loads(done.stdout)["findings"]}
    assert not found["torch"]["ok"]
    assert found["torch"]["remedy"] == "pip install 'lakh[train]'"
    assert found["native core"]["ok"] == found["compiler"]["ok"]


@pytest.mark.parametrize(
    "command", [("train", "laptop"), ("serve", "x", "--http", "127.0.0.1:0"), ("corpus", "build", ".", "--out", "c")]
)
def test_heavy_commands_name_the_extra_they_need(lakh: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    done = run(lakh, *command, cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install 'lakh[" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("**/manifest.json"))
