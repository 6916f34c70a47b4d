"""What stands behind a face: something that answers completion requests, piece by piece.

    answers/local.py, process.py   an engine in this process, or in one of its own
    gateway/                       several engines elsewhere
    answers/textcache.py           answers that are known already, in front of either

A backend yields the pieces of all choices as they become certain, and a `Usage` at the end. It raises RequestError for
whatever a client is to be told. Faces (faces/) know this file and nothing of engines.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from lakh.server.request import CompletionRequest

__all__ = ["Backend", "MetricFamily", "ModelCard", "CompletionDelta", "Usage"]


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """Some text of one choice; the texts of all its pieces are its text."""

    index: int
    text: str
    finish_reason: str | None = None
    """stop, length or abort, on a choice's last piece."""
    tokens: tuple[int, ...] = ()
    """Where they are known."""
    logprobs: dict[str, Any] | None = None
    """In OpenAI's form, where they were asked for."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Of the prompt: found, and not computed."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    id: str
    context: int | None
    weights: str
    """Changes whenever answers may change: part of every key under which an answer is kept."""


class MetricFamily(NamedTuple):
    """A metric: its samples are (suffix with labels, value)."""

    name: str
    kind: str
    words: str
    samples: Sequence[tuple[str, float]]


class Backend(Protocol):
    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    def models(self) -> list[ModelCard]:
        """What is served now; nothing while nothing can be served."""
        ...

    def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionDelta | Usage, None]:
        """Closing it, or cancelling whoever reads it, ends the work at once."""
        ...

    def metric_families(self) -> list[MetricFamily]:
        """For the page of metrics."""
        ...

    async def start(self) -> None: ...

    async def drain(self, deadline_s: float) -> None:
        """Let what is at work come to its end, at most so long; the rest ends with what it has."""
        ...

    async def close(self) -> None: ...
