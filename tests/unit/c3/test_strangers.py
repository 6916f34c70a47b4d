"""Connections of strangers, and of peers that send garbage, neither crash a rank nor exhaust it."""

import json
import secrets
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.unit.c3.hostile_peer import (
    CONTROL,
    DENIED,
    MESSAGES,
    STREAM,
    WELCOME,
    dial,
    group_of,
    join_two,
    receive,
    receive_half_header,
    total,
)
from torch.distributed import HashStore

from lakh.c3 import native
from lakh.c3.group import CommGroup
from lakh.errors import UserError

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(native.open_library() is None, reason="the native core is not built: apt-get install g++"),
]
PEER = Path(__file__).with_name("hostile_peer.py")


@pytest.mark.parametrize("lane", [CONTROL, MESSAGES, STREAM, -1])
def test_a_stranger_without_the_secret_is_denied(lane: int) -> None:
    def intrude(store: HashStore) -> None:
        uuid, _, address = group_of(store)
        with dial(address, uuid, secrets.token_bytes(32), lane) as connection:
            assert struct.unpack("<I", receive(connection, 36)[:4]) == (DENIED,)
            assert connection.recv(1) == b""

    assert join_two(total, intrude) == [3000.0, 3000.0]


def test_a_peer_learns_that_the_listener_has_the_secret() -> None:
    def query(store: HashStore) -> None:
        uuid, secret, address = group_of(store)
        with dial(address, uuid, secret, -1) as connection:
            assert struct.unpack("<I", receive(connection, 36)[:4]) == (WELCOME,)
            assert len(receive(connection, 320)) == 320

    assert join_two(total, query) == [3000.0, 3000.0]


@pytest.mark.parametrize(("sender", "lane"), [(1, CONTROL), (77, CONTROL), (-5, MESSAGES), (0, 5000)])
def test_only_lower_ranks_of_the_group_connect_on_known_lanes(sender: int, lane: int) -> None:
    def intrude(store: HashStore) -> None:
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
            CommGroup.join(HashStore(), 0, 1)


def test_a_flood_of_connections_leaves_descriptors_for_the_ranks() -> None:
    done = subprocess.run(
        [sys.executable, PEER, "flooded"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[3000.0, 3000.0]\n"


def test_a_rank_sleeps_until_the_rest_of_a_header_arrives() -> None:
    cpu_s, is_equal = receive_half_header()
    assert is_equal
    assert cpu_s < 0.1, "of one second: the rank polled all the time"


@pytest.mark.slow
@pytest.mark.parametrize("lane", [CONTROL, MESSAGES, STREAM])
def test_garbage_from_a_peer_ends_the_group_with_an_error(lane: int) -> None:
    seeds = [str(seed) for seed in range(6)]
    done = subprocess.run(
        [sys.executable, PEER, "garbage", str(lane), *seeds], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    errors = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(errors) == len(seeds)
    for error in errors:
        assert error
        assert error.isprintable(), error
