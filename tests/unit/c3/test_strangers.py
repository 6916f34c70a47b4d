"""Connections of strangers, and of peers that send garbage, neither crash a rank nor exhaust it."""

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from lakh.c3 import native
from lakh.c3.bootstrap import InProcessStore, exchange_records
from lakh.c3.group import CommGroup
from lakh.errors import LakhError, UserError

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(native.open_library() is None, reason="the native core is not built: apt-get install g++"),
]
HELLO, WELCOME, DENIED = 0x6C633303, 0x6C633304, 0x6C633305
CONTROL, MESSAGES, STREAM = 0, 1, 2
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


def join_two(body, before=None) -> list[object]:
    """Two ranks as threads on two emulated hosts; `before(store)` runs when both have joined."""
    store, joined, checked = InProcessStore(30), threading.Barrier(3), threading.Event()
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


def group_of(store: InProcessStore) -> tuple[bytes, bytes, str]:
    """(uuid, secret, address of rank 1) as a rank reads them from the store."""
    agreed = bytes.fromhex(store.get("c3/uuid").decode())
    return agreed[:16], agreed[16:], json.loads(store.get("c3/table"))[1]["address"]


@pytest.mark.parametrize("lane", [CONTROL, MESSAGES, STREAM, -1])
def test_a_stranger_without_the_secret_is_denied(lane: int) -> None:
    def intrude(store: InProcessStore) -> None:
        uuid, _, address = group_of(store)
        with dial(address, uuid, secrets.token_bytes(32), lane) as connection:
            assert struct.unpack("<I", receive(connection, 36)[:4]) == (DENIED,)
            assert connection.recv(1) == b""

    assert join_two(total, intrude) == [3000.0, 3000.0]


def test_a_peer_learns_that_the_listener_has_the_secret() -> None:
    def query(store: InProcessStore) -> None:
        uuid, secret, address = group_of(store)
        with dial(address, uuid, secret, -1) as connection:
            assert struct.unpack("<I", receive(connection, 36)[:4]) == (WELCOME,)
            assert len(receive(connection, 320)) == 320

    assert join_two(total, query) == [3000.0, 3000.0]


@pytest.mark.parametrize(("sender", "lane"), [(1, CONTROL), (77, CONTROL), (-5, MESSAGES), (0, 5000)])
def test_only_lower_ranks_of_the_group_connect_on_known_lanes(sender: int, lane: int) -> None:
    def intrude(store: InProcessStore) -> None:
        uuid, secret, address = group_of(store)
        with dial(address, uuid, secret, lane, sender=sender) as connection:
            receive(connection, 36)
            assert connection.recv(1) == b""

    assert join_two(total, intrude) == [3000.0, 3000.0]


def test_different_secrets_are_an_error_and_not_a_timeout(monkeypatch) -> None:
    monkeypatch.setattr("lakh.c3.group._mix_in_secret_file", lambda secret: secrets.token_bytes(32))
    began_s = time.monotonic()
    for error in join_two(total):
        assert isinstance(error, UserError)
        assert "another secret" in str(error)
    assert time.monotonic() - began_s < 20


def test_a_secret_file_must_be_readable_and_long_enough(tmp_path, monkeypatch) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"abc")
    for path, found in ((tmp_path / "missing", "No such file"), (short, "holds 3 bytes")):
        monkeypatch.setenv("LAKH_C3_SECRET_FILE", str(path))
        with pytest.raises(UserError, match=found):
            CommGroup.join(InProcessStore(5), 0, 1)


FLOOD = """
import resource, socket, sys, time
sys.path.insert(0, sys.argv[1])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
from test_strangers import join_two, total, group_of
import os, struct, subprocess
def flood(store):
    _, _, address = group_of(store)
    child = subprocess.Popen([sys.executable, "-c", '''
import resource, socket, struct, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
host, port = sys.argv[1].rsplit(":", 1)
kept = []
for number in range(800):
    s = socket.create_connection((host, int(port)), timeout=20)
    try:
        s.recv(20)
        s.sendall(struct.pack("<Iiii", 0x6C633303, 0, 0, 1) + number.to_bytes(16, "big") + bytes(48))
    except OSError:
        pass
    kept.append(s)
print("flooded", flush=True)
sys.stdin.read()
''', address], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"flooded\\n"
    time.sleep(0.3)
    assert len(os.listdir("/proc/self/fd")) < 200, len(os.listdir("/proc/self/fd"))
    flood.child = child
print(join_two(total, flood))
flood.child.kill()
"""


def test_a_flood_of_connections_leaves_descriptors_for_the_ranks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FLOOD, os.path.dirname(__file__)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[3000.0, 3000.0]\n"


GARBAGE = """
import random, struct, sys, threading
sys.path.insert(0, sys.argv[1])
from test_strangers import *
seed, lane = int(sys.argv[2]), int(sys.argv[3])
source = random.Random(seed)

def garbage():
    kind = source.randrange(4)
    if lane == CONTROL and kind:
        code, dead = source.choice([(7, 77), (-1, 0), (99, -1), (2, -9), (2**31 - 1, 0)])
        return struct.pack("<Iii", source.choice([2, 3, 2**32 - 1]), code, dead) + source.randbytes(308)
    if lane == MESSAGES and kind:
        return struct.pack("<Iiq", 0x6C63336D, source.choice([0, 5]), source.choice([2**62, 2**33 + 1, -1, 2**20, 2**63 - 1])) + source.randbytes(200)
    return source.randbytes(source.randrange(1, 5000))

store = InProcessStore(20)
uuid, secret = source.randbytes(16), source.randbytes(32)
store.set("c3/uuid", (uuid + secret).hex())

def impostor():
    record = dict(identity="elsewhere", place=["h0", "", ""], numa=0, pid=1, memory=0, address="127.0.0.1:9", topology="", problem="")
    address = exchange_records(store, "c3", 0, 2, record)[1]["address"]
    exchange_records(store, "c3/joined", 0, 2, {"problem": ""})
    connections = [dial(address, uuid, secret, CONTROL)]
    receive(connections[0], 36)
    if lane != CONTROL:
        connections.append(dial(address, uuid, secret, lane))
        receive(connections[-1], 36)
    try:
        connections[-1].sendall(garbage())
        time.sleep(0.5)
    except OSError:
        pass
    for connection in connections:
        connection.close()

thread = threading.Thread(target=impostor)
thread.start()
group = CommGroup.join(store, 1, 2, timeout_s=5, place=("h1", "", ""))
values = np.zeros(1000, np.float32)
try:
    if lane == MESSAGES:
        ticket, _ = group.recv(0, 5, values.ctypes.data, values.nbytes)
        group.wait_message(ticket, 20)
    else:
        total(group)
    print("no error")
except LakhError as error:
    print(f"error: {error}")
thread.join()
group.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("lane", [CONTROL, MESSAGES, STREAM])
def test_garbage_from_a_peer_ends_the_group_with_an_error(lane: int) -> None:
    for seed in range(6):
        done = subprocess.run(
            [sys.executable, "-c", GARBAGE, os.path.dirname(__file__), str(seed), str(lane)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, (seed, done.stderr)
        assert done.stdout.startswith("error: "), (seed, done.stdout)
        assert done.stdout.isprintable() or done.stdout.strip().isprintable()
