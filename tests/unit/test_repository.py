"""The shape of the repository: names, words and folders that keep it easy to read."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "lakh"
MODULES = sorted(SOURCE.rglob("*.py"))
MAX_FILES = 16
"""Python files side by side in one folder."""

# Names of an earlier vocabulary. Today's words are in docs/reference/glossary.md.
OLD_WORDS = r"""
    \b[Ss]eating\b | \b_?Flight\b | \b[Dd]esk\b | \b[Tt]elling\b | \bCarried\b | \b[Tt]rail\b | \b[Ss]helf\b
    | \b[Ww]alls\b | \b[Rr]ungs?\b | \b_?House\b | \bfaces\b | \b[Gg]uess(?:es|er|ed|ing)\b | \bspelling\b
    | \bwhoever\b | \bwhole[_ ]step\b | \b[Ss]o\ many\b | \b[Mm]end(?:ed|s|ing)?\b | \b[Ll]eft\ away\b | \bthe\ blow\b
    | \b[Hh]urts?\b | \bobey\b | \bpassed\ over\b | \b[Kk]nows?\ nothing\ of\b | \bcontrol\ room\b | \blakh\ room\b
    | \blakh\.room\b | \bwho\ types\ on\b
"""


@pytest.mark.slow
def test_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_folders_stay_small() -> None:
    counts = defaultdict(int)
    for path in MODULES:
        counts[path.parent.relative_to(SOURCE)] += path.name != "__init__.py"
    limits = {Path("cli"): 60}  # one file per command, by their names
    assert {str(f): n for f, n in counts.items() if n > limits.get(f, MAX_FILES)} == {}


def _texts() -> list[Path]:
    kinds = ("*.py", "*.cu", "*.md", "*.html", "*.js", "*.proto")
    found = [path for kind in kinds for folder in (SOURCE, ROOT / "docs") for path in folder.rglob(kind)]
    return [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *found]


def test_old_words_are_gone() -> None:
    pattern = re.compile(OLD_WORDS, re.X)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for path in _texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := pattern.search(line))
    ]
    assert found == []


def test_the_glossary_defines_words_that_the_code_uses() -> None:
    page = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| `([^`]+)`", page, re.M)
    assert len(terms) >= 20
    code = "\n".join(path.read_text(encoding="utf-8") for path in MODULES)
    assert [term for term in terms if not re.search(rf"\b{re.escape(term)}", code, re.I)] == []


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflows_call_the_makefile_alone(workflow: Path) -> None:
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    commands = {step["run"] for job in jobs.values() for step in job["steps"] if "run" in step}
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert commands <= {".ci/run"} | {f"make {target}" for target in targets}
