"""A run on two nodes loses one with its memory, and restores its state from the memory of the other."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
from tests.forks import Forks

from lakh import events

pytestmark = [pytest.mark.timeout(280), pytest.mark.slow]

RUN_TIMEOUT_S = 120.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def train_on_two_nodes(forks: Forks, arguments: list[str], memory: Path) -> list[tuple[int, str]]:
    """Start one rank on each of two nodes, as torchrun does. Returns their exit codes and outputs."""
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = []
    for rank in (0, 1):
        node = memory / f"node-{rank}"
        node.mkdir(parents=True, exist_ok=True)
        environment = {**common, "RANK": str(rank), "LAKH_MEMORY_DIR": str(node)}
        ranks.append(forks.start("lakh", *arguments, "--json", **environment))
    try:
        ended = [rank.finish(RUN_TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.end()
    return [(rank.returncode, rank.stdout) for rank in ended]


def test_a_lost_node_takes_its_state_from_the_memory_of_another(
    tiny_recipe: Path, tmp_path: Path, train_in_process, forks: Forks
) -> None:
    sets = ["--set", "checkpoint.every=5", "--set", "checkpoint.memory_every=3"]  # step 6 is only in memory
    calm = train_in_process(tiny_recipe, tmp_path / "calm")
    run_dir, memory = tmp_path / "run", tmp_path / "memory"
    train = ["train", str(tiny_recipe), "--out", str(run_dir), *sets]
    killed = train_on_two_nodes(forks, [*train, "--fault", "kill(rank=1, step=8)"], memory)
    assert [code for code, _ in killed] == [75, -9]
    shutil.rmtree(memory / "node-1")
    (_, output), (code, _) = train_on_two_nodes(forks, train, memory)
    assert code == 0
    found = json.loads(output.splitlines()[-1])
    assert found["stream_sha256"] == calm["stream_sha256"]
    assert found["val_loss"] == pytest.approx(calm["val_loss"], abs=1e-5)
    restored = [event for event in events.read(run_dir) if isinstance(event, events.MemoryRestored)]
    assert [(event.step, list(event.received)) for event in restored] == [(6, [1])]
    assert list(memory.glob("node-*/lakh-*")) == []  # the run is saved: its copies are removed
