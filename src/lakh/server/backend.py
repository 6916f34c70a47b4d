"""The Backend protocol: what the API needs from whatever completes requests.

backends/in_process.py, engine_process.py   an engine in this process, or in a child process
gateway/                                    several engines elsewhere
backends/completion_cache.py                cached completions in front of any of them
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from lakh.server.metrics import MetricFamily
from lakh.server.request import CompletionRequest
from lakh.server.tools.tool_call import ToolCallDelta

__all__ = [
    "Backend",
    "BackendHealth",
    "CompletionDelta",
    "ModelCard",
    "ModelDetails",
    "PhaseTimes",
    "Usage",
    "wait_until",
]

POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """New text of one choice; the texts of its deltas concatenate to its text."""

    index: int
    text: str
    finish_reason: str | None = None
    """stop, tool_calls, length or abort, on a choice's last delta."""
    tokens: tuple[int, ...] = ()
    """Empty where they are not known."""
    logprobs: dict[str, Any] | None = None
    """In OpenAI's form, if requested."""
    num_accepted: int = 0
    """Accepted draft tokens of this text; 0 where they are not known."""
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    """Of the choice's prompt in vLLM's form, on its first delta, if requested."""
    prompt_tokens: tuple[int, ...] | None = None
    """The ids of the choice's prompt, on its first delta, if requested."""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    """New calls, whole or in parts, in the order of the answer."""
    stop_reason: str | int | None = None
    """Beside `finish_reason`: the stop string or stop id that ended the choice; None if the model or a limit did."""
    reasoning: str = ""
    """New text before the answer, of a model whose answers have channels."""


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Time of a request in the engine, with the phases of metrics.PhaseLatencies."""

    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    is_cached: bool = False
    """The whole completion was found in the completion cache: nothing was generated."""
    draft_tokens: int = 0
    """Draft tokens that were verified, and those of them that were accepted."""
    accepted_tokens: int = 0
    phases: PhaseTimes | None = field(default=None, compare=False)
    """None where they are not known."""
    weights: str | None = field(default=None, compare=False)
    """ModelCard.weights that computed every token; "" if a swap came between, None where it is not known."""


@dataclass(frozen=True, slots=True)
class ModelDetails:
    architecture: str
    """One of spec.model.FAMILIES."""
    parameters: int
    precision: str
    """In which it is served."""
    file_format: str
    """gguf or safetensors."""
    file_bytes: int
    """0 where they are not known, as of a run that is still training."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    id: str
    context: int | None
    weights: str
    """Identifies the weights: part of every key under which a completion is cached."""
    base: str | None = None
    """Of an adapter: the model that it changes."""
    has_fim: bool = True
    """False if it cannot complete between a prefix and a suffix."""
    has_tools: bool = False
    """It can call tools in a chat."""
    details: ModelDetails | None = None
    """None where they are not known, as in a gateway."""


@dataclass(frozen=True, slots=True)
class BackendHealth:
    problem: str | None = None
    """Why nothing can be served now; None if requests are accepted."""
    is_alive: bool = True
    """False if only a restart of the server helps."""


class Backend(Protocol):
    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    def models(self) -> list[ModelCard]:
        """The models served now; empty while nothing can be served."""
        ...

    def health(self) -> BackendHealth: ...

    def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionDelta | Usage, None]:
        """Deltas of all choices as they become final, then a Usage. Raises RequestError for what the client must see.

        Closing the generator, or cancelling its reader, stops the work at once.
        """
        ...

    def metric_families(self) -> list[MetricFamily]: ...

    async def start(self) -> None: ...

    async def drain(self, timeout_s: float) -> None:
        """Let running requests finish for at most `timeout_s`; the rest end with the text they have."""
        ...

    async def close(self) -> None: ...


async def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether the condition became true within `timeout_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(POLL_S)
    return condition()
