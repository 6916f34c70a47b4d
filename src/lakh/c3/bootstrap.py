"""Rendezvous: every rank obtains a record of every other, gathered along a tree through a key-value store.

A store is anything with `set(key, value)` and a blocking `get(key)`, such as torch's stores. Each rank writes one key
and reads those of at most 16 children plus the table, so no rank makes N requests. A store's timeout is raised as
PeerTimeout.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from lakh.errors import PeerTimeout

__all__ = ["FANOUT", "RendezvousStore", "exchange_records", "read_key"]

FANOUT = 16


class RendezvousStore(Protocol):
    def set(self, key: str, value: Any) -> None: ...

    def get(self, key: str) -> bytes: ...


def exchange_records(
    store: RendezvousStore, name: str, rank: int, size: int, record: dict[str, Any]
) -> list[dict[str, Any]]:
    """All ranks' records in rank order, on every rank."""
    records = {rank: record}
    for child in range(FANOUT * rank + 1, min(FANOUT * rank + FANOUT, size - 1) + 1):
        below = json.loads(read_key(store, f"{name}/up/{child}", f"rank {child} or its children"))
        records.update({int(key): value for key, value in below.items()})
    if rank == 0:
        table = [records[r] for r in range(size)]
        store.set(f"{name}/table", json.dumps(table))
        return table
    store.set(f"{name}/up/{rank}", json.dumps(records))
    shared: list[dict[str, Any]] = json.loads(read_key(store, f"{name}/table", "rank 0"))
    return shared


def read_key(store: RendezvousStore, key: str, sender: str) -> bytes:
    """The value that `sender` writes. Blocks until then, at most for the store's timeout."""
    try:
        return store.get(key)
    except PeerTimeout:
        raise
    except Exception as error:  # noqa: BLE001 - every kind of store has its own
        found = f"no record from {sender} ({str(error).partition(chr(10))[0][:160]})"
        raise PeerTimeout("c3 rendezvous", found, "check that rank and start again") from None
