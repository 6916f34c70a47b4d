"""Documentation: generated pages are up to date, links resolve, every module has a docstring."""

import asyncio
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from tests.browser import CHROMIUM, browser

from lakh.cli.main import cli
from lakh.errors import LakhError

ROOT = Path(__file__).resolve().parents[2]
SHELL_WORDS = ("|", "||", "&&", "&", ";", ">", "2>", "<")
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


def test_generated_pages_are_up_to_date() -> None:
    """In a process of its own: other tests define events and errors, which would be on the pages."""
    command = [sys.executable, str(ROOT / "scripts" / "reference.py"), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_files_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_result_files_exist(page: Path) -> None:
    named = re.findall(r"[\w-]+_[\w*-]+_(?:20\d\d-\d\d-\d\d|\*)\.(?:md|svg|json)", page.read_text(encoding="utf-8"))
    missing = [name for name in named if not any((ROOT / "bench" / "results").glob(name))]
    assert missing == [], f"{page.name} names results that bench/results does not have"


def _runnable(page: Path) -> str:
    """The Python blocks of a page that start with "# runs as it is", in their order."""
    return "\n".join(re.findall(r"```python\n(# runs as it is\n.*?)```", page.read_text(encoding="utf-8"), re.S))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in PAGES if _runnable(page)], ids=lambda path: path.stem)
def test_python_examples_run_as_they_stand(page: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _runnable(page)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # examples for contributors import from the tests
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_documentation_builds_strictly(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").rglob("*.html"):  # they work offline, and the theme's scripts find every anchor
        text = page.read_text(encoding="utf-8")
        assert re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="?https?://[^">]+', text) == [], page
        assert re.findall(r'<h\d id="?\d[^">]*', text) == [], page
    if CHROMIUM is not None:
        asyncio.run(_open_pages(tmp_path))


async def _open_pages(tmp_path: Path) -> None:
    """Pages of every kind as files, without a server: no exception in their scripts, and no request elsewhere."""
    async with browser(tmp_path / "profile") as tab:
        for page in ("index", "how-to/dashboard", "how-to/training", "reference/commands"):
            await tab.call("Page.navigate", url=(tmp_path / "site" / f"{page}.html").as_uri())
            await tab.until(f"location.href.endsWith('{page}.html') && document.readyState === 'complete'")
            await tab.until("document.querySelector('h1') !== null")
        assert tab.complaints == []
        assert [url for url in tab.requested if not url.startswith(("file://", "data:", "blob:"))] == []


def _commands() -> list[tuple[str, list[str]]]:
    """(page, words) of each lakh command in the shell blocks of the pages."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
            for line in block.replace("\\\n", " ").splitlines():
                if not line.startswith("lakh "):
                    continue
                words = shlex.split(line, comments=True)
                end = next((at for at, word in enumerate(words) if word in SHELL_WORDS), len(words))
                found.append((str(page.relative_to(ROOT)), words[1:end]))
    return found


def test_shell_blocks_use_commands_and_options_that_exist() -> None:
    found = _commands()
    assert len(found) > 150
    for page, words in found:
        command: Any = cli
        context, rest = click.Context(cli, info_name="lakh"), words
        try:
            while isinstance(command, click.Group) and rest:
                name, command, rest = command.resolve_command(context, rest)
                context = click.Context(command, parent=context, info_name=name)
            command.make_parser(context).parse_args(rest)
        except (click.UsageError, LakhError) as error:
            raise AssertionError(f"{page}: lakh {shlex.join(words)}: {error}") from None


def test_every_module_has_a_docstring() -> None:
    silent = [path for path in (ROOT / "src").rglob("*.py") if not path.read_text(encoding="utf-8").startswith('"""')]
    assert silent == []


def test_the_architecture_page_names_six_files_and_every_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    tour = re.findall(r"^\d\. \[`(src/lakh/[^`]+)`\]", text, re.M)
    assert len(tour) == 6
    assert all((ROOT / path).exists() for path in tour)
    for package in (path for path in (ROOT / "src" / "lakh").iterdir() if (path / "__init__.py").exists()):
        assert package.name in text


def test_imports_point_down() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
