"""Count the bytes that a step sends over each tier of the network.

Inside a `TrafficCounter`, every collective of torch.distributed on this rank is counted. With the bandwidth-optimal
algorithms of the backends, one of n ranks sends:

    all-gather, reduce-scatter, broadcast, all-to-all   (n - 1) / n of the whole tensor; of an all-to-all with sizes,
                                                        what is not its own
    all-reduce                                          twice that
    send                                                the tensor

Data that c3 encodes counts in its encoded form, with its scales. The tier is the innermost tier of the cluster that
holds all ranks of the group; a hierarchical backend may send less over the outer links.

The counter wraps the methods of the process groups. Compiled blocks are unaffected: FSDP's collectives run between
them, and collectives inside a block are custom operators (workloads/code/collectives.py). Cost: some microseconds per
collective, so only single steps are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_flatten

from lakh.spec import Cluster

__all__ = ["TrafficCounter", "collective_methods", "tier_of_ranks"]

# multiples of (n - 1) / n of the larger side
_ROUNDS = {"allgather": 1, "reducescatter": 1, "allreduce": 2, "broadcast": 1, "alltoall": 1}
_KINDS = {"reducescatter": "reduce_scatter"}  # the displayed name


def _kind_of(method: str) -> str | None:
    """The collective behind a method of a process group."""
    plain = method.replace("_", "")
    return next((kind for kind in (*_ROUNDS, "send") if plain.startswith(kind)), None)


def collective_methods() -> list[tuple[type, str, str]]:
    """(class, method, kind of collective) of the process groups in use."""
    groups = distributed_c10d._world.pg_map
    bases = {base for group in groups for base in type(group).__mro__}  # c3 has its own classes
    owners: set[type] = {dist.ProcessGroup} | {base for base in bases if issubclass(base, dist.ProcessGroup)}
    return [(owner, name, kind) for owner in owners for name in vars(owner) if (kind := _kind_of(name)) is not None]


def tier_of_ranks(ranks: Iterable[int], cluster: Cluster) -> str:
    """The innermost tier that holds all of these ranks."""
    ranks = list(ranks)
    for tier in cluster.tiers:
        if len({rank // tier.size for rank in ranks}) == 1:
            return tier.name
    return "beyond the cluster"


class TrafficCounter:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.sent_bytes: Counter[tuple[str, str]] = Counter()
        """By (tier, kind of collective)."""
        self._plain: list[tuple[type, str, Any]] = []
        self._inside = False

    def by_tier(self) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for (tier, _), count in self.sent_bytes.items():
            totals[tier] += count
        return dict(totals)

    def __enter__(self) -> Self:
        for owner, name, kind in collective_methods():
            self._plain.append((owner, name, vars(owner)[name]))
            setattr(owner, name, self._counted(kind, getattr(owner, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, method in self._plain:
            setattr(owner, name, method)
        self._plain.clear()

    def _counted(self, kind: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if self._inside:  # a method that calls another is one collective
                return plain(group, *args, **kwargs)
            self._count(kind, group, [*args, *kwargs.values()])
            self._inside = True
            try:
                return plain(group, *args, **kwargs)
            finally:
                self._inside = False

        return call

    def _count(self, kind: str, group: dist.ProcessGroup, arguments: Sequence[Any]) -> None:
        ranks = dist.get_process_group_ranks(group)
        sides = (tree_flatten(argument)[0] for argument in arguments)
        sizes = (sum(_wire_bytes(group, value) for value in side if isinstance(value, Tensor)) for side in sides)
        sent = max(sizes, default=0)  # input or output, whichever is the full tensor
        splits = [argument for argument in arguments if isinstance(argument, list) and _are_sizes(argument)]
        if kind == "alltoall" and len(splits) == 2:  # of the output and of the input, which follow these tensors
            sizes_sent = splits[1]
            here = sizes_sent[dist.get_rank(group)]
            sent = arguments[1].nbytes * (sum(sizes_sent) - here) // max(sum(sizes_sent), 1)
        elif kind != "send":
            sent = _ROUNDS[kind] * sent * (len(ranks) - 1) // len(ranks)
        self.sent_bytes[tier_of_ranks(ranks, self.cluster), _KINDS.get(kind, kind)] += sent


def _are_sizes(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, int) for value in values)


def _wire_bytes(group: dist.ProcessGroup, tensor: Tensor) -> int:
    """Only c3's groups may encode what they sum between replicas."""
    encoded_bytes = getattr(group, "encoded_bytes", None)
    encoded = encoded_bytes(tensor) if encoded_bytes is not None else None
    return tensor.nbytes if encoded is None else int(encoded)
