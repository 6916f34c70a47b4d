"""A peer written in Python that speaks the handshake of c3, and programs in which strangers and peers misbehave.

python hostile_peer.py flooded               two ranks, 800 connections of a stranger, 256 descriptors
python hostile_peer.py garbage LANE SEED...  a rank whose peer has the secret and sends garbage on a lane
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import hmac
import json
import os
import random
import resource
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
from torch.distributed import HashStore

from lakh.c3 import native
from lakh.c3.bootstrap import exchange_records
from lakh.c3.group import CommGroup
from lakh.errors import LakhError

HELLO, WELCOME, DENIED = 0x6C633303, 0x6C633304, 0x6C633305
CONTROL, MESSAGES, STREAM = 0, 1, 2
ENVELOPE, HEADER = 0x6C63336D, 0x6C633378
STORE_TIMEOUT = timedelta(seconds=60)
JOIN_TIMEOUT_S = 20.0
FLOOD = Path(__file__).with_name("stranger_flood.py")
HANG_S = 100.0
"""A program that takes longer writes the stack of every thread to stderr and ends."""
F32, SUM = native.DTYPES["f32"], native.OPS["sum"]


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return data


def dial(address: str, uuid: bytes, secret: bytes, lane: int, *, sender: int = 0, to: int = 1) -> socket.socket:
    """The dialler's side of the handshake, up to the Hello."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    challenge = receive(connection, 20)
    hello = struct.pack("<Iiii", HELLO, lane, sender, to) + uuid + secrets.token_bytes(16)
    proof = hmac.digest(secret, b"c3 dialler".ljust(16, b"\0") + challenge + hello, hashlib.sha256)
    connection.sendall(hello + proof)
    return connection


def join_two(body: Callable[[CommGroup], object], before: Callable[[HashStore], None] | None = None) -> list[object]:
    """Two ranks as threads on two emulated hosts; `before(store)` runs when both have joined."""
    store, joined, checked = HashStore(), threading.Barrier(3), threading.Event()
    results: list[object] = [None, None]

    def run(rank: int) -> None:
        group = CommGroup.join(store, rank, 2, timeout_s=30, place=(f"h{rank}", "", ""))
        try:
            joined.wait(30)
            checked.wait(60)
            results[rank] = body(group)
        except LakhError as error:
            results[rank] = error
        finally:
            group.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    joined.wait(30)
    try:
        if before is not None:
            before(store)
    finally:
        checked.set()
        for thread in threads:
            thread.join(60)
    return results


def total(group: CommGroup) -> float:
    values = np.full(1000, group.rank + 1, np.float32)
    group.run("all_reduce", F32, SUM, -1, values.ctypes.data, values.ctypes.data, values.size)
    return float(values.sum())


def group_of(store: HashStore) -> tuple[bytes, bytes, str]:
    """(uuid, secret, address of rank 1) as a rank reads them from the store."""
    agreed = bytes.fromhex(store.get("c3/uuid").decode())
    return agreed[:16], agreed[16:], json.loads(store.get("c3/table"))[1]["address"]


def flooded() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    strangers: list[subprocess.Popen[bytes]] = []

    def flood(store: HashStore) -> None:
        command = [sys.executable, FLOOD, group_of(store)[2]]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        strangers.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"connected\n"
        time.sleep(0.3)
        assert len(os.listdir("/proc/self/fd")) < 200

    print(join_two(total, flood))
    for process in strangers:
        process.kill()


def make_garbage(source: random.Random, lane: int) -> bytes:
    """Random bytes, or a plausible message with numbers out of range."""
    if lane == CONTROL and source.randrange(4):
        code, dead = source.choice([(7, 77), (-1, 0), (99, -1), (2, -9), (2**31 - 1, 0)])
        return struct.pack("<Iii", source.choice([2, 3, 2**32 - 1]), code, dead) + source.randbytes(308)
    if lane == MESSAGES and source.randrange(4):
        length = source.choice([2**62, 2**33 + 1, -1, 2**20, 2**63 - 1])
        return struct.pack("<Iiq", ENVELOPE, source.choice([0, 5]), length) + source.randbytes(200)
    return source.randbytes(source.randrange(1, 5000))


