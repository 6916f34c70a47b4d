"""A group of ranks without torch: collectives on addresses, run by the native core.

`Group.meet` is called by every rank with a common store. Ranks of one host share memory; others are reached over TCP by
a schedule that `plans` has built. `run` is synchronous; `start` returns a ticket for `wait`. Errors: UserError where
ranks disagree (the group goes on) or the group was closed, PeerLost and PeerTimeout where it is over.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lakh.c3 import native
from lakh.c3.bootstrap import Store, share_records
from lakh.c3.plans import Plans
from lakh.c3.topology import WIRES, Link, Topology, labels_from_environment, numa_node, read_topology
from lakh.errors import LakhError, PeerLost, UserError

__all__ = ["Failure", "Group"]

SINGLE_COPY_FROM_BYTES = 64 << 10
"""From here on data is read out of the peer's memory; below, a copy through shared memory costs less than the call."""
MAY_HAVE_GIVEN_UP = ("closed its connection", "lost its connection", "has left the group")
DIED = "its process died"
"""The native core's words for the end of a connection, which proves little, and of a process, which does."""

_ALL_REDUCE = native.OPERATIONS["all_reduce"]


@dataclass(frozen=True)
class Failure:
    """Why a group is over, and which of its ranks are to blame."""

    reason: str
    dead: tuple[int, ...]

    @property
    def is_certain(self) -> bool:
        """False where those ranks may be alive: who gives a group up for another's sake closes its connections too."""
        return DIED in self.reason or not any(words in self.reason for words in MAY_HAVE_GIVEN_UP)


