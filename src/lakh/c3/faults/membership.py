"""Membership after a rank is lost: a pure decision, and the agreement on it through a store.

Members have ids that never change; an *epoch* is a numbered set of members. After a loss every survivor registers for
the next epoch. The lowest of them decides when all members not known dead have registered, or when the registration
time is over. A member that most others cannot reach never decides, because the members it believes dead may be alive.
The decision is written with compare-and-set, so there is only one; a rank that is not in it stops. Fewer than half of
the last epoch never continue: the others may be training already. With exactly half, the store's single decision
breaks the tie.

Fails with PeerLost: not part of the decision, in a minority, or unreachable.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lakh.errors import PeerLost, PeerTimeout

__all__ = ["Epoch", "MembershipDecision", "PollingStore", "agree_on_epoch", "decide_membership", "find_reachable"]

SETTLE_S = 3.0
"""How long survivors wait for others to register; detecting a loss takes up to 2 s."""
SUSPECT_S = 1.0
"""How long a member that closed its connections has to register; a live one takes milliseconds."""
POLL_S = 0.01


@dataclass(frozen=True)
class Epoch:
    number: int
    members: tuple[int, ...]
    dead: tuple[int, ...] = ()
    reason: str = "start"


@dataclass(frozen=True)
class MembershipDecision:
    action: str  # "continue" or "stop"
    members: tuple[int, ...]
    dead: tuple[int, ...]
    reason: str


def decide_membership(
    previous: Iterable[int], registered: Iterable[int], joining: Iterable[int] = (), *, min_ranks: int = 1
) -> MembershipDecision:
    """The members of the next epoch."""
    before, alive = set(previous), set(registered)
    stay = tuple(sorted(before & alive))
    gone = tuple(sorted(before - alive))
    new = tuple(sorted(set(joining) - before))
    members = tuple(sorted(set(stay) | set(new)))
    what = f"{len(stay)} of {len(before)} ranks are present" + (f", {list(gone)} are missing" if gone else "")
    if new:
        what += f", {list(new)} join"
    if 2 * len(stay) < len(before):
        return MembershipDecision("stop", stay, gone, f"{what}: a minority does not continue")
    if len(members) < min_ranks:
        return MembershipDecision("stop", stay, gone, f"{what}: fewer than the required {min_ranks}")
    return MembershipDecision("continue", members, gone, what)


def find_reachable(registered: Iterable[int], accuses: Mapping[int, Iterable[int]]) -> list[int]:
    """The registered members that can be reached.

    A rank whose link is cut registers too if the store does not use that link. It cannot reach most of the others,
    whichever side has detected this so far: an accusation counts against both.
    """
    present = sorted(registered)
    known = set(present)
    broken = {frozenset((a, b)) for a in present for b in accuses[a] if a != b and b in known}
    count = Counter(member for pair in broken for member in pair)
    reachable = [member for member in present if 2 * count[member] <= len(present) - 1]
    return reachable or present[:1]  # two that accuse each other: the lower one continues


class PollingStore:
    """A store whose `get` gives up after `timeout_s`, independent of the timeout of the store below."""

    def __init__(self, store: Any, timeout_s: float) -> None:
        self.store, self.timeout_s = store, timeout_s

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        end_s = time.monotonic() + self.timeout_s
        while not self.store.check([key]):
            if time.monotonic() > end_s:
                raise PeerTimeout(f"store key {key}", f"was not set in {self.timeout_s:g} s", "reconfigure again")
            time.sleep(POLL_S)
        return bytes(self.store.get(key))


def _read_registrations(store: Any, base: str, members: list[int]) -> dict[int, dict[str, Any]]:
    """The records of the members that have registered. If all have, that takes two requests to the store."""
    keys = {member: f"{base}/registered/{member}" for member in members}
    if keys and not store.check(list(keys.values())):
        keys = {member: key for member, key in keys.items() if store.check([key])}
    if not keys:
        return {}
    values = store.multi_get(list(keys.values()))
    # One document: a parser is faster on a list than on thousands of texts.
    return dict(zip(keys, json.loads(b"[" + b",".join(map(bytes, values)) + b"]"), strict=True))


def agree_on_epoch(
    store: Any,
    name: str,
    epoch: Epoch,
    me: int,
    record: Mapping[str, int],
    known_dead: Iterable[int],
    *,
    suspects: Iterable[int] = (),
    joining: Iterable[int] = (),
    min_ranks: int = 1,
    settle_s: float = SETTLE_S,
    on_registered: Callable[[], None] = lambda: None,
) -> tuple[Epoch, dict[int, dict[str, int]]]:
    """Register for the epoch after `epoch` with `record`. Returns the new epoch and all members' records.

    `suspects` have closed their connections: they died, or abandoned the epoch shortly before us and are about to
    register. Close the connections of `epoch` in `on_registered`, so that every live member has registered before
    others suspect it.
    """
    base = f"{name}/epoch/{epoch.number + 1}"
    dead, suspected = set(known_dead), set(suspects) - set(known_dead)
    store.set(f"{base}/registered/{me}", json.dumps({**record, "accuses": sorted(dead)}))
    on_registered()
    where = f"c3, epoch {epoch.number + 1}, member {me}"
    records: dict[int, dict[str, Any]] = {}
    start_s = time.monotonic()
    lower = [member for member in epoch.members if member < me and member not in dead | suspected]
    while not store.check([f"{base}/decision"]):
        # Where a lower member is present, only that one reads all registrations: with N members, N reads and not N * N.
        is_early = time.monotonic() - start_s < settle_s
        if is_early and any(store.check([f"{base}/registered/{member}"]) for member in lower):
            time.sleep(POLL_S)
            continue
        unread = [member for member in epoch.members if member not in records]
        records |= _read_registrations(store, base, [member for member in unread if member not in dead])
        records |= _read_registrations(store, base, [member for member in unread if member in dead])
        waited_s = time.monotonic() - start_s
        reachable = find_reachable(records, {member: record["accuses"] for member, record in records.items()})
        # A member of a subgroup may know of a death that this one cannot see. It may also be wrong: wait a little.
        accused = {member for witness in reachable for member in records[witness]["accuses"]}
        missing = set(epoch.members) - set(records) - dead
        complete = missing <= ((suspected | accused) if waited_s > SUSPECT_S else set())
        # The lowest member decides. If it dies while deciding, the next one does so a little later.
        turn = reachable.index(me) if me in reachable else len(records)
        is_over = waited_s > settle_s * (1 + 0.5 * turn)
        if me in reachable and ((complete and turn == 0) or is_over):
            decision = decide_membership(epoch.members, reachable, joining, min_ranks=min_ranks)
            if decision.action == "continue":  # "stop" is never written: an isolated member must not stop the others
                document = json.dumps({"decision": asdict(decision), "records": records})
                store.compare_set(f"{base}/decision", "", document)
                continue
            if is_over:
                raise PeerLost(where, decision.reason, "restart from the last checkpoint")
        elif is_over:
            raise PeerLost(where, "most other members cannot reach this one", "rejoin, or end this process")
        time.sleep(POLL_S)
    document = json.loads(store.get(f"{base}/decision"))
    fields = document["decision"]
    decision = MembershipDecision(fields["action"], tuple(fields["members"]), tuple(fields["dead"]), fields["reason"])
    if me not in decision.members:
        found = f"the others continued without this member ({decision.reason})"
        raise PeerLost(where, found, "rejoin, or end this process")
    all_records = {int(member): record for member, record in document["records"].items()}
    return Epoch(epoch.number + 1, decision.members, decision.dead, decision.reason), all_records
