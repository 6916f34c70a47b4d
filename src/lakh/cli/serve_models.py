"""The models and adapters that `lakh serve` is given, and the backend that serves them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lakh.errors import UserError

if TYPE_CHECKING:
    from lakh.server.backends.model_router import EngineBackend, ModelRouter

__all__ = ["EngineFactory", "NamedModel", "load_router", "named_adapters", "named_models"]


@dataclass(frozen=True)
class NamedModel:
    path: str
    name: str | None
    """None for the name that the model itself has: of its run, its folder or its file."""


def named_models(models: Iterable[str], served_name: str | None) -> list[NamedModel]:
    """Each MODEL or NAME=MODEL."""
    found: list[NamedModel] = []
    for model in models:
        name, equals, path = model.partition("=")
        is_named = bool(equals and name) and "/" not in name and not Path(model).exists()
        found.append(NamedModel(path, name) if is_named else NamedModel(model, None))
    if served_name is None:
        return found
    if len(found) > 1:
        raise UserError("--served-name", "is for one model", "write NAME=MODEL for each model")
    return [NamedModel(found[0].path, served_name)]


def named_adapters(adapters: Iterable[str]) -> dict[str, str]:
    """Name -> folder of each NAME=FOLDER."""
    found: dict[str, str] = {}
    for adapter in adapters:
        name, _, folder = adapter.partition("=")
        if not name or not folder or name in found:
            problem = "is given twice" if name in found else "is not of the form NAME=FOLDER"
            raise UserError(f"--adapter {adapter}", problem, "write e.g. --adapter sql=runs/sql/adapter")
        found[name] = folder
    return found


@dataclass(frozen=True)
class EngineFactory:
    """Loads models into engines, all with the same options."""

    load: Mapping[str, Any]
    """Arguments of `load_engine` without a model."""
    max_waiting: int
    engine_in: str
    """process or thread"""

    def make(
        self, model: NamedModel, adapters: Mapping[str, str], on_death: Callable[[], None] | None = None
    ) -> EngineBackend:
        """Calls `on_death` when the engine is lost; by default the server stops."""
        options: dict[str, Any] = {"max_waiting": self.max_waiting, "on_death": on_death or _stop_server}
        load = {**self.load, "path": model.path, "served_name": model.name, "adapters": dict(adapters)}
        if self.engine_in == "thread":
            from lakh.server.backends.engine_process_main import load_engine
            from lakh.server.backends.in_process import InProcessBackend

            return InProcessBackend(load_engine(load), **options)
        from lakh.server.backends.engine_process import EngineProcessBackend

        return EngineProcessBackend(load, **options)


def load_router(factory: EngineFactory, models: Iterable[NamedModel], adapters: Mapping[str, str]) -> ModelRouter:
    """All models behind one router; the adapters belong to the first. Stops the server when every engine is lost."""
    from lakh.server.backends.model_router import ModelRouter

    router = ModelRouter({}, on_death=_stop_server)
    router.make_engine = lambda name, path: factory.make(NamedModel(path, name), {}, router.engine_died)
    for model in models:
        engine = factory.make(model, {} if router.engines else adapters, router.engine_died)
        names = [card.id for card in engine.models()]
        if taken := sorted({card.id for card in router.models()} & set(names)):
            raise UserError(model.path, f"{taken[0]!r} is the name of another model", "write NAME=MODEL for each")
        router.engines[names[0]] = engine
    return router


def _stop_server() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
