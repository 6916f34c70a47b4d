"""Tables in host memory and in files: which tier a table gets, and training with a table that memory cannot hold."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lakh import checkpoint
from lakh.checkpoint import loading
from lakh.errors import ConfigError, DiskFull, InfeasiblePlan
from lakh.spec import Data, Run
from lakh.spec.embedding import ClickNetwork, EmbeddingTable, Recommender, TableMemory
from lakh.workloads.dlrm.embedding.row_cache import file_rows
from lakh.workloads.dlrm.sharding.plans import plan_of

MIB = 2.0**-10  # of a GiB
TABLES = tuple(
    EmbeddingTable(name=name, rows=rows, width=32, pooling=pooling, optimizer="sgd")
    for name, rows, pooling in [("hot", 8192, 8), ("warm", 16384, 4), ("cold", 32768, 1)]  # 1, 2 and 4 MiB
)
TIMEOUT_S = 240


def run_with(ranks_kind: str = "table-wise", **memory: float | str) -> Run:
    limits = TableMemory(**memory)  # type: ignore[arg-type]
    settings = Recommender(samples=2000, tables=TABLES, network=ClickNetwork(), sharding=ranks_kind, memory=limits)
    return Run(name="tiers", workload="dlrm", dlrm=settings, data=Data(sequence=1, batch=32, micro_batch=16))


def tiers(run: Run, ranks: int) -> dict[str, str]:
    return {shard.table: shard.tier for shard in plan_of(run, ranks).shards}


@pytest.mark.parametrize(("kind", "ranks"), [("table-wise", 1), ("data-parallel", 2), ("auto", 1)])
def test_tables_with_few_lookups_move_to_slower_tiers(kind: str, ranks: int) -> None:
    run = run_with(kind, device_gib=1.5 * MIB, host_gib=2.5 * MIB, file_gib=8 * MIB)
    assert tiers(run, ranks) == {"hot": "device", "warm": "host", "cold": "file"}
    assert set(tiers(run_with(kind), ranks).values()) == {"device"}


def test_row_ranges_need_a_part_of_the_memory() -> None:
    run = run_with("row-wise", device_gib=1.5 * MIB, file_gib=8 * MIB)
    assert tiers(run, 2) == {"hot": "device", "warm": "device", "cold": "file"}


def test_the_planner_and_a_plan_file_decide_the_tier(tmp_path: Path) -> None:
    run = run_with("auto", device_gib=3 * MIB, file_gib=64 * MIB)
    planned = plan_of(run, 2)
    assert {shard.tier for shard in planned.shards} == {"device", "file"}
    shards = [dataclasses.asdict(shard) for shard in planned.shards]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"ranks": [0, 0], "node_size": 1, "shards": shards}))
    assert tiers(run_with(str(path)), 2) == {shard.table: shard.tier for shard in planned.shards}


def test_tables_that_fit_nowhere_and_bad_settings_are_refused() -> None:
    with pytest.raises(InfeasiblePlan, match=r"table cold: .* GiB on a rank do not fit"):
        plan_of(run_with(device_gib=3.5 * MIB), 1)
    with pytest.raises(ConfigError, match="cache_share: 2 is not a share"):
        TableMemory(cache_share=2)
    with pytest.raises(DiskFull, match="cannot hold"):
        file_rows("/nowhere", (2, 2))
    replicas = dataclasses.replace(run_with(device_gib=3.5 * MIB, host_gib=8 * MIB), mesh=dataclasses.replace(
        run_with().mesh, dp_replicate=2))  # fmt: skip
    with pytest.raises(InfeasiblePlan, match=r"mesh\.dp_replicate"):
        plan_of(replicas, 2)


def test_a_large_tensor_is_read_by_blocks_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {"table": torch.randn(50, 8), "vector": torch.randn(7), "number": torch.tensor(3.0)}
    facts = {"step": 1, "sequence_index": 0, "run_sha256": "0" * 64, "data_sha256": "0" * 64}
    checkpoint.save(str(tmp_path / "saved"), stored, **facts, attachments={})  # type: ignore[arg-type]
    monkeypatch.setattr(loading, "BLOCK_BYTES", 300)  # 9 rows
    found = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}
    checkpoint.load(str(tmp_path / "saved"), found)
    for name, tensor in stored.items():
        assert torch.equal(found[name], tensor), name


PROGRAM = """
import json, resource, sys
from pathlib import Path