class Group:
    """One rank's membership. Make it with `Group.meet`."""

    def __init__(
        self, handle: int, rank: int, size: int, topology: Topology, uuid: bytes, records: list[dict[str, Any]]
    ):
        self.library = native.require_library()
        self.handle = handle
        self.rank = rank
        self.size = size
        self.uuid = uuid
        self.records = records
        self.on_one_host = topology.num_hosts == 1
        self.plans = Plans(rank, topology)
        self._reading = threading.Lock()
        """Held while another thread may look at counters, and while the handle is given up."""

    @staticmethod
    def meet(
        store: Store,
        rank: int,
        size: int,
        *,
        name: str = "c3",
        timeout_s: float = 600.0,
        topology: Topology | None = None,
        single_copy_from_bytes: int = SINGLE_COPY_FROM_BYTES,
        place: tuple[str, str, str] | None = None,
    ) -> Group:
        """Join the other ranks. `topology` overrules what the ranks find out themselves; `place` what this rank
        does.
        """
        library = native.require_library()
        if rank == 0:
            store.set(f"{name}/uuid", secrets.token_hex(16))
        uuid = bytes.fromhex(store.get(f"{name}/uuid").decode())
        named = os.environ.get("LAKH_C3_TOPOLOGY")
        problem = ""
        if topology is None and named:
            try:
                topology = read_topology(named, size)
            except LakhError as error:
                problem = str(error)  # told to everybody, so that nobody waits for us
        memory = ctypes.c_int32(-1)
        handle = library.lakh_c3_open(uuid, rank, size, ctypes.byref(memory))
        if not handle:
            problem = problem or str(native.error_of(native._SYSTEM, "c3"))
        identity = native.host_identity()
        address = os.environ.get("LAKH_C3_ADDRESS") or _own_address()
        port = library.lakh_c3_listen(b"")
        record = {
            "identity": identity,
            "place": list(place or labels_from_environment(identity)),
            "numa": numa_node(os.sched_getaffinity(0)),
            "pid": os.getpid(),
            "memory": memory.value,
            "address": f"{address}:{port}",
            "topology": topology.digest if topology else "",
            "problem": problem,
        }
        try:
            records = share_records(store, name, rank, size, record)
            found = topology or Topology(tuple(tuple(one["place"]) for one in records))
            problem = _contradiction(records, found)
            if not problem:
                status = library.lakh_c3_join(
                    handle,
                    _int32s(found.host_numbers),
                    _int32s([one["pid"] for one in records]),
                    _int32s([one["memory"] for one in records]),
                    (ctypes.c_char_p * size)(*[one["address"].encode() for one in records]),
                    int(timeout_s * 1000),
                    found.wires["host"].streams,
                    single_copy_from_bytes,
                )
                status = status or _set_wires(library, handle, rank, found)
                joined = {"problem": str(native.error_of(status, f"rank {rank}")) if status else ""}
                for one in share_records(store, f"{name}/joined", rank, size, joined):
                    problem = problem or one["problem"]
            if problem:
                raise UserError("c3, meeting the other ranks", problem, "mend that and start all ranks again")
        except BaseException:
            if handle:
                library.lakh_c3_close(handle)
            raise
        return Group(handle, rank, size, found, uuid, records)

    @property
    def numa_nodes(self) -> list[int | None]:
        """The NUMA node that each rank is bound to; None where it may run on several."""
        return [record["numa"] for record in self.records]

    @property
    def topology(self) -> Topology:
        return self.plans.topology

    def know(self, topology: Topology, links: Mapping[str, Link]) -> None:
        """Choose by these from now on; all ranks must be given the same ones, between the same operations."""
        self.plans.know(topology, links)

    # --- collectives ---------------------------------------------------------------------------------------------

    def run(
        self, operation: str, dtype: int, op: int, root: int, source: int, target: int, count: int, **extra: Any
    ) -> None:
        """Run one collective to its end. `source` and `target` are addresses."""
        if self.on_one_host and not extra:
            status = self.library.lakh_c3_collective(
                self.handle, native.OPERATIONS[operation], dtype, op, root, source, target, count
            )
        else:
            call, _keep = self._call(operation, dtype, op, root, source, target, count, **extra)
            status = self.library.lakh_c3_run(self.handle, ctypes.byref(call), None)
        if status:
            raise native.error_of(status, f"c3 {operation}, rank {self.rank}")

    def start(
        self, operation: str, dtype: int, op: int, root: int, source: int, target: int, count: int, **extra: Any
    ) -> tuple[int, Any]:
        """Queue one collective: its ticket, and what must be kept until it is done."""
        call, keep = self._call(operation, dtype, op, root, source, target, count, **extra)
        ticket = ctypes.c_int64(0)
        status = self.library.lakh_c3_run(self.handle, ctypes.byref(call), ctypes.byref(ticket))
        if status:
            raise native.error_of(status, f"c3 {operation}, rank {self.rank}")
        return ticket.value, keep

    def is_done(self, ticket: int) -> bool:
        """Whether `wait` would return at once, well or not."""
        return bool(self.library.lakh_c3_done(self.handle, ticket))

    def wait(self, ticket: int, operation: str = "collective", timeout_s: float = 1e6) -> None:
        status = self.library.lakh_c3_wait(self.handle, ticket, int(timeout_s * 1000))
        if status:
            raise native.error_of(status, f"c3 {operation}, rank {self.rank}")

    def _call(
        self,
        operation: str,
        dtype: int,
        op: int,
        root: int,
        source: int,
        target: int,
        count: int,
        splits: Sequence[int] | None = None,
        codec: str = "none",
        residual: int = 0,
        seed: int = 0,
    ) -> tuple[native.Call, Any]:
        call = native.Call(native.OPERATIONS[operation], dtype, op, root, source, target, count)
        table = None
        if splits is not None:
            table = (ctypes.c_int64 * len(splits))(*splits)
            call.splits = ctypes.cast(table, ctypes.POINTER(ctypes.c_int64))
        plan = None
        if not self.on_one_host or (codec != "none" and self.size > 1):
            if operation == "barrier":
                call.dtype = native.DTYPES["u8"]
            plan = self.plans.plan(operation, count, WIDTHS[call.dtype], root, splits, codec)
            call.steps = ctypes.cast(plan.steps, ctypes.POINTER(native.NativeStep))
            call.num_steps = len(plan.schedule.steps)
            call.scratch_count = plan.schedule.scratch_count
            call.wire_bytes = plan.schedule.wire_bytes
            call.codec = native.CODECS[codec]
            call.residual = residual
            call.seed = seed
        return call, (table, plan)

    # --- messages ------------------------------------------------------------------------------------------------

    def send(self, peer: int, tag: int, source: int, size_bytes: int) -> int:
        ticket = ctypes.c_int64(0)
        status = self.library.lakh_c3_send(self.handle, peer, tag, source, size_bytes, ctypes.byref(ticket))
        if status:
            raise native.error_of(status, f"c3 send to rank {peer}, rank {self.rank}")
        return ticket.value

    def recv(self, peer: int, tag: int, target: int, size_bytes: int) -> tuple[int, ctypes.c_int32]:
        """Peer -1 is anyone. The ticket, and a box for who it was."""
        ticket, sender = ctypes.c_int64(0), ctypes.c_int32(peer)
        status = self.library.lakh_c3_recv(
            self.handle, peer, tag, target, size_bytes, ctypes.byref(sender), ctypes.byref(ticket)
        )
        if status:
            raise native.error_of(status, f"c3 recv from rank {peer}, rank {self.rank}")
        return ticket.value, sender

    def is_message_done(self, ticket: int) -> bool:
        """Whether `wait_message` would return at once, well or not."""
        return bool(self.library.lakh_c3_message_done(self.handle, ticket))

    def wait_message(self, ticket: int, timeout_s: float) -> None:
        status = self.library.lakh_c3_wait_message(self.handle, ticket, int(timeout_s * 1000))
        if status:
            raise native.error_of(status, f"c3 message, rank {self.rank}")

    # --- the group itself ----------------------------------------------------------------------------------------

    def failure(self) -> Failure | None:
        """Why the group is over; None while it is not."""
        text = ctypes.create_string_buffer(1024)
        dead = (ctypes.c_int32 * self.size)()
        with self._reading:
            if not self.library.lakh_c3_failure(self.handle, text, len(text), dead, self.size):
                return None
        return Failure(text.value.decode(errors="replace"), tuple(rank for rank in dead if rank >= 0))

    def abort(self, reason: str) -> None:
        """End the group on every rank, with this reason."""
        self.library.lakh_c3_abort(self.handle, reason.encode()[:300])

    def set_timeout(self, timeout_s: float) -> None:
        self.library.lakh_c3_set_timeout(self.handle, int(timeout_s * 1000))

    def shape(self, topology: Topology, file: str) -> None:
        """Pretend the links of `topology`: bytes to each peer take turns on them, in all processes that name `file`."""
        numbers: dict[tuple[str, str, str], int] = {}
        for a in range(self.size):
            for b in range(self.size):
                for link in topology.path(a, b):
                    numbers.setdefault(link, len(numbers))
        for peer in range(self.size):
            for link in topology.path(self.rank, peer):
                tier, name, way = link
                if tier not in topology.links and name not in topology.cables:
                    continue
                known = {tier: Link(float("inf")), **topology.links}
                delay_us = int(known[tier].delay_us) if way == "out" else 0
                rate = topology.bytes_per_s(tier, name, known)
                status = self.library.lakh_c3_shape(self.handle, peer, file.encode(), numbers[link], rate, delay_us)
                if status:
                    raise native.error_of(status, f"c3, virtual link {link}")

    def counters(self) -> dict[str, int]:
        """What was done so far; zeros where the group was closed."""
        values = native.Counters()
        with self._reading:
            self.library.lakh_c3_read_counters(self.handle, ctypes.byref(values))
        return {name: int(getattr(values, name)) for name in native.COUNTERS}

    def waited_us(self) -> list[int]:
        """How long this rank has waited for each rank."""
        values = (ctypes.c_uint64 * self.size)()
        with self._reading:
            self.library.lakh_c3_waited_us(self.handle, values)
        return [int(value) for value in values]

    def close(self) -> None:
        with self._reading:
            handle, self.handle = self.handle, 0
        self.library.lakh_c3_close(handle)


