"""What the model is asked: the beginning of a Python module, which it continues with code and tests.

The same text serves a base model, which continues it, and a chat model, which completes the program. Attempt number i
has topic and kind i (both lists in turn) and the seed of the request plus i.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from pathlib import Path

from lakh import storage
from lakh.errors import UserError

__all__ = ["KINDS", "TOPICS", "prompt_of", "prompts_fingerprint", "read_topics"]

_TABLE = tomllib.loads(Path(__file__).with_name("topics.toml").read_text(encoding="utf-8"))
TOPICS: tuple[str, ...] = tuple(_TABLE["topics"])
KINDS: tuple[str, ...] = tuple(_TABLE["kinds"])
TEMPLATE = '''"""Example module: {topic}, as {kind}.

Documented code without input and output, then its tests: at least three functions named test_*, each of which calls the
code with examples and compares the results with assert.
"""

'''


def prompt_of(number: int, topics: Sequence[str]) -> str:
    """The prompt of attempt `number`."""
    topic, kind = topics[number % len(topics)], KINDS[number // len(topics) % len(KINDS)]
    return TEMPLATE.format(topic=topic, kind=kind)


def prompts_fingerprint(topics: Sequence[str]) -> str:
    return hashlib.sha256(repr((TEMPLATE, tuple(topics), KINDS)).encode()).hexdigest()[:16]


def read_topics(url: str) -> tuple[str, ...]:
    """The topics of a file, one a line; # begins a comment."""
    lines = storage.read_bytes(url).decode("utf-8", "replace").splitlines()
    topics = [line.partition("#")[0].strip().replace('"""', "") for line in lines]
    if not any(topics):
        raise UserError(url, "names no topic", "write one a line")
    return tuple(filter(None, topics))
