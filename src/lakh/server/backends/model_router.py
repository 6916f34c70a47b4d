"""Several models as one backend: each has an engine of its own, and a request's `model` selects it.

Models and adapters can be loaded and unloaded while the server runs. A model that is restarting or lost does not stop
the others: only its own requests get a 503. Engine metrics carry the label `model_name`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Protocol

from lakh.errors import UserError
from lakh.server.backend import Backend, BackendHealth, CompletionDelta, ModelCard, Usage
from lakh.server.metrics import MetricFamily, with_label
from lakh.server.request import CompletionRequest, RequestError

__all__ = ["EngineBackend", "ModelRouter"]

UNLOAD_S = 30.0  # for the running requests of a model that is unloaded


class EngineBackend(Backend, Protocol):
    """A backend with one engine."""

    description: str

    @property
    def died(self) -> str | None: ...

    async def load_adapter(self, name: str, folder: str) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...


class ModelRouter:
    def __init__(
        self,
        engines: dict[str, EngineBackend],
        *,
        make_engine: Callable[[str, str], EngineBackend] | None = None,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        """`engines` by model name, the default model first; `make_engine` loads another from a name and a path. Calls
        `on_death` when the last engine is lost: pass `engine_died` to each engine.
        """
        self.engines, self.make_engine, self._on_death = engines, make_engine, on_death
        self._cards: dict[str, list[ModelCard]] = {}
        self._changing = asyncio.Lock()

    @property
    def description(self) -> str:
        return ", ".join(engine.description for engine in self.engines.values())

    @property
    def died(self) -> str | None:
        """How the engines ended, once all of them have."""
        deaths = [engine.died for engine in self.engines.values()]
        return "; ".join(one for one in deaths if one) if all(deaths) else None

    def engine_died(self) -> None:
        if self.died is not None:
            self._on_death()

    @property
    def num_running(self) -> int:
        return sum(engine.num_running for engine in self.engines.values())

    @property
    def num_waiting(self) -> int:
        return sum(engine.num_waiting for engine in self.engines.values())

    def models(self) -> list[ModelCard]:
        """Also those whose engine is restarting: their requests get a 503, not a 404."""
        for name, engine in self.engines.items():
            self._cards[name] = engine.models() or self._cards.get(name, [ModelCard(name, None, "")])
        return [card for name in self.engines for card in self._cards[name]]

    def health(self) -> BackendHealth:
        found = {name: engine.health() for name, engine in self.engines.items()}
        if any(health.problem is None for health in found.values()):
            return BackendHealth()
        problems = "; ".join(f"{name}: {health.problem}" for name, health in found.items())
        return BackendHealth(problems, is_alive=any(health.is_alive for health in found.values()))

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionDelta | Usage, None]:
        engine = self._engine_of(request.model)
        problem = engine.health().problem
        if problem is not None:
            raise RequestError("model", f"{problem}; try again later", status=503, code="no_engine")
        async with contextlib.aclosing(engine.complete(request)) as items:
            async for item in items:
                yield item

    def _engine_of(self, model: str | None) -> EngineBackend:
        if model is None:
            return next(iter(self.engines.values()))
        if model in self.engines:
            return self.engines[model]
        for name, engine in self.engines.items():
            if any(card.id == model for card in engine.models() or self._cards.get(name, [])):
                return engine
        raise RequestError("model", f"model {model[:80]!r} is not served here", status=404, code="model_not_found")

    def metric_families(self) -> list[MetricFamily]:
        return with_label("model_name", {name: engine.metric_families() for name, engine in self.engines.items()})

    # --- for operators ---

    async def load_model(self, name: str, path: str) -> None:
        """Load a model beside the others; returns when it serves."""
        async with self._changing:
            self._require_new(name)
            if self.make_engine is None:
                raise UserError(f"model {name}", "cannot be loaded into this server", "start it with this model")
            engine = await asyncio.to_thread(self.make_engine, name, path)
            await engine.start()
            self.engines[name] = engine

    async def unload_model(self, name: str) -> None:
        """No further request reaches the model; running ones get UNLOAD_S."""
        async with self._changing:
            if name not in self.engines:
                raise UserError(f"model {name}", "is not loaded", f"choose from: {', '.join(self.engines)}")
            if len(self.engines) == 1:
                raise UserError(f"model {name}", "is the only one", "load another one first, or stop the server")
            engine = self.engines.pop(name)
            self._cards.pop(name, None)
            await engine.drain(UNLOAD_S)
            await engine.close()

    async def load_adapter(self, name: str, folder: str, model: str | None = None) -> None:
        async with self._changing:
            self._require_new(name)
            await self._engine_of(model).load_adapter(name, folder)

    async def unload_adapter(self, name: str) -> None:
        async with self._changing:
            if name in self.engines:
                raise UserError(f"adapter {name}", "is a model", "unload it at /v1/models/unload")
            await self._engine_of(name).unload_adapter(name)

    def _require_new(self, name: str) -> None:
        if name in {card.id for card in self.models()}:
            raise UserError(f"model {name}", "is loaded already", "unload it first, or choose another name")

    # --- lifecycle ---

    async def start(self) -> None:
        await asyncio.gather(*[engine.start() for engine in self.engines.values()])

    async def drain(self, timeout_s: float) -> None:
        await _all(engine.drain(timeout_s) for engine in self.engines.values())

    async def close(self) -> None:
        await _all(engine.close() for engine in self.engines.values())


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    await asyncio.gather(*calls)
