from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.corpus.parsing.import_order import SourceFile, order_files

REPOSITORIES = {
    "python": {
        "pkg/__init__.py": "",
        "pkg/app.py": "from . import util\nfrom .core import (\n  run,  # x\n  stop,\n)\nimport pkg.deep.leaf as leaf\n",  # noqa: E501
        "pkg/core.py": "import os\nfrom pkg.util import helper\n",
        "pkg/deep/leaf.py": "import json\n",
        "pkg/util.py": "from .deep import leaf\n",
    },
    "javascript": {
        "src/app.js": "import React from 'react'\nimport { a } from './lib/a'\nconst b = require('../src/b.js')\n",
        "src/b.js": "export * from './lib'\n",
        "src/lib/a.ts": "import type { T } from './types.js'\n",
        "src/lib/index.ts": "export { a } from './a'\n",
        "src/lib/types.ts": "export type T = 1\n",
    },
    "java": {
        "src/main/java/a/App.java": "package a;\nimport a.b.Core;\nimport static a.b.Util.help;\n",
        "src/main/java/a/b/Core.java": "package a.b;\nimport a.b.Util;\nimport java.util.List;\n",
        "src/main/java/a/b/Util.java": "package a.b;\n",
    },
    "go": {
        "cmd/main.go": 'package main\nimport (\n\t"fmt"\n\tc "acme.io/x/core"\n)\n',
        "core/core.go": 'package core\nimport "acme.io/x/util"\n',
        "util/util.go": "package util\n",
    },
    "rust": {
        "src/lib.rs": "pub mod core;\nmod util;\n",
        "src/core/mod.rs": "mod inner;\nuse crate::util::help;\n",
        "src/core/inner.rs": "use super::super::util;\n",
        "src/util.rs": "use std::fmt;\n",
    },
    "cpp": {
        "src/app.cpp": '#include "core.h"\n#include <vector>\n#include <acme/util.h>\n',
        "src/core.cpp": '#include "core.h"\n',
        "src/core.h": "#include <acme/util.h>\n",
        "include/acme/util.h": "#pragma once\n",
    },
}
BEFORE = {
    "python": ["pkg/deep/leaf.py pkg/util.py", "pkg/util.py pkg/core.py", "pkg/core.py pkg/app.py"],
    "javascript": ["src/lib/types.ts src/lib/a.ts", "src/lib/a.ts src/lib/index.ts", "src/lib/index.ts src/b.js", "src/b.js src/app.js"],  # noqa: E501
    "java": ["b/Util.java b/Core.java", "b/Core.java a/App.java"],
    "go": ["util/util.go core/core.go", "core/core.go cmd/main.go"],
    "rust": ["src/util.rs src/core/inner.rs", "src/core/inner.rs src/core/mod.rs", "src/core/mod.rs src/lib.rs"],
    "cpp": ["acme/util.h src/core.h", "src/core.h src/app.cpp", "src/core.h src/core.cpp"],
}  # fmt: skip


@pytest.mark.parametrize("language", sorted(REPOSITORIES))
def test_dependencies_come_first_in_any_order_of_arrival(language: str) -> None:
    files = [SourceFile(path, language, text) for path, text in REPOSITORIES[language].items()]
    orders = set()
    for seed in range(5):
        shuffled = random.Random(seed).sample(files, len(files))
        orders.add(tuple(shuffled[position].path for position in order_files(shuffled)))
    assert len(orders) == 1
    paths = list(orders.pop())
    assert sorted(paths) == sorted(REPOSITORIES[language])
    for pair in BEFORE[language]:
        first, second = (next(i for i, path in enumerate(paths) if path.endswith(tail)) for tail in pair.split())
        assert first < second, (pair, paths)


def test_cycles_are_broken_and_nothing_is_lost() -> None:
    files = [
        SourceFile("a.py", "python", "import b\n"),
        SourceFile("b.py", "python", "import c\nimport d\n"),
        SourceFile("c.py", "python", "import a\n"),
        SourceFile("d.py", "python", "import d\n"),
    ]
    order = order_files(files)
    assert sorted(order) == [0, 1, 2, 3]
    assert [files[i].path for i in order] == ["d.py", "a.py", "c.py", "b.py"]


def test_languages_without_imports_keep_the_order_of_their_paths() -> None:
    files = [SourceFile(path, "lua", "require 'a'") for path in ("c.lua", "a.lua", "b.lua")]
    assert [files[i].path for i in order_files(files)] == ["a.lua", "b.lua", "c.lua"]


@given(st.lists(st.tuples(st.sampled_from(["a", "b/c", "../d", "", "/e"]), st.text(max_size=60)), max_size=6))
def test_any_texts_and_paths_have_an_order(rows: list[tuple[str, str]]) -> None:
    for language in ("python", "javascript", "java", "go", "rust", "cpp"):
        files = [SourceFile(f"{path}{i}.py", language, text) for i, (path, text) in enumerate(rows)]
        assert sorted(order_files(files)) == list(range(len(files)))


def test_large_repository_is_ordered_in_time() -> None:
    files = [SourceFile(f"p/m{i}.py", "python", f"from p import m{i - 1}\n" if i else "") for i in range(3000)]
    assert order_files(files) == list(range(3000))
