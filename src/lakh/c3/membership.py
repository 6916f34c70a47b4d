"""Who goes on when a rank is lost: a pure decision, and the agreement on it through a store.

Members have ids that never change; an *epoch* is a numbered set of them. After a loss every survivor signs up for
the next epoch; the lowest of them decides when all that are not known dead have signed, or when the time to sign is
over. One whom most of the others cannot reach never decides, for what it takes for dead may be alive. The decision is
written with compare-and-set, so there is one, whoever writes it; a rank that is not in it stops. Fewer than half of the
last epoch never go on: the others may be training already. With exactly half, the one store decides.

Fails with PeerLost: not in the decision, or in a minority, or out of reach.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lakh.errors import PeerLost, PeerTimeout

__all__ = ["Decision", "Epoch", "PollingStore", "agree", "decide_membership", "reachable"]

SETTLE_S = 3.0
"""How long survivors wait for others to sign up; noticing a loss takes up to 2 s."""
SUSPECT_S = 1.0
"""How long one who has closed its connections is given to sign up; a living one takes milliseconds."""
POLL_S = 0.01


@dataclass(frozen=True)
class Epoch:
    number: int
    members: tuple[int, ...]
    dead: tuple[int, ...] = ()
    reason: str = "start"


@dataclass(frozen=True)
class Decision:
    action: str  # "go on" or "stop"
    members: tuple[int, ...]
    dead: tuple[int, ...]
    reason: str


def decide_membership(
    previous: Iterable[int], signed: Iterable[int], joining: Iterable[int] = (), *, min_ranks: int = 1
) -> Decision:
    """Who makes up the next epoch."""
    before, alive = set(previous), set(signed)
    stay = tuple(sorted(before & alive))
    gone = tuple(sorted(before - alive))
    new = tuple(sorted(set(joining) - before))
    members = tuple(sorted(set(stay) | set(new)))
    what = f"{len(stay)} of {len(before)} ranks are there" + (f", {list(gone)} are not" if gone else "")
    if new:
        what += f", {list(new)} join"
    if 2 * len(stay) < len(before):
        return Decision("stop", stay, gone, f"{what}: a minority does not go on")
    if len(members) < min_ranks:
        return Decision("stop", stay, gone, f"{what}: fewer than the {min_ranks} that are asked for")
    return Decision("go on", members, gone, what)


def reachable(signed: Iterable[int], accuses: Mapping[int, Iterable[int]]) -> list[int]:
    """Who of those that signed can be reached.

    A rank with a cut link signs too, where the store is not on that link. It cannot reach most of the others, whichever
    side has found out so far: an accusation counts for both.
    """
    there = sorted(signed)
    broken = {frozenset((one, other)) for one in there for other in set(accuses[one]) & set(there) if one != other}
    heard = [m for m in there if 2 * sum(m in pair for pair in broken) <= len(there) - 1]
    return heard or there[:1]  # two that accuse each other: the lower goes on


class PollingStore:
    """A store whose `get` gives up after `timeout_s`, whatever the patience of the store below."""

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


def agree(
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
    on_signed: Callable[[], None] = lambda: None,
) -> tuple[Epoch, dict[int, dict[str, int]]]:
    """Sign up for the epoch after `epoch` and learn who is in it, with what each of them said of itself in `record`.

    `suspects` have closed their connections: they died, or gave the epoch up a moment before us and are about to sign.
    Close the connections of `epoch` in `on_signed`, so that whoever lives has signed before others suspect it.
    """
    base = f"{name}/epoch/{epoch.number + 1}"
    dead, silent = set(known_dead), set(suspects) - set(known_dead)
    store.set(f"{base}/signed/{me}", json.dumps({**record, "accuses": sorted(dead)}))
    on_signed()
    where = f"c3, epoch {epoch.number + 1}, member {me}"
    records: dict[int, dict[str, Any]] = {}
    start_s = time.monotonic()
    while not store.check([f"{base}/decision"]):
        for member in epoch.members:
            if member not in records and store.check([f"{base}/signed/{member}"]):
                records[member] = json.loads(store.get(f"{base}/signed/{member}"))
        waited_s = time.monotonic() - start_s
        heard = reachable(records, {member: record["accuses"] for member, record in records.items()})
        everyone = set(epoch.members) <= set(records) | dead | (silent if waited_s > SUSPECT_S else set())
        # The lowest decides; were it to die in doing so, the others do it a little later.
        turn = heard.index(me) if me in heard else len(records)
        is_over = waited_s > settle_s * (1 + 0.5 * turn)
        if me in heard and ((everyone and turn == 0) or is_over):
            decision = decide_membership(epoch.members, heard, joining, min_ranks=min_ranks)
            if decision.action == "go on":  # else never written: one that is cut off must not stop the others
                document = json.dumps({"decision": asdict(decision), "records": records})
                store.compare_set(f"{base}/decision", "", document)
                continue
            if is_over:
                raise PeerLost(where, decision.reason, "start again from the last checkpoint")
        elif is_over:
            raise PeerLost(where, "most of the others cannot reach us", "rejoin, or end this process")
        time.sleep(POLL_S)
    made = json.loads(store.get(f"{base}/decision"))
    said = made["decision"]
    decision = Decision(said["action"], tuple(said["members"]), tuple(said["dead"]), said["reason"])
    if me not in decision.members:
        raise PeerLost(where, f"the others went on without us ({decision.reason})", "rejoin, or end this process")
    told = {int(member): record for member, record in made["records"].items()}
    return Epoch(epoch.number + 1, decision.members, decision.dead, decision.reason), told
