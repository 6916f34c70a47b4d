"""Requests of new and returning replicas to join a run, in the store beside its rendezvous. Independent of torch.

Each rank of a replica asks under its member number and refreshes its request while it waits, so that nobody waits for a
process that died. The members look for whole replicas among the requests at every step (recovery/elastic.py) and
answer with the epoch that admits them, or with a refusal.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from lakh.c3.directory_store import DirectoryStore
from lakh.c3.faults.membership import Epoch

__all__ = ["JoinAnswer", "JoinRequest", "JoinRequests"]

FRESH_S = 3.0
"""How old a request may be. A waiting process refreshes it every few milliseconds unless it is stopped or starved."""


@dataclass(frozen=True)
class JoinRequest:
    member: int
    nonce: str
    """Of the process: a member that died and came back asks again."""
    facts: str
    """Hash of what must be equal on all ranks."""
    time_s: float


@dataclass(frozen=True)
class JoinAnswer:
    epoch: Epoch | None
    """The epoch that admits the member; None if it is refused."""
    records: dict[int, dict[str, Any]]
    """What the older members registered with."""
    reason: str = ""


class JoinRequests:
    def __init__(self, store: DirectoryStore, *, now_s: Callable[[], float] = time.time) -> None:
        self._store, self._now_s = store, now_s

    def ask(self, member: int, facts: str) -> JoinRequest:
        request = JoinRequest(member, secrets.token_hex(8), facts, self._now_s())
        self.refresh(request)
        return request

    def refresh(self, request: JoinRequest) -> None:
        self._store.set(f"join/{request.member}", json.dumps(asdict(replace(request, time_s=self._now_s()))))

    def waiting(self) -> list[JoinRequest]:
        """The requests without an answer whose processes are alive."""
        if not (keys := self._store.keys("join/")):
            return []
        found = [JoinRequest(**json.loads(self._store.get(key))) for key in keys]
        return [request for request in found if self._is_fresh(request) and self.find_answer(request) is None]

    def answer(self, request: JoinRequest, answer: JoinAnswer) -> None:
        self._store.set(f"answer/{request.nonce}", json.dumps(asdict(answer)))

    def find_answer(self, request: JoinRequest) -> JoinAnswer | None:
        key = f"answer/{request.nonce}"
        if not self._store.check([key]):
            return None
        fields = json.loads(self._store.get(key))
        epoch, records = fields["epoch"], {int(member): record for member, record in fields["records"].items()}
        if epoch is not None:
            epoch = Epoch(epoch["number"], tuple(epoch["members"]), tuple(epoch["dead"]), epoch["reason"])
        return JoinAnswer(epoch, records, fields["reason"])

    def _is_fresh(self, request: JoinRequest) -> bool:
        return abs(self._now_s() - request.time_s) < FRESH_S