def join_hostile(
    source: random.Random, lane: int, behave: Callable[[socket.socket], None]
) -> tuple[CommGroup, threading.Thread]:
    """Rank 1 of a group in which rank 0 connects on `lane` and does `behave(connection)` in a thread."""
    store = HashStore()
    store.set_timeout(STORE_TIMEOUT)
    uuid, secret = source.randbytes(16), source.randbytes(32)
    store.set("c3/uuid", (uuid + secret).hex())

    def be_rank_0() -> None:
        record = {"identity": "elsewhere", "place": ["h0", "", ""], "numa": 0, "pid": 1, "memory": 0}
        record |= {"address": "127.0.0.1:9", "topology": "", "problem": ""}
        address = exchange_records(store, "c3", 0, 2, record)[1]["address"]
        exchange_records(store, "c3/joined", 0, 2, {"problem": ""})
        connections = []
        for number in dict.fromkeys((CONTROL, lane)):
            connections.append(dial(address, uuid, secret, number))
            receive(connections[-1], 36)
        with contextlib.suppress(OSError):  # the rank has already closed it
            behave(connections[-1])
        for connection in connections:
            connection.close()

    thread = threading.Thread(target=be_rank_0, daemon=True)
    thread.start()
    return CommGroup.join(store, 1, 2, timeout_s=JOIN_TIMEOUT_S, place=("h1", "", "")), thread


def receive_garbage(seed: int, lane: int) -> str:
    """The error of the rank, or "" if there is none."""
    source = random.Random(seed)

    def send_garbage(connection: socket.socket) -> None:
        connection.sendall(make_garbage(source, lane))
        time.sleep(0.5)

    group, thread = join_hostile(source, lane, send_garbage)
    try:
        if lane == MESSAGES:
            values = np.zeros(1000, np.float32)
            ticket, _ = group.recv(0, 5, values.ctypes.data, values.nbytes)
            group.wait_message(ticket, 20)
        else:
            total(group)
        return ""
    except LakhError as error:
        return str(error)
    finally:
        thread.join(60)
        group.close()


def receive_half_header() -> tuple[float, bool]:
    """A peer sends a header in two parts. The CPU seconds of the thread that waits for a second, and whether it
    receives what was sent."""
    sent = np.arange(1000, dtype=np.float32)
    first_operation, any_op = 1, 0
    header = struct.pack(
        "<IIiiiiqq", HEADER, first_operation, native.OPERATIONS["broadcast"], F32, any_op, 0, sent.size, sent.nbytes
    )
    clock = time.pthread_getcpuclockid(threading.get_ident())
    used_s, received = [], threading.Event()

    def send_in_parts(connection: socket.socket) -> None:
        connection.sendall(header[:20])
        time.sleep(0.5)  # the rank is now waiting for the rest
        before_s = time.clock_gettime(clock)
        time.sleep(1.0)
        used_s.append(time.clock_gettime(clock) - before_s)
        connection.sendall(header[20:] + sent.tobytes())
        received.wait(60)

    group, thread = join_hostile(random.Random(0), STREAM, send_in_parts)
    values = np.zeros_like(sent)
    try:
        group.run("broadcast", F32, any_op, 0, values.ctypes.data, values.ctypes.data, values.size)
    finally:
        received.set()
        thread.join(60)
        group.close()
    return used_s[0], bool((values == sent).all())


if __name__ == "__main__":
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    match sys.argv[1:]:
        case ["flooded"]:
            flooded()
        case ["garbage", lane, *seeds]:
            for seed in map(int, seeds):
                print(json.dumps(receive_garbage(seed, int(lane))), flush=True)
