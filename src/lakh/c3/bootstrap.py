"""Rendezvous: every rank obtains a record of every other, gathered along a tree through a key-value store.

A store is anything with `set(key, bytes)` and a blocking `get(key)`: torch's stores, or `InProcessStore`. Each rank
writes one key and reads those of at most 16 children plus the table, so no rank makes N requests. A store's timeout is
raised as PeerTimeout.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Protocol

from lakh.errors import PeerTimeout

__all__ = ["FANOUT", "InProcessStore", "RendezvousStore", "exchange_records"]

FANOUT = 16


class RendezvousStore(Protocol):
    def set(self, key: str, value: Any) -> None: ...

    def get(self, key: str) -> bytes: ...


class InProcessStore:
    """A store for ranks that are threads of one process: tests and start-up measurements."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: Any) -> None:
        with self._changed:
            self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        end_s = time.monotonic() + self.timeout_s
        with self._changed:
            while key not in self._values:
                if not self._changed.wait(end_s - time.monotonic()) and time.monotonic() > end_s:
                    raise PeerTimeout(f"store key {key}", f"was not set in {self.timeout_s:g} s", "check the peers")
            return self._values[key]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` if its value is `expected` ("" if unset); returns the value afterwards."""
        with self._changed:
            if self._values.get(key, b"").decode() == expected:
                self._values[key] = desired.encode()
                self._changed.notify_all()
            return self._values.get(key, expected.encode())

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)


def exchange_records(
    store: RendezvousStore, name: str, rank: int, size: int, record: dict[str, Any]
) -> list[dict[str, Any]]:
    """All ranks' records in rank order, on every rank."""
    records = {rank: record}
    for child in range(FANOUT * rank + 1, min(FANOUT * rank + FANOUT, size - 1) + 1):
        below = json.loads(_get(store, f"{name}/up/{child}", f"rank {child} or its children"))
        records.update({int(key): value for key, value in below.items()})
    if rank == 0:
        table = [records[r] for r in range(size)]
        store.set(f"{name}/table", json.dumps(table))
        return table
    store.set(f"{name}/up/{rank}", json.dumps(records))
    shared: list[dict[str, Any]] = json.loads(_get(store, f"{name}/table", "rank 0"))
    return shared


def _get(store: RendezvousStore, key: str, sender: str) -> bytes:
    try:
        return store.get(key)
    except PeerTimeout:
        raise
    except Exception as error:  # noqa: BLE001 - every kind of store has its own
        found = f"no record from {sender} ({str(error).partition(chr(10))[0][:160]})"
        raise PeerTimeout("c3 rendezvous", found, "check that rank and start again") from None
