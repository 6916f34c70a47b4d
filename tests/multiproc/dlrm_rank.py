"""Train a small recommendation model on forked ranks under several sharding plans, and report how far the result is
from one process.

Arguments: folder, numbers of ranks. Prints one JSON document: number of ranks -> plan and backend -> differences. Also
saves a checkpoint and loads it on other numbers of ranks. Imports torch once and forks the ranks from there.
"""

import dataclasses
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lakh import checkpoint
from lakh.checkpoint.slices import TensorSlice, slice_of
from lakh.spec import Data, Optimizer, Run, Training
from lakh.spec.cluster import Tier, load_cluster
from lakh.spec.embedding import ClickNetwork, EmbeddingTable, Recommender
from lakh.tokens.loading.skips import SkipRanges
from lakh.trainer.launch.world import World
from lakh.trainer.step import update
from lakh.trainer.workloads.dlrm import DlrmWorkload
from lakh.workloads.dlrm.data import to_batches
from lakh.workloads.dlrm.samples import open_samples
from lakh.workloads.dlrm.sharding.network import SentBytes
from lakh.workloads.dlrm.sharding.plans import plan_of

STEPS, SHORT_STEPS, BATCH, TIMEOUT_S = 12, 5, 48, 100
CLIP_NORM = 0.05  # the gradients of the first steps are larger
KINDS = ("data-parallel", "table-wise", "column-wise", "row-wise", "table-row-wise")
OPTIMIZERS = ("sgd", "rowwise-adagrad", "rowwise-adam")
TABLES = tuple(
    EmbeddingTable(name=f"t{i}", rows=rows, width=16, pooling=pooling, optimizer=OPTIMIZERS[i % 3])
    for i, (rows, pooling) in enumerate([(3, 1), (50, 2), (200, 3), (1000, 4), (20, 1), (70, 2)])
)


def run_of(sharding: str, clip_norm: float = 0.0, steps: int = STEPS, **settings: str) -> Run:
    tier = Tier(name="node", size=2, bandwidth_GBps=1.0, latency_us=1.0)
    zone = Tier(name="zone", size=4, bandwidth_GBps=1.0, latency_us=1.0)
    network = ClickNetwork(dense_features=4, bottom=(8,), top=(16,))
    return Run(
        name="tiny",
        workload="dlrm",
        cluster=dataclasses.replace(load_cluster("laptop"), tiers=(tier, zone)),
        dlrm=Recommender(
            samples=2000,
            tables=TABLES,
            network=network,
            state_width=8,
            sharding=sharding,
            **settings,  # type: ignore[arg-type]
        ),
        data=Data(sequence=1, batch=BATCH, micro_batch=1),
        optim=Optimizer(lr=1e-2, clip_norm=clip_norm, weight_decay=0.0, warmup_steps=0),
        train=Training(steps=steps, device="cpu"),
    )


