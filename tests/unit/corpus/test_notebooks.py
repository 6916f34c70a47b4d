from __future__ import annotations

import ast
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lakh.corpus import FileFilterSettings, Settings, build, read_documents

CELLS = [
    {"cell_type": "markdown", "source": ["# Sums"]},
    {
        "cell_type": "code",
        "source": ["%matplotlib inline\n", "import numpy as np\n"],
        "outputs": [{"data": "x" * 9000}],
    },
    {"cell_type": "code", "source": "def add(a, b):\n    !ls\n    return a + b"},
    {"cell_type": "code", "source": "%%bash\nls -l\n"},
]


def notebook(language: str = "python", cells: list[dict[str, Any]] = CELLS) -> str:
    return json.dumps({"cells": cells, "metadata": {"language_info": {"name": language}}, "nbformat": 4})


def texts(out: Path) -> dict[str, tuple[str, str]]:
    rows = [row for batch in read_documents(str(out)) for row in batch.to_pylist()]
    return {row["path"]: (row["language"], row["text"]) for row in rows}


def test_code_cells_of_a_notebook_are_a_document(tree: Callable[..., Path], tmp_path: Path) -> None:
    r_cells = [{"cell_type": "code", "source": "values <- c(1, 2)\nprint(sum(values))\n"}]
    old = {"worksheets": [{"cells": [{"cell_type": "code", "input": "total = sum(range(10))\nprint(total)"}]}]}
    root = tree(
        "proj",
        {
            "a.ipynb": notebook(),
            "b.ipynb": notebook("R", r_cells),
            "old.ipynb": json.dumps(old),
            "text.ipynb": notebook(cells=CELLS[:1]),
            "broken.ipynb": "{",
            "list.ipynb": "[1]",
        },
    )
    # far beyond the limit for other files, because of its outputs
    report = build(
        [f"own:{root}"], tmp_path / "out", Settings(filters=FileFilterSettings(max_file_bytes=1000)), workers=1
    )
    found = texts(tmp_path / "out")
    assert report.dropped == {"bad-record": 2, "empty": 1}
    assert found["b.ipynb"] == ("r", "values <- c(1, 2)\nprint(sum(values))\n")
    assert found["old.ipynb"][0] == "python"
    language, text = found["a.ipynb"]
    assert language == "python"
    assert text.startswith("# %matplotlib inline\nimport numpy as np\n\ndef add(a, b):\n    # !ls\n    return a + b\n")
    assert "# ls -l" in text
    ast.parse(text)


def test_notebooks_in_archives_are_read_whole(tmp_path: Path) -> None:
    content = notebook().encode()
    with tarfile.open(tmp_path / "pkg.tar.gz", "w:gz") as tar:
        entry = tarfile.TarInfo("pkg/a.ipynb")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    settings = Settings(filters=FileFilterSettings(max_file_bytes=1000))
    build([f"own:{tmp_path / 'pkg.tar.gz'}"], tmp_path / "out", settings, workers=1)
    assert [language for language, _ in texts(tmp_path / "out").values()] == ["python"]
