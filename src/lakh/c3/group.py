"""A communicator without torch: collectives and messages on memory addresses, executed by the native core.

Every rank calls `CommGroup.join` with a common store. Ranks of one host communicate through shared memory, others over
TCP by a schedule (schedule_cache.py). `run` is synchronous; `start` returns a ticket for `wait`. Errors: UserError
if the ranks call different operations (the group stays usable) or the group was closed; PeerLost and PeerTimeout end
the group.
"""

from __future__ import annotations

import ctypes
import hmac
import os
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lakh.c3 import native
from lakh.c3.bootstrap import RendezvousStore, exchange_records, read_key
from lakh.c3.native import FailureCause
from lakh.c3.schedule_cache import ScheduleCache
from lakh.c3.topology import WIRES, Link, Topology, labels_from_environment, numa_node, read_topology
from lakh.errors import LakhError, PeerLost, UserError

__all__ = ["CommGroup", "GroupFailure"]

SINGLE_COPY_FROM_BYTES = 64 << 10
"""From this size data is read directly from the peer's memory; below, a copy through shared memory is cheaper."""

SECRET_BYTES = 32


@dataclass(frozen=True)
class GroupFailure:
    """Why a group ended, and the ranks that caused it."""

    reason: str
    dead: tuple[int, ...]
    cause: FailureCause

    @property
    def is_certain(self) -> bool:
        """False if those ranks may be alive: a rank that leaves a failed group closes its connections too."""
        return self.cause not in (FailureCause.DISCONNECTED, FailureCause.LEFT)


