"""RUN/tags.json: names that people gave a run, to find it again: {"tags": ["baseline", "lr-sweep"]}.

`lakh tag` writes the file; the dashboard reads it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from lakh import storage
from lakh.errors import LakhError

__all__ = ["MAX_TAGS", "TAGS_FILE", "is_tag", "read_tags"]

TAGS_FILE = "tags.json"
MAX_TAGS = 32
MAX_BYTES = 1 << 16
PATTERN = re.compile(r"[\w][\w.:=/+-]{0,39}")


def is_tag(text: object) -> bool:
    """At most 40 letters, digits and . : = / + - _, without spaces."""
    return isinstance(text, str) and PATTERN.fullmatch(text) is not None


def read_tags(run_dir: Path) -> list[str]:
    """The tags of a run, sorted; what is no tag is left out."""
    path = run_dir / TAGS_FILE
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_BYTES:
            return []
        found = json.loads(storage.read_bytes(path))
    except (OSError, ValueError, LakhError, RecursionError):
        return []
    tags = found.get("tags") if isinstance(found, dict) else None
    return sorted({tag for tag in tags if is_tag(tag)})[:MAX_TAGS] if isinstance(tags, list) else []
