"""Retrieval of context: outlines, imports, and the choice of snippets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lakh.server.prompts.extra_files import ExtraFile
from lakh.server.retrieval.definitions import definitions_of
from lakh.server.retrieval.identifiers import identifiers, overlap, rarity
from lakh.server.retrieval.imports import Import, imports_of
from lakh.server.retrieval.repository import MAX_FILE_BYTES, Repository, root_of
from lakh.server.retrieval.snippets import outline_files, related_snippets

SHAPES = '''"""Shapes.

class NotThis: a docstring is no code.
"""

import math

UNIT = 1.0


@dataclass
class Circle(Shape):
    """Round."""

    radius: float
    name: str = "circle"

    def __init__(
        self,
        radius: float,
    ) -> None:
        self.radius = radius

    @property
    def area(self) -> float:
        hidden = math.pi
        return hidden * self.radius**2

    def _private(self) -> None: ...


def scaled(shape: Circle, factor: float = 2.0) -> Circle:
    result = Circle(shape.radius * factor)
    return result
'''


def test_outlines_have_signatures_and_fields_but_no_bodies() -> None:
    found = {one.name: one.outline for one in definitions_of(SHAPES)}
    assert list(found) == ["UNIT", "Circle", "scaled"]
    assert found["scaled"] == "def scaled(shape: Circle, factor: float = 2.0) -> Circle: ..."
    for part in (
        "@dataclass",
        "class Circle(Shape):",
        "radius: float",
        "        radius: float,\n    ) -> None: ...",
        "@property",
    ):
        assert part in found["Circle"]
    for part in ("hidden", "_private", "Round", "self.radius = radius"):
        assert part not in found["Circle"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "export interface User {\n  name: string;\n  age?: number;\n}\n"
            "export async function load(id: string): Promise<User> {\n  const secret = 1;\n}\n",
            {"User": ["name: string;", "age?: number;"], "load": ["load(id: string): Promise<User>;"]},
        ),
        ("func (s *Server) Serve(port int) error {\n\treturn nil\n}\n", {"Serve": ["Serve(port int) error;"]}),
        ("pub struct Point {\n    x: f32,\n    y: f32,\n}\n", {"Point": ["x: f32,"]}),
        ("static int add(int a, int b) {\n  return a + b;\n}\n", {"add": ["static int add(int a, int b);"]}),
        ("class Stack {\n  push(item) {\n    this.items.push(item);\n  }\n}\n", {"Stack": ["push(item);"]}),
    ],
)
def test_outlines_of_other_languages(text: str, expected: dict[str, list[str]]) -> None:
    found = {one.name: one.outline for one in definitions_of(text)}
    assert list(found) == list(expected)
    for name, parts in expected.items():
        for part in parts:
            assert part in found[name]
    assert "secret" not in str(found)
    assert "return" not in str(found)


@pytest.mark.parametrize(
    "text", ["", "def", "class A", "def f(", "'''", '"""\nclass A:\n', "def f(\n" * 100, "\x00(((" * 50]
)
def test_text_that_does_not_parse_has_outlines_or_none(text: str) -> None:
    assert all(len(one.outline) <= len(text) + 4 for one in definitions_of(text))


def test_imports_are_read_in_three_languages() -> None:
    text = (
        "import os, a.b as c\nfrom .shapes import (  # round\n    Circle as Round,\n    scaled,\n)\nfrom . import x\n"
    )
    found = imports_of(text, ".py")
    assert Import(".shapes", "Circle", "Round") in found
    assert Import(".shapes", "scaled", "scaled") in found
    assert Import(".", "x", "x") in found
    assert Import("a.b", "", "c") in found
    script = 'import React, { useState as state } from "./react";\nconst { a, b: c } = require("./d");\n'
    script += 'import fs from "fs";\n'
    assert imports_of(script, ".ts") == [
        Import("./react", "", "React"),
        Import("./react", "useState", "state"),
        Import("./d", "a", "a"),
        Import("./d", "b", "c"),
    ]
    assert imports_of('#include "math/vec.h"\n#include <stdio.h>\n', ".cpp") == [Import("math/vec.h", "", "")]
    assert imports_of("import x", ".txt") == []


def test_rare_shared_names_weigh_more() -> None:
    weights = rarity([{"common", "rare"}, {"common"}, {"common"}])
    query = identifiers("common rare missing")
    assert overlap(query, {"rare"}, weights) > overlap(query, {"common"}, weights) > 0
    assert overlap(query, {"rare", "common"}, weights) == pytest.approx(1.0)
    assert identifiers("def getUserName(self): return x1") == {"getUserName", "get", "user", "name"}