class CommGroup:
    """One rank's communicator. Create it with `CommGroup.join`."""

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
        self.schedules = ScheduleCache(rank, topology)
        self._handle_lock = threading.Lock()
        """Protects the handle from `close` while another thread reads counters."""

    @staticmethod
    def join(
        store: RendezvousStore,
        rank: int,
        size: int,
        *,
        name: str = "c3",
        timeout_s: float = 600.0,
        topology: Topology | None = None,
        place: tuple[str, str, str] | None = None,
    ) -> CommGroup:
        """Join the other ranks. `topology` overrides the detected topology, `place` this rank's detected place."""
        library = native.require_library()
        if rank == 0:
            store.set(f"{name}/uuid", secrets.token_hex(16 + SECRET_BYTES))
        agreed = bytes.fromhex(read_key(store, f"{name}/uuid", "rank 0").decode())
        uuid, secret = agreed[:16], agreed[16:]
        named = os.environ.get("LAKH_C3_TOPOLOGY")
        problem = ""
        try:
            secret = _mix_in_secret_file(secret)
            if topology is None and named:
                topology = read_topology(named, size)
        except LakhError as error:
            problem = str(error)  # shared with all ranks, so that none waits for this one
        memory = ctypes.c_int32(-1)
        handle = library.lakh_c3_open(uuid, secret, rank, size, ctypes.byref(memory))
        if not handle:
            problem = problem or str(native.last_error(native.SYSTEM_STATUS, "c3"))
        identity = native.host_identity()
        address = os.environ.get("LAKH_C3_ADDRESS") or _own_address()
        listens_on = os.environ.get("LAKH_C3_LISTEN", address)
        port = library.lakh_c3_listen(listens_on.encode())
        if not port:
            problem = problem or f"rank {rank} cannot listen on {listens_on}; set LAKH_C3_LISTEN to a local address"
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
            records = exchange_records(store, name, rank, size, record)
            found = topology or Topology(tuple(tuple(one["place"]) for one in records))
            problem = _find_contradiction(records, found)
            if not problem:
                status = _connect(library, handle, rank, found, records, timeout_s)
                joined = {"problem": str(native.last_error(status, f"rank {rank}")) if status else ""}
                for one in exchange_records(store, f"{name}/joined", rank, size, joined):
                    problem = problem or one["problem"]
            if problem:
                raise UserError("c3 rendezvous", problem, "correct it and start all ranks again")
        except BaseException:
            if handle:
                library.lakh_c3_close(handle)
            raise
        return CommGroup(handle, rank, size, found, uuid, records)

    @property
    def numa_nodes(self) -> list[int | None]:
        """The NUMA node each rank is bound to; None if it may run on several."""
        return [record["numa"] for record in self.records]

    @property
    def topology(self) -> Topology:
        return self.schedules.topology

    def set_network(self, topology: Topology, links: Mapping[str, Link]) -> None:
        """Select algorithms by these from now on. All ranks must set the same values between the same operations."""
        self.schedules.set_network(topology, links)

    # --- collectives ---------------------------------------------------------------------------------------------

    def run(
        self, operation: str, dtype: int, op: int, root: int, source: int, target: int, count: int, **extra: Any
    ) -> None:
        """Run one collective. `source` and `target` are addresses."""
        if self.on_one_host and not extra:
            status = self.library.lakh_c3_collective(
                self.handle, native.OPERATIONS[operation], dtype, op, root, source, target, count
            )
        else:
            call, _keep = self._call(operation, dtype, op, root, source, target, count, **extra)
            status = self.library.lakh_c3_run(self.handle, ctypes.byref(call), None)
        if status:
            raise native.last_error(status, f"c3 {operation}, rank {self.rank}")

    def start(
        self, operation: str, dtype: int, op: int, root: int, source: int, target: int, count: int, **extra: Any
    ) -> tuple[int, Any]:
        """Queue one collective. Returns its ticket and objects to keep alive until it completes."""
        call, keep = self._call(operation, dtype, op, root, source, target, count, **extra)
        ticket = ctypes.c_int64(0)
        status = self.library.lakh_c3_run(self.handle, ctypes.byref(call), ctypes.byref(ticket))
        if status:
            raise native.last_error(status, f"c3 {operation}, rank {self.rank}")
        return ticket.value, keep

    def is_done(self, ticket: int) -> bool:
        """Whether `wait` would return or raise immediately."""
        return bool(self.library.lakh_c3_done(self.handle, ticket))

    def wait(self, ticket: int, operation: str = "collective", timeout_s: float = 1e6) -> None:
        status = self.library.lakh_c3_wait(self.handle, ticket, int(timeout_s * 1000))
        if status:
            raise native.last_error(status, f"c3 {operation}, rank {self.rank}")

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
    ) -> tuple[native.NativeCall, Any]:
        call = native.NativeCall(native.OPERATIONS[operation], dtype, op, root, source, target, count)
        table = None
        if splits is not None:
            table = (ctypes.c_int64 * len(splits))(*splits)
            call.splits = ctypes.cast(table, ctypes.POINTER(ctypes.c_int64))
        cached = None
        if not self.on_one_host or (codec != "none" and self.size > 1):
            if operation == "barrier":
                call.dtype = native.DTYPES["u8"]
            cached = self.schedules.get(operation, count, WIDTHS[call.dtype], root, splits, codec)
            call.steps = ctypes.cast(cached.steps, ctypes.POINTER(native.NativeStep))
            call.num_steps = len(cached.schedule.steps)
            call.scratch_count = cached.schedule.scratch_count
            call.wire_bytes = cached.schedule.wire_bytes
            call.codec = native.CODECS[codec]
            call.residual = residual
            call.seed = seed
        return call, (table, cached)

    # --- messages ------------------------------------------------------------------------------------------------

    def send(self, peer: int, tag: int, source: int, size_bytes: int) -> int:
        ticket = ctypes.c_int64(0)
        status = self.library.lakh_c3_send(self.handle, peer, tag, source, size_bytes, ctypes.byref(ticket))
        if status:
            raise native.last_error(status, f"c3 send to rank {peer}, rank {self.rank}")
        return ticket.value

    def recv(self, peer: int, tag: int, target: int, size_bytes: int) -> tuple[int, ctypes.c_int32]:
        """Receive from `peer`, or from any rank if it is -1. Returns the ticket and a variable for the sender."""
        ticket, sender = ctypes.c_int64(0), ctypes.c_int32(peer)
        status = self.library.lakh_c3_recv(
            self.handle, peer, tag, target, size_bytes, ctypes.byref(sender), ctypes.byref(ticket)
        )
        if status:
            raise native.last_error(status, f"c3 recv from rank {peer}, rank {self.rank}")
        return ticket.value, sender

    def is_message_done(self, ticket: int) -> bool:
        """Whether `wait_message` would return or raise immediately."""
        return bool(self.library.lakh_c3_message_done(self.handle, ticket))

    def wait_message(self, ticket: int, timeout_s: float) -> None:
        status = self.library.lakh_c3_wait_message(self.handle, ticket, int(timeout_s * 1000))
        if status:
            raise native.last_error(status, f"c3 message, rank {self.rank}")

    # --- state ---------------------------------------------------------------------------------------------------

    def failure(self) -> GroupFailure | None:
        """Why the group ended; None while it is usable."""
        text = ctypes.create_string_buffer(1024)
        dead = (ctypes.c_int32 * self.size)()
        with self._handle_lock:
            status = self.library.lakh_c3_failure(self.handle, text, len(text), dead, self.size)
        if not status:
            return None
        ranks = tuple(rank for rank in dead if rank >= 0)
        return GroupFailure(text.value.decode(errors="replace"), ranks, native.cause_of(status))

    def abort(self, reason: str) -> None:
        """End the group on every rank, with this reason."""
        self.library.lakh_c3_abort(self.handle, reason.encode()[:300])

    def set_timeout(self, timeout_s: float) -> None:
        self.library.lakh_c3_set_timeout(self.handle, int(timeout_s * 1000))

    def counters(self) -> dict[str, int]:
        """Totals since the start; zeros after `close`."""
        values = native.NativeCounters()
        with self._handle_lock:
            self.library.lakh_c3_read_counters(self.handle, ctypes.byref(values))
        return {name: int(getattr(values, name)) for name in native.COUNTERS}

    def waited_us(self) -> list[int]:
        """Time this rank has waited for each rank."""
        values = (ctypes.c_uint64 * self.size)()
        with self._handle_lock:
            self.library.lakh_c3_waited_us(self.handle, values)
        return [int(value) for value in values]

    def close(self) -> None:
        with self._handle_lock:
            handle, self.handle = self.handle, 0
        self.library.lakh_c3_close(handle)