import torch

from lakh import checkpoint, events
from lakh.spec import Checkpoints, Data, Optimizer, Run, Training
from lakh.spec.embedding import ClickNetwork, EmbeddingTable, Recommender, TableMemory
from lakh.trainer.loop import train

MIB = 2**20
torch.set_num_threads(1)
folder = Path(sys.argv[1])
network = ClickNetwork(dense_features=4, bottom=(8,), top=(16,))


def start(name, steps, memory, rows=2**20):
    large = EmbeddingTable(name="large", rows=rows, width=32, pooling=4)
    tables = (large, EmbeddingTable(name="small", rows=100, width=32, optimizer="rowwise-adam"))
    run = Run(
        name="tiers", workload="dlrm",
        dlrm=Recommender(samples=2000, tables=tables, network=network, memory=memory),
        data=Data(sequence=1, batch=64, micro_batch=32, prefetch=4),
        optim=Optimizer(lr=1e-2, clip_norm=0.05, schedule="constant", warmup_steps=0),
        train=Training(steps=steps, eval_every=3, eval_sequences=100, device="cpu", threads=1),
        checkpoint=Checkpoints(every=3, background="off"),
    )
    train(run, folder / name)
    return [event.loss for event in events.read(folder / name, rank=0) if event.kind == "step_done"]


def tensors(name):
    newest = checkpoint.find(folder / name)
    manifest = checkpoint.verify(newest)
    into = {key: torch.empty(at.shape, dtype=getattr(torch, at.dtype)) for key, at in manifest.tensors.items()}
    checkpoint.load(newest, into)
    return into


files = TableMemory(device_gib=1 / 1024, file_gib=1, folder=str(folder), cache_share=0.0)
start("compiles", 3, TableMemory(), rows=1000)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
used = int(status["VmData"].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + 64 * MIB, resource.RLIM_INFINITY))  # the table has 132 MiB
try:
    start("refused", 3, TableMemory())
    refused = ""
except Exception as error:
    refused = str(error)
start("file", 3, files)
# Reading a checkpoint maps its file privately, which counts although it takes no memory.
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
losses = {"file": start("file", 6, files)}  # continues; the events hold all steps
losses["memory"] = start("memory", 6, TableMemory())
hits = [dict(e.values).get("cache_hit_rate") for e in events.read(folder / "file", rank=0) if e.kind == "hook_metrics"]
one, other = tensors("memory"), tensors("file")
equal = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
names = [path.name for path in folder.iterdir()]
print(json.dumps({"losses": losses, "refused": refused, "equal": equal, "hits": hits, "names": sorted(names)}))
"""


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_a_table_larger_than_a_memory_limit_trains_saves_and_resumes(tmp_path: Path) -> None:
    """The process may allocate 64 MiB more; the table and its state have 132 MiB, and are in a file."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    plain_memory = os.environ | {"MIMALLOC_DISALLOW_ARENA_ALLOC": "1"}  # torch for ARM takes a GiB ahead otherwise
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=plain_memory)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["losses"]["file"] == found["losses"]["memory"]
    assert len(found["losses"]["file"]) == 6
    assert found["equal"]  # the checkpoint has every row, most of which no cache ever held
    assert "memory" in found["refused"].lower()
    assert 0 < found["hits"][-1] < 1
    assert found["names"] == ["compiles", "file", "memory", "refused"]  # the table's file has no name
