"""Area under the ROC curve: how often a click scores higher than a sample without one."""

from __future__ import annotations

import torch
from torch import Tensor

from lakh.errors import UserError

__all__ = ["area_under_curve"]


def area_under_curve(scores_N: Tensor, labels_N: Tensor) -> float:
    """Exact; equal scores count one half."""
    clicks = int(labels_N.sum())
    others = len(labels_N) - clicks
    if not clicks or not others:
        raise UserError("AUC", f"of {clicks} clicks and {others} other samples", "evaluate on samples of both kinds")
    _, group_N, sizes = torch.unique(scores_N.double(), return_inverse=True, return_counts=True)
    ends = sizes.cumsum(0).double()
    ranks_N = (ends - (sizes - 1) / 2)[group_N]  # the mean rank, from 1, of the samples with this score
    return float((ranks_N[labels_N > 0].sum() - clicks * (clicks + 1) / 2) / (clicks * others))