def mixed_plan(ranks: int, path: Path, *tiers: str) -> str:
    """Another kind for each table, and another tier; column slices in the reverse order of the ranks."""
    shards = []

    def add(table: EmbeddingTable, kind: str, rank: int, rows: tuple[int, int], columns: tuple[int, int]) -> None:
        facts = {"tier": tiers[TABLES.index(table) % len(tiers)], "cost_ms": 0.0, "bytes": 0}
        shards.append({"table": table.name, "kind": kind, "rank": rank, "rows": rows, "columns": columns, **facts})

    for i, table in enumerate(TABLES):
        kind = KINDS[i % 5]
        if kind == "data-parallel":
            for rank in range(ranks):
                add(table, kind, rank, (0, table.rows), (0, 16))
        elif kind == "table-wise":
            add(table, kind, ranks - 1, (0, table.rows), (0, 16))
        elif kind == "column-wise":
            add(table, kind, 1, (0, table.rows), (0, 8))
            add(table, kind, 0, (0, table.rows), (8, 16))
        else:
            members = range(ranks) if kind == "row-wise" else range(ranks - 2, ranks)
            cuts = [table.rows * k // len(members) for k in range(len(members) + 1)]
            for k, rank in enumerate(members):
                add(table, kind, rank, (cuts[k], cuts[k + 1]), (0, 16))
    path.write_text(json.dumps({"ranks": [0] * ranks, "node_size": 2, "shards": shards}))
    return str(path)


def plan_of_nodes(path: Path) -> str:
    """The plan of table-row-wise tables, called row-wise: its exchange has one level."""
    plan = plan_of(run_of("table-row-wise"), 4)
    shards = [{**dataclasses.asdict(shard), "kind": "row-wise"} for shard in plan.shards]
    path.write_text(json.dumps({"ranks": [0] * 4, "node_size": 2, "shards": shards}))
    return str(path)


def train(run: Run, world: World, micro_batches: int) -> tuple[dict[str, TensorSlice], SentBytes, float]:
    """(state of this rank, bytes sent, loss of the last of `run.train.steps` steps)"""
    workload = DlrmWorkload(run, world)
    writer = None
    model = workload.build_model(writer, is_new=True)  # type: ignore[arg-type]
    optimizer = workload.build_optimizer(model)
    run_pass = workload.build_pass(writer)  # type: ignore[arg-type]
    split = open_samples(run.dlrm, run.seed)
    exchange = model.tables.exchange  # type: ignore[union-attr]
    mine = BATCH // world.size
    loss = 0.0
    for step in range(run.train.steps):
        first = step * BATCH + world.rank * mine
        samples = split.clicks.read(split.training_numbers(SkipRanges(()), run.seed, first, mine))
        batches = to_batches(samples, mine // micro_batches, exchange)  # type: ignore[arg-type]
        clip_norm = run.optim.clip_norm
        loss = float(update(model, optimizer, batches, lr=1e-2, clip_norm=clip_norm, run_pass=run_pass).loss)
    state = {name: slice_of(tensor) for name, tensor in workload.state(model, optimizer).items()}
    return state, exchange.sent, loss  # type: ignore[union-attr]


def cases(world: World, folder: Path) -> dict[str, Run]:
    """Every kind and mix for all steps; clipping, codecs, tiers and levels of the exchange for a few."""
    short = functools.partial(run_of, steps=SHORT_STEPS)
    found = {kind: run_of(kind) for kind in KINDS}
    mixed = mixed_plan(world.size, folder / f"plan-{world.rank}.json", "device")
    found["mixed"] = run_of(mixed)
    if world.backend == "c3":
        return found
    if world.size > 2:  # two nodes of two ranks
        found["one level"] = short(plan_of_nodes(folder / f"nodes-{world.rank}.json"))
        found["two levels"] = short("table-row-wise")
        found["int8 levels"] = short("table-row-wise", forward_dtype="int8", backward_dtype="int8")
        return found
    found["auto"] = run_of("auto")
    found["short mixed"] = short(mixed)
    found["short tiers"] = short(mixed_plan(world.size, folder / f"tiers-{world.rank}.json", "file", "host"))
    for kind in ("data-parallel", "table-wise", "column-wise", "row-wise"):
        found[f"clipped {kind}"] = short(kind, CLIP_NORM)
    for dtype in ("f32", "bf16", "f16", "int8"):
        found[f"{dtype} forward"] = short("table-wise", forward_dtype=dtype)
        found[f"{dtype} backward"] = short("column-wise", backward_dtype=dtype)
    return found


def join(rank: int, ranks: int, backend: str, folder: Path) -> World:
    if backend == "c3":
        import lakh.c3.torch.backend  # noqa: F401 - registers the name
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/rendezvous-{ranks}-{backend}-{os.getppid()}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    return World(rank, ranks, torch.device("cpu"), backend)


def train_all(world: World, folder: Path) -> None:
    """Train every case; write the state of each, and a checkpoint of the mixed plan."""
    results = {}
    for name, run in cases(world, folder).items():
        state, sent, loss = train(run, world, 1)
        results[name] = ({key: (part.offset, part.local.clone()) for key, part in state.items()}, sent, loss)
        if name == "mixed" and world.backend == "gloo":
            facts = {"step": STEPS, "sequence_index": 0, "run_sha256": "0" * 64, "data_sha256": "0" * 64}
            saving = checkpoint.CheckpointSave(
                str(folder / "saved"), state, **facts, attachments={}, rank=world.rank, world=world.size
            )
            saving.write_now()
            saving.finish(world.gather, world.broadcast)
    torch.save(results, folder / f"rank-{world.rank}-{world.backend}.pt")


def load_all(world: World, folder: Path) -> None:
    """Load the checkpoint under other plans, on another number of ranks: the bits are those of the file."""
    whole: dict[str, torch.Tensor] = {}
    for name, stored in checkpoint.Manifest.read(str(folder / "saved")).tensors.items():
        whole[name] = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    checkpoint.load(str(folder / "saved"), whole)
    for kind in KINDS:
        workload = DlrmWorkload(run_of(kind), world)
        model = workload.build_model(None, is_new=True)  # type: ignore[arg-type]
        state = workload.state(model, workload.build_optimizer(model))
        checkpoint.load(str(folder / "saved"), state)
        for name, tensor in state.items():
            part = slice_of(tensor)
            box = tuple(slice(at, at + size) for at, size in zip(part.offset, part.local.shape, strict=True))
            assert torch.equal(part.local, whole[name][box]), (kind, name)


def fork_ranks(ranks: int, backend: str, folder: Path, work: Callable[[World, Path], None]) -> None:
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                world = join(rank, ranks, backend, folder)
                work(world, folder)
                dist.barrier()
                dist.destroy_process_group()
                code = 0
            except Exception:  # noqa: BLE001 - the parent reports it
                traceback.print_exc()
            os._exit(code)
        children.append(pid)
    if sum(os.waitpid(pid, 0)[1] for pid in children):
        sys.exit(f"a rank of {ranks} over {backend} failed")


def compare(single: dict[str, TensorSlice], parts: list[dict]) -> dict[str, object]:
    """How far the parts of all ranks are from the state of one process."""
    covered = {key: torch.zeros(part.shape, dtype=torch.bool) for key, part in single.items()}
    difference, is_equal = 0.0, True
    for part in parts:
        for key, (offset, tensor) in part.items():
            box = tuple(slice(at, at + size) for at, size in zip(offset, tensor.shape, strict=True))
            whole = single[key].local[box]
            covered[key][box] = True
            difference = max(difference, float((whole - tensor).abs().max()) if tensor.numel() else 0.0)
            is_equal = is_equal and torch.equal(whole, tensor)
    is_covered = all(bool(mask.all()) for mask in covered.values())
    return {"difference": difference, "is_equal": is_equal, "is_covered": is_covered}


def same_bits(results: dict, one: str, other: str) -> bool:
    """Whether a rank's state is the same in two cases."""
    left, right = results[one][0], results[other][0]
    return left.keys() == right.keys() and all(torch.equal(left[key][1], right[key][1]) for key in left)


def report_of(ranks: int, folder: Path) -> dict[str, object]:
    alone = World(0, 1, torch.device("cpu"), "none")
    runs = {"long": run_of("auto"), "short": run_of("auto", steps=SHORT_STEPS)}
    runs["clipped"] = run_of("auto", CLIP_NORM, SHORT_STEPS)
    single = {name: train(run, alone, ranks) for name, run in runs.items()}
    found: dict[str, object] = {}
    losses = {name: loss for name, (_, _, loss) in single.items()}
    report: dict[str, object] = {"losses": losses, "cases": found}
    for backend in ("gloo", "c3"):
        fork_ranks(ranks, backend, folder, train_all)
        parts = [torch.load(folder / f"rank-{rank}-{backend}.pt", weights_only=False) for rank in range(ranks)]
        for name in parts[0]:
            like = "clipped" if name.startswith("clipped") else "long" if name in (*KINDS, "mixed", "auto") else "short"
            found[f"{name}, {backend}"] = {
                **compare(single[like][0], [part[name][0] for part in parts]),
                "like": like,
                "sent_bytes": [dict(part[name][1].total) for part in parts],
                "between_nodes": [dict(part[name][1].between_nodes) for part in parts],
                "loss": sum(part[name][2] for part in parts) / ranks,
            }
        if "one level" in parts[0]:
            report["levels_are_equal"] = all(same_bits(part, "one level", "two levels") for part in parts)
        if "short tiers" in parts[0]:
            report["tiers_are_equal"] = all(same_bits(part, "short tiers", "short mixed") for part in parts)
    for other in (1, 3) if ranks == 2 else (3,):
        fork_ranks(other, "gloo", folder, load_all)
    return report


def main() -> None:
    torch.set_num_threads(1)
    reports = {}
    for ranks in map(int, sys.argv[2:]):
        folder = Path(sys.argv[1]) / str(ranks)
        folder.mkdir()
        reports[ranks] = report_of(ranks, folder)
    sys.stdout.write(json.dumps(reports))


if __name__ == "__main__":
    main()
