"""Evaluation hooks: the user's functions that run after each evaluation (train.hooks).

A hook is called on every rank with (run, step, model), because the model may be sharded; the numbers that it returns
become an event. An exception in a hook becomes a UserError that names the hook and its line.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real

from torch import nn

from lakh.errors import LakhError, UserError
from lakh.spec import Run
from lakh.trainer.launch.world import World

__all__ = ["Hook", "load_hook"]


@dataclass(frozen=True)
class Hook:
    name: str
    function: Callable[[Run, int, nn.Module], Mapping[str, float]]

    def measure(self, run: Run, step: int, model: nn.Module, world: World) -> dict[str, float]:
        """Call the function and check its result."""
        try:
            with world.peer_errors(f"hook {self.name}", run.train.peer_timeout_s):
                values = self.function(run, step, model)
        except LakhError:
            raise
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            found = f"{type(error).__name__}: {error} ({line.filename}, line {line.lineno})"
            raise UserError(f"train.hooks: {self.name}", found, "fix the hook") from error
        if not isinstance(values, Mapping) or not all(isinstance(value, Real) for value in values.values()):
            found = f"returned {values!r:.80}"
            raise UserError(f"train.hooks: {self.name}", found, "return numbers by name, {} for none")
        return {str(key): float(value) for key, value in values.items()}


def load_hook(name: str) -> Hook:
    """The function "package.module:name"."""
    module, _, function = name.partition(":")
    try:
        return Hook(name, getattr(importlib.import_module(module), function))
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"train.hooks: {name}", f"cannot be loaded ({error})", "check its name and PYTHONPATH"
        ) from None
