"""Goodput over time: the share of every class in equal parts of a run's clock."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lakh.goodput import CLASSES, GoodputAccount

__all__ = ["goodput_timeline"]


def goodput_timeline(account: GoodputAccount, parts: int) -> tuple[list[float], dict[str, list[float]]]:
    """The edges of the parts, and for each class its share of every part; the shares of a part sum to one."""
    if account.first_s is None or account.last_s is None or account.last_s <= account.first_s:
        return [], {}
    edges = np.linspace(account.first_s, account.last_s, parts + 1)
    width_s = (account.last_s - account.first_s) / parts
    ends, step_s, wait_s = (np.array(column) for column in (account.step_ends, account.step_s, account.wait_s))
    kept = np.array(account.kept, dtype=bool)
    starts = ends - step_s
    spans = {name: np.array(found, dtype=float).reshape(-1, 2) for name, found in account.spans.items()}
    spans["productive"] = np.stack([starts + wait_s, ends], axis=1)[kept]
    spans["data_wait"] = np.stack([starts, starts + wait_s], axis=1)[kept]
    spans["lost"] = np.stack([starts, ends], axis=1)[~kept]
    shares = {name: np.diff(_seconds_before(edges, found)) / width_s for name, found in spans.items()}
    known = sum(shares.values())
    shares["other"] = np.maximum(0.0, 1.0 - known)
    scale = np.maximum(1.0, known)  # spans may overlap a little
    return edges.tolist(), {name: (shares[name] / scale).tolist() for name in CLASSES}


def _seconds_before(edges: NDArray[np.float64], spans: NDArray[np.float64]) -> NDArray[np.float64]:
    """The length of the spans that lies before each edge."""
    if not len(spans):
        return np.zeros(len(edges))
    knots = np.concatenate([spans[:, 0], spans[:, 1]])
    slopes = np.concatenate([np.ones(len(spans)), -np.ones(len(spans))])
    order = np.argsort(knots, kind="stable")
    knots, open_spans = knots[order], np.cumsum(slopes[order])
    before = np.concatenate([[0.0], np.cumsum(np.diff(knots) * open_spans[:-1])])
    return np.interp(edges, knots, before)
