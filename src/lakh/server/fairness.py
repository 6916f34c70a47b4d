"""Fair sharing between tenants: who starts next, who is preempted for whom, and who may still wait.

A share is a tenant and a cache space inside it (its `cache_salt`). Tenants are equal, whatever number of requests or
choices (`n`) each of them sends; inside a tenant its spaces are equal, which is what a gateway needs: it is one tenant
of its engines and sends the requests of each of its own tenants with a salt of their own. A client that invents salts
competes with itself only.

Pure functions over sequences in order of arrival. One tenant alone is served first come, first served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from collections.abc import Sequence as ListOf
from typing import NamedTuple

__all__ = ["Share", "ShareCounts", "has_room"]


class Share(NamedTuple):
    tenant: str
    space: Hashable


class ShareCounts:
    """Running sequences by tenant and by share."""

    def __init__(self, running: Iterable[Share]) -> None:
        self._by_tenant: Counter[str] = Counter()
        self._by_share: Counter[Share] = Counter()
        for share in running:
            self.add(share)

    def add(self, share: Share, count: int = 1) -> None:
        self._by_tenant[share.tenant] += count
        self._by_share[share] += count

    def next_to_start(self, waiting: Iterable[Share]) -> int:
        """The index of the sequence to start next: of the tenant with the fewest running, then of its space with the
        fewest, then the oldest.
        """
        ranked = ((self._by_tenant[share.tenant], self._by_share[share], index) for index, share in enumerate(waiting))
        return min(ranked)[2]

    def to_preempt(self, starting: Share, running: ListOf[Share]) -> int | None:
        """The index of the running sequence that makes room for one of `starting`: the youngest of the tenant with the
        most, if `starting`'s tenant has none and the other keeps some; the same for spaces inside a tenant.
        """
        if not self._by_tenant[starting.tenant]:
            tenant, most = self._by_tenant.most_common(1)[0] if self._by_tenant else ("", 0)
            victims = [index for index, share in enumerate(running) if share.tenant == tenant]
        elif not self._by_share[starting]:
            counts = [(count, share) for share, count in self._by_share.items() if share.tenant == starting.tenant]
            most, largest = max(counts, key=lambda item: item[0])
            victims = [index for index, share in enumerate(running) if share == largest]
        else:
            return None
        return victims[-1] if most > 1 else None


def has_room(waiting: Collection[Share], new: Share, max_waiting: int) -> bool:
    """Whether one more may wait: while fewer than `max_waiting` do, and then for a tenant (or a space of a tenant) that
    has less than its share of them. At most about twice `max_waiting` wait in all.
    """
    if len(waiting) < max_waiting:
        return True
    by_tenant = Counter(share.tenant for share in waiting)
    part = max_waiting // len(by_tenant.keys() | {new.tenant})
    if by_tenant[new.tenant] < part:
        return True
    spaces = Counter(share for share in waiting if share.tenant == new.tenant)
    return spaces[new] < part // len(spaces.keys() | {new})