def make_package(root: Path) -> Path:
    for name, text in {
        "pyproject.toml": "",
        "src/geo/__init__.py": "from .shapes import Circle\n",
        "src/geo/shapes.py": SHAPES,
        "src/geo/colours.py": "class Colour:\n    red: int\n\n\ndef unrelated_thing(whatever): ...\n",
        "src/geo/tools/draw.py": "def draw_line(canvas, start, end):\n    pass\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root / "src" / "geo" / "main.py"


def test_imported_names_are_found_through_reexports_modules_and_relative_imports(tmp_path: Path) -> None:
    main = make_package(tmp_path)
    assert root_of(main) == tmp_path
    repository = Repository(tmp_path)

    def found(module: str, name: str) -> list[tuple[str, str]]:
        return [(path.name, one.name) for path, one in repository.find(Import(module, name, name), main)]

    assert found("geo", "Circle") == found(".", "Circle") == found(".shapes", "Circle") == [("shapes.py", "Circle")]
    assert found("geo.tools", "draw") == found("geo.tools.draw", "") == [("draw.py", "draw_line")]
    assert found("numpy", "array") == found("....", "secrets") == found(".shapes", "missing") == []


def test_what_is_imported_comes_last_and_the_line_being_typed_changes_nothing(tmp_path: Path) -> None:
    main = make_package(tmp_path)
    repository = Repository(tmp_path)
    above = "from geo.shapes import scaled, Circle\nfrom geo.colours import Colour\n\n\ndef grow(circle: Circle):\n"
    snippets = related_snippets(repository, main, above + "    return ")
    assert [file.name for file in snippets] == ["src/geo/colours.py", "src/geo/shapes.py"]
    assert "def scaled(" in snippets[-1].text
    assert "unrelated_thing" not in snippets[0].text
    assert related_snippets(repository, main, above + "    return sca") == snippets
    small = related_snippets(repository, main, above + "    return ", max_chars=80)
    assert sum(len(file.text) for file in small) <= 80
    assert small


def test_open_and_recent_files_count_as_they_are_in_the_editor(tmp_path: Path) -> None:
    main = make_package(tmp_path)
    repository = Repository(tmp_path)
    edited = tmp_path / "src" / "geo" / "tools" / "draw.py"
    repository.open_texts = {edited: "def draw_circle(canvas, circle): ...\n"}
    snippets = related_snippets(repository, main, "canvas = make_canvas()\ncircle = 1\n", recent=[edited])
    assert snippets[-1] == ExtraFile("src/geo/tools/draw.py", "def draw_circle(canvas, circle): ...\n")


def test_nothing_outside_the_repository_is_read(tmp_path: Path) -> None:
    root, outside = tmp_path / "repository", tmp_path / "repository-secrets"
    root.mkdir()
    outside.mkdir()
    (outside / "keys.py").write_text("PASSWORD = 1\n")
    os.symlink(outside / "keys.py", root / "linked.py")
    (root / "large.py").write_text("LARGE = 1\n" + "#" * MAX_FILE_BYTES)
    (root / "bytes.py").write_bytes(b"BYTES = '\xff'\n")
    repository = Repository(root)
    text = "from ..repository-secrets.keys import PASSWORD\nfrom linked import PASSWORD\nfrom large import LARGE\n"
    assert (
        related_snippets(repository, root / "main.py", text + "from bytes import BYTES\nPASSWORD LARGE BYTES\n") == []
    )


def test_a_file_that_a_client_sends_whole_is_cut_to_related_outlines() -> None:
    sent = [ExtraFile("shapes.py", SHAPES + "def other(): ...\n" * 50)]
    (cut,) = outline_files(sent, "circle = scaled(\n", 200)
    assert cut.name == "shapes.py"
    assert "def scaled(" in cut.text
    assert len(cut.text) <= 200
    assert outline_files([ExtraFile("notes.txt", "plain words\n" * 9)], "x", 200) == []


def test_paths_become_comments_of_their_language() -> None:
    assert ExtraFile("a/b.py", "").name_comment == "# a/b.py"
    assert ExtraFile("a.ts", "").name_comment == "// a.ts"
    assert ExtraFile("a.sql", "").name_comment == "-- a.sql"
