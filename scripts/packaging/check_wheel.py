"""Check a wheel: its files, its platform tag, and every command of lakh in an environment that has nothing else.

    python scripts/packaging/check_wheel.py dist/lakh-*.whl

Native libraries are those that native/CMakeLists.txt and the files it includes install, so that a new one is checked
without a change here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALL_S, COMMAND_S = 300, 120
DATA = ("lakh/py.typed", "lakh/dashboard/page/dashboard.html", "lakh/share/recipes/laptop.py")
# Prints the full name of every command, after showing its help.
EVERY_HELP = """
import click
from lakh.cli.main import cli

def show(command, names, parent):
    context = click.Context(command, info_name=names[-1], parent=parent)
    command.get_help(context)
    print(" ".join(names))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            show(command.get_command(context, name), (*names, name), context)

show(cli, ("lakh",), None)
"""


def native_libraries() -> set[str]:
    """Where the build installs shared libraries: lakh/c3/liblakh_c3.so."""
    found = set()
    for path in (ROOT / "native").rglob("CMakeLists.txt"):
        for targets, folder in re.findall(
            r"install\(TARGETS ([\w ]+?) LIBRARY DESTINATION ([\w/]+)", path.read_text(encoding="utf-8")
        ):
            found |= {f"{folder}/lib{target}.so" for target in targets.split()}
    return found


def problems_in_files(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    found = [f"{name} is missing" for name in sorted({*native_libraries(), *DATA} - names)]
    if not any(re.fullmatch(r"lakh-[^/]+\.dist-info/licenses/NOTICE", name) for name in names):
        found.append("NOTICE is missing")
    found += [
        f"{name} does not belong in a wheel" for name in sorted(names) if re.match(r"(tests|bench|native|docs)/", name)
    ]
    if not re.search(r"-py3-none-(many)?linux\w+\.whl$", wheel.name):
        found.append("the tag is not py3-none-linux or py3-none-manylinux")
    return found


def run_commands(wheel: Path, kept: Path | None) -> list[str]:
    """Install the wheel alone, in the folder `kept` or in one that is removed, and return the names of all commands."""
    with contextlib.ExitStack() as stack:
        folder = kept or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lakh-wheel-")))
        python = folder / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=INSTALL_S)
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile"]
        pip += ["-c", ROOT / "constraints.txt", wheel]
        subprocess.run(pip, check=True, timeout=INSTALL_S)

        def output(*words: str | Path) -> str:
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=COMMAND_S, check=False)
            if done.returncode:
                raise SystemExit(f"error: {' '.join(map(str, words))}: {done.stderr[-2000:]}")
            return done.stdout

        names = output(python, "-c", EVERY_HELP).splitlines()
        lakh = python.with_name("lakh")
        for name in names[1:]:
            if name.count(" ") == 1:  # each group as a process of its own, as people start it
                output(lakh, name.split()[1], "--help")
        if not json.loads(output(lakh, "config", "check", "laptop", "--json"))["ok"]:
            raise SystemExit("error: lakh config check laptop: the recipe of the wheel is not valid")
        done = subprocess.run([lakh, "doctor", "--json"], cwd=folder, capture_output=True, text=True, timeout=COMMAND_S)
        native = next(item for item in json.loads(done.stdout)["findings"] if item["what"] == "native core")
        if not native["ok"]:
            raise SystemExit(f"error: lakh doctor: native core: {native}")
        return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="install into this folder and keep it")
    given = parser.parse_args()
    wheel, kept = given.wheel.resolve(), given.keep and given.keep.resolve()
    if problems := problems_in_files(wheel):
        raise SystemExit("\n".join(f"error: {wheel.name}: {problem}" for problem in problems))
    print(f"{wheel.name}: {len(run_commands(wheel, kept))} commands run")


if __name__ == "__main__":
    main()
