"""Many descriptions seen as one whose numbers are numpy arrays.

`stacked([a, b, c])` behaves like a single `Model`, `Cluster` or `ExecutionPlan`: each attribute is the array of the
items' values, and nested records and tuples of records are stacked in turn. The planner's formulas are arithmetic, so
the same function handles one description or, for calibration, the thousand configurations of published measurements.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

__all__ = ["Array", "stacked"]

Array: TypeAlias = Any
"""A float, or a numpy array of floats: formulas of the planner broadcast over both."""

T = TypeVar("T")


def stacked(items: Sequence[T]) -> T:
    """One T whose attributes are arrays over `items`. Methods run on these arrays, so they must be plain arithmetic."""
    return cast(T, _Stacked(items))


class _Stacked:
    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __getattr__(self, name: str) -> Any:
        method = inspect.getattr_static(type(self._items[0]), name, None)
        if inspect.isfunction(method):
            bound: Callable[..., Any] = partial(method, self)
            return bound
        value = _stack([getattr(item, name) for item in self._items])
        self.__dict__[name] = value  # computed once
        return value


def _stack(values: list[Any]) -> Any:
    if isinstance(values[0], tuple):
        return tuple(_Stacked(column) for column in zip(*values, strict=True))
    return _Stacked(values) if is_dataclass(values[0]) else np.array(values, dtype=float)
