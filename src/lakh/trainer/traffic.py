"""Counting what a step sends over each tier of the network, as it happens.

While a `Traffic` is entered, every collective of torch.distributed that this rank takes part in is noted: which ranks,
how many bytes. A rank of n sends, by the ring and bandwidth-optimal forms that backends use:

    all-gather, reduce-scatter, broadcast   (n - 1) / n of the whole tensor
    all-reduce                              twice that
    send                                    the tensor

The tier is the innermost one of the cluster that holds the group's ranks; inside a tier a hierarchical backend may send
less over the outer links. Cost: some microseconds per collective, so one step in a while is counted, not each.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lakh.spec import Cluster

__all__ = ["Traffic", "count_traffic", "tier_of_ranks"]

# how often the (n - 1) / n of the larger side travels
_ROUNDS = {"allgather": 1, "reduce_scatter": 1, "allreduce": 2, "broadcast": 1}


def tier_of_ranks(ranks: Iterable[int], cluster: Cluster) -> str:
    """The innermost tier in which all of these ranks lie in one group."""
    ranks = list(ranks)
    for tier in cluster.tiers:
        if len({rank // tier.size for rank in ranks}) == 1:
            return tier.name
    return "beyond the cluster"


def count_traffic(cluster: Cluster, *, due: bool, compiled: bool) -> contextlib.AbstractContextManager[Traffic | None]:
    """A counter for the step to come where one is due; compiled blocks do not run under one, and are not counted."""
    return Traffic(cluster) if due and not compiled else contextlib.nullcontext()


class Traffic(TorchDispatchMode):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.cluster = cluster
        self.sent_bytes: Counter[tuple[str, str]] = Counter()
        """By (tier, kind of collective)."""

    def by_tier(self) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for (tier, _), count in self.sent_bytes.items():
            totals[tier] += count
        return dict(totals)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._note(func._schema.name.removeprefix("c10d::"), args)
        return result

    def _note(self, name: str, args: Any) -> None:
        flat, _ = tree_flatten(args)
        groups = [value for value in flat if isinstance(value, torch.ScriptObject) and _is_group(value)]
        if not groups:
            return
        group = dist.ProcessGroup.unbox(groups[0])
        ranks = dist.get_process_group_ranks(group)
        tensors = [value for value in flat if isinstance(value, Tensor)]
        kind = next((kind for kind in _ROUNDS if name.strip("_").startswith(kind)), None)
        if name.startswith("send"):
            kind, sent = "send", sum(tensor.nbytes for tensor in tensors)
        elif kind is not None:
            whole = max((tensor.nbytes for tensor in tensors), default=0)
            sent = _ROUNDS[kind] * whole * (len(ranks) - 1) // len(ranks)
        else:
            return
        self.sent_bytes[tier_of_ranks(ranks, self.cluster), kind] += sent


def _is_group(value: torch.ScriptObject) -> bool:
    try:
        return "ProcessGroup" in str(value._type())
    except (RuntimeError, AttributeError):
        return False