WIDTHS = {0: 4, 1: 8, 2: 2, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1}
"""Bytes of an element, by its number in native.DTYPES."""


def _find_contradiction(records: list[dict[str, Any]], topology: Topology) -> str:
    """A problem in the ranks' records, the same text on every rank; "" if there is none."""
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
            return f"ranks {first} and {rank} are configured on one host ({name}) but run on two"
    return ""


def _connect(
    library: Any, handle: int, rank: int, topology: Topology, records: list[dict[str, Any]], timeout_s: float
) -> int:
    """Give the core all ranks and the transport to each other host. Returns 0 or the first failing status."""
    status = library.lakh_c3_join(
        handle,
        _int32s(topology.host_numbers),
        _int32s([one["pid"] for one in records]),
        _int32s([one["memory"] for one in records]),
        (ctypes.c_char_p * topology.size)(*[one["address"].encode() for one in records]),
        int(timeout_s * 1000),
        topology.wires["host"].streams,
        SINGLE_COPY_FROM_BYTES,
    )
    if status:
        return int(status)
    default = WIRES["host"]
    if topology.wires["host"] == default and len({place[1:] for place in topology.places}) == 1:
        return 0  # one rack: the core's default
    for peer in range(topology.size):
        tier = topology.distance(rank, peer)
        if tier != "memory" and (wire := topology.wires[tier]) != default:
            settings = (wire.streams, wire.chunk_KB << 10, wire.in_flight_KB << 10)
            if status := library.lakh_c3_wire(handle, peer, *settings):
                return int(status)
    return 0


def _int32s(values: Sequence[int]) -> Any:
    return (ctypes.c_int32 * len(values))(*values)


def _mix_in_secret_file(secret: bytes) -> bytes:
    """The group's secret. LAKH_C3_SECRET_FILE protects a group whose store strangers can read."""
    if not (path := os.environ.get("LAKH_C3_SECRET_FILE")):
        return secret
    place = f"LAKH_C3_SECRET_FILE={path}"
    try:
        key = Path(path).read_bytes()
    except OSError as error:
        raise UserError(place, error.strerror or str(error), "name a file that lakh can read") from None
    if len(key) < SECRET_BYTES:
        remedy = f"write {SECRET_BYTES} random bytes: head -c {SECRET_BYTES} /dev/urandom > FILE"
        raise UserError(place, f"holds {len(key)} bytes", remedy)
    return hmac.digest(key, secret, "sha256")


def _own_address() -> str:
    """The address of this host on the route to the rendezvous, where peers reach it too."""
    master = os.environ.get("MASTER_ADDR", "")
    if master in ("", "localhost", "127.0.0.1", "::1"):
        return "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))  # sends nothing; only consults the routing table
            return str(probe.getsockname()[0])
    except OSError as error:
        found = f"MASTER_ADDR={master} is not reachable from here ({error.strerror})"
        raise PeerLost("c3", found, "set LAKH_C3_ADDRESS to the address of this host") from None
