"""Move the columns of parts into the columns of samples and back: loops of numba on a CPU, torch on other devices.

`moves` are those of layout.RankParts, so a part of a move is (own column, column of the sample, columns, is added).
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from lakh.workloads.dlrm.sharding import kernels

__all__ = ["add_columns", "take_columns"]


def add_columns(values_BC: Tensor, moves: np.ndarray, out_BC: Tensor) -> None:
    """Put, or add, the columns of parts into the columns of the samples."""
    if out_BC.device.type == "cpu":
        kernels.add_columns(values_BC.numpy(), moves, out_BC.numpy())
    else:
        add_on_device(values_BC, moves, out_BC)


def take_columns(values_BC: Tensor, moves: np.ndarray) -> Tensor:
    """The columns of parts, from the columns of the samples."""
    out = values_BC.new_empty(len(values_BC), int(moves[:, 2].sum()))
    if values_BC.device.type == "cpu":
        kernels.take_columns(values_BC.numpy(), moves, out.numpy())
    else:
        take_on_device(values_BC, moves, out)
    return out


def add_on_device(values_BC: Tensor, moves: np.ndarray, out_BC: Tensor) -> None:
    for own, target, width, is_added in moves.tolist():
        source, into = values_BC[:, own : own + width], out_BC[:, target : target + width]
        if is_added:
            into += source
        else:
            into.copy_(source)


def take_on_device(values_BC: Tensor, moves: np.ndarray, out_BC: Tensor) -> None:
    for own, target, width, _ in moves.tolist():
        out_BC[:, own : own + width] = values_BC[:, target : target + width]
