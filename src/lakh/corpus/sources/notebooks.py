"""Jupyter notebooks as scripts: the code cells in their order, without outputs and text.

The commands of IPython (`%matplotlib`, `!pip`) become comments, so that the script parses. A cell magic such as
`%%bash` makes the whole cell a comment: it is in another language.
"""

from __future__ import annotations

import json
import re
from typing import Any

from lakh.corpus.parsing.languages import LANGUAGES
from lakh.corpus.sources.listing import RawDocument

__all__ = ["is_notebook", "size_limit", "to_script"]

NOTEBOOK_FACTOR = 16
"""A notebook may be this many times as large as other files: most of it is outputs, which are left out."""
COMMAND = re.compile(r"^(\s*)([%!].*)$", re.MULTILINE)
KERNELS = {"ir": "r", "r": "r", "ipython": "python", "python3": "python", "c++": "cpp"}


def is_notebook(path: str) -> bool:
    return path.lower().endswith(".ipynb")


def size_limit(path: str, max_file_bytes: int) -> int:
    return max_file_bytes * (NOTEBOOK_FACTOR if is_notebook(path) else 1)


def to_script(raw: RawDocument) -> None:
    """Replace the content of a notebook by its code and set its language; a reason if it is none."""
    try:
        notebook = json.loads(raw.content or b"")
        cells = notebook.get("cells")
        if cells is None:  # format 3
            cells = [cell for sheet in notebook["worksheets"] for cell in sheet["cells"]]
        raw.language = _language(notebook.get("metadata", {}))
        mark = "#" if raw.language in ("python", "r", "julia") else "//"
        code = [_code(cell, mark) for cell in cells if cell.get("cell_type") == "code"]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raw.content, raw.reason, raw.detail = None, "bad-record", f"not a notebook: {error}"[:200]
        return
    raw.content = "\n\n".join(filter(None, code)).encode("utf-8", "replace")
    raw.content += b"\n" if raw.content else b""
    raw.size_bytes = len(raw.content)


def _language(metadata: Any) -> str:
    stated = metadata.get("language_info", {}).get("name") or metadata.get("kernelspec", {}).get("language") or "python"
    name = str(stated).lower()
    found = KERNELS.get(name, name)
    return found if found in LANGUAGES else "python"


def _code(cell: Any, mark: str) -> str:
    source = cell.get("source", cell.get("input", ""))
    text = ("".join(source) if isinstance(source, list) else str(source)).rstrip()
    if text.lstrip().startswith("%%"):
        return "\n".join(f"{mark} {line}".rstrip() for line in text.splitlines())
    return COMMAND.sub(rf"\1{mark} \2", text)