WIDTHS = {0: 4, 1: 8, 2: 2, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1}
"""Bytes of an element, by its number in native.DTYPES."""


def _contradiction(records: list[dict[str, Any]], topology: Topology) -> str:
    """What is wrong with what the ranks say of themselves; the same sentence on every rank."""
    for rank, one in enumerate(records):
        if one["problem"]:
            return f"rank {rank}: {one['problem']}"
    digests = {one["topology"] for one in records}
    if len(digests) > 1:
        return "the ranks have read different topology files"
    identities: dict[str, tuple[int, str]] = {}
    for rank, (host, one) in enumerate(zip(topology.hosts, records, strict=True)):
        first, identity = identities.setdefault(host, (rank, one["identity"]))
        if identity != one["identity"]:
            name = topology.places[rank][0]
            return f"ranks {first} and {rank} are said to be on one host ({name}) and are on two"
    return ""


def _set_wires(library: Any, handle: int, rank: int, topology: Topology) -> int:
    """Tell the core how messages travel to each rank on another host; 0, or the status of what it refused."""
    usual = WIRES["host"]
    if topology.wires["host"] == usual and len({place[1:] for place in topology.places}) == 1:
        return 0  # one rack: what the core does by itself
    for peer in range(topology.size):
        tier = topology.distance(rank, peer)
        if tier != "memory" and (wire := topology.wires[tier]) != usual:
            given = (wire.streams, wire.chunk_KB << 10, wire.in_flight_KB << 10)
            if status := library.lakh_c3_wire(handle, peer, *given):
                return int(status)
    return 0


def _int32s(values: Sequence[int]) -> Any:
    return (ctypes.c_int32 * len(values))(*values)


def _own_address() -> str:
    """The address by which this host reaches the rendezvous; its peers reach it there too."""
    master = os.environ.get("MASTER_ADDR", "")
    if master in ("", "localhost", "127.0.0.1", "::1"):
        return "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))  # sends nothing: it only asks the routing table
            return str(probe.getsockname()[0])
    except OSError as error:
        found = f"MASTER_ADDR={master} is not reachable from here ({error.strerror})"
        raise PeerLost("c3", found, "set LAKH_C3_ADDRESS to the address of this host") from None
