"""API dialects: the forms in which different clients request a completion.

A dialect translates a request body into OpenAI's fields and a completion, or a delta of one, into its own form. Each is
one short file of pure functions; docs/how-to/add-an-api-dialect.md shows how to add one.
"""

from __future__ import annotations

from lakh.server.api.dialects.dialect import Dialect, DialectResponse
from lakh.server.api.dialects.llama_cpp import LLAMA_CPP
from lakh.server.api.dialects.mistral import MISTRAL
from lakh.server.api.dialects.ollama import OLLAMA_CHAT, OLLAMA_GENERATE
from lakh.server.api.dialects.openai import OPENAI
from lakh.server.api.dialects.openai_chat import OPENAI_CHAT
from lakh.server.api.dialects.tabby import TABBY

__all__ = ["DIALECTS", "Dialect", "DialectResponse", "dialects_by_path"]

DIALECTS = (TABBY, OPENAI, OPENAI_CHAT, MISTRAL, LLAMA_CPP, OLLAMA_GENERATE, OLLAMA_CHAT)


def dialects_by_path() -> dict[str, list[Dialect]]:
    """Several dialects may share a path: the first one that is meant is used, or the last."""
    by_path: dict[str, list[Dialect]] = {}
    for dialect in DIALECTS:
        by_path.setdefault(dialect.path, []).append(dialect)
    return by_path
