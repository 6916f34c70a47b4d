"""The ranks of the parity matrix: train a tiny model on the given meshes and report losses and norms.

Imports torch once and forks every rank from there: importing takes longer than the training. Reads one question per
line of stdin ({"ranks", "backend", "cases", "folder", "timeout_s"}) and answers each with one line on stdout.
"""

import json
import os
import signal
import sys
import time
import traceback
from dataclasses import replace

import torch
import torch._dynamo  # the optimizers and pipelines want it: before the ranks are forked

from lakh import checkpoint, config
from lakh.errors import LakhError
from lakh.spec import Adapter, Data, Mesh, Model, Optimizer, Run, Training
from lakh.spec.cluster import Tier, load_cluster
from lakh.spec.mesh import AXES
from lakh.spec.parallel_check import check_parallelism
from lakh.trainer.launch.world import World
from lakh.trainer.observability.traffic import TrafficCounter
from lakh.trainer.optim.optimizer import build_optimizer, named_state
from lakh.trainer.optim.schedule import learning_rate
from lakh.trainer.step import loss_sum, objective_of, update
from lakh.workloads.code.adapters import add_adapters
from lakh.workloads.code.attention import Documents
from lakh.workloads.code.batch import Batch
from lakh.workloads.code.model import CodeModel, init_weights
from lakh.workloads.code.parallel import parallelise

# Pairs of ranks share a node, all of them a zone.
CLUSTER = replace(
    load_cluster("laptop"),
    tiers=(
        Tier(name="node", size=2, bandwidth_GBps=1.0, latency_us=1.0),
        Tier(name="zone", size=4, bandwidth_GBps=1.0, latency_us=1.0),
    ),
)
SEQUENCE, VOCAB = 64, 128


def micro_batches(step: int, case: dict, part: int, parts: int) -> list[Batch]:
    rows = torch.randint(0, VOCAB, (case["batch"], SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
    mine = rows.chunk(parts)[part].split(1)
    if not case["packed"]:
        return [Batch(row[:, :-1], row[:, 1:]) for row in mine]
    place = torch.arange(SEQUENCE)[None]
    documents = (place >= 20).int() + (place >= 47).int()
    starts = torch.tensor([0, 20, 47])
    return [
        Batch(
            row[:, :-1],
            row[:, 1:],
            positions=place - starts[documents],
            documents=Documents.padded(torch.tensor([0, 20, 47, SEQUENCE], dtype=torch.int32), 27, SEQUENCE),
        )
        for row in mine
    ]


def run_of(case: dict, mesh: dict) -> Run:
    sizes = {"width": 64, "heads": 8, "kv_heads": 4, "ffn": 96, "vocab": VOCAB, "context": SEQUENCE}
    return Run(
        name="parity",
        init_from="built below" if case["adapter"] else "",
        adapter=Adapter(rank=case["adapter"]),
        model=config.from_dict(Model, {**sizes, **case["model"]}, origin="case"),
        mesh=Mesh(**{**mesh, "order": tuple(mesh.get("order", AXES))}),
        data=Data(sequence=SEQUENCE, batch=case["batch"], micro_batch=1),
        optim=Optimizer(lr=1e-3, warmup_steps=0, kind=case["optim"]),
        train=Training(steps=10, precision="f32", device="cpu", **case["train"]),
    )


def build_all(world: World, run: Run, mesh: Mesh, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    def build() -> CodeModel:
        model = CodeModel(run.model)
        init_weights(model, seed)
        if run.adapter.rank:
            add_adapters(model, run.adapter, seed)
        return model

    model = parallelise(run, mesh, world.groups(mesh, 60), build, bf16=False, device=world.device)
    return model, build_optimizer(model, run.optim)


def play(world: World, case: dict, folder: str) -> dict:
    """The steps of the case, then the held-out loss; one process reports it after each step."""
    run = run_of(case, case["mesh"])
    mesh = check_parallelism(run, world.size)
    model, optimizer = build_all(world, run, mesh, seed=1)
    losses, norms, heldout = [], [], []
    for step in range(case["steps"]):
        if step == 1 and case["then"] is not None:  # resume elsewhere, into weights that are other ones
            save(world, mesh, folder, named_state(model, optimizer))
            run = run_of(case, case["then"])
            mesh = check_parallelism(run, world.size)
            model, optimizer = build_all(world, run, mesh, seed=2)
            checkpoint.load(folder, named_state(model, optimizer))
        batches = micro_batches(step, case, mesh.data_rank(world.rank), mesh.data_ranks)
        with TrafficCounter(CLUSTER) as traffic:
            done = update(
                model,
                optimizer,
                batches,
                lr=learning_rate(step, run.optim, run.train.steps),
                clip_norm=run.optim.clip_norm,
                objective=objective_of(run.train),
            )
        (loss,) = world.sum(float(done.loss))
        losses.append(loss * mesh.pp / world.size)
        norms.append(float(done.grad_norm))
        if step == case["steps"] - 1 or world.size == 1:
            batches = micro_batches(99, case, mesh.data_rank(world.rank), mesh.data_ranks)
            (total,) = world.sum(sum(float(loss_sum(model, batch)) for batch in batches))
            heldout.append(total * mesh.pp * mesh.data_ranks / world.size)
    sent = {f"{tier} {kind}": count for (tier, kind), count in traffic.sent_bytes.items()}
    return {"sent": sent, "losses": losses, "norms": norms, "heldout": heldout}


def save(world: World, mesh: Mesh, folder: str, tensors: dict[str, torch.Tensor]) -> None:
    facts = {"step": 1, "sequence_index": 0, "run_sha256": "0" * 64, "data_sha256": "0" * 64}
    facts |= {"rank": world.rank, "world": world.size, "writes_whole": mesh.leads_stage(world.rank)}
    part = checkpoint.CheckpointSave(folder, tensors, attachments={}, **facts)
    part.write_now()
    outcome = part.try_finish(world.gather, world.broadcast)
    assert not isinstance(outcome, LakhError), outcome


def be_a_rank(rank: int, ranks: int, backend: str, cases: list[dict], folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LAKH_RENDEZVOUS=f"{folder}/meeting")
    found = {}
    with World.join(Training(device="cpu", backend=backend, peer_timeout_s=60, threads=1)) as world:
        for number, case in enumerate(cases):
            try:
                found[case["name"]] = play(world, case, f"{folder}/checkpoint-{number}")
            except LakhError as error:
                found[case["name"]] = {"refused": str(error)}
    if rank == 0:
        with open(f"{folder}/found.json", "w") as file:
            json.dump(found, file)


def fork_a_rank(rank: int, ranks: int, backend: str, cases: list[dict], folder: str) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(os.open(f"{folder}/rank-{rank}.err", os.O_WRONLY | os.O_CREAT, 0o600), 2)
        be_a_rank(rank, ranks, backend, cases, folder)
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it was, the test shows it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # what the parent has open is the parent's


def ask(ranks: int, backend: str, cases: list[dict], folder: str, timeout_s: float) -> dict:
    """What the ranks found, or {"failed": why}."""
    children = {fork_a_rank(rank, ranks, backend, cases, folder): rank for rank in range(ranks)}
    until_s = time.monotonic() + timeout_s
    failed = []
    while children:
        for child, rank in list(children.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                del children[child]
                if status:
                    with open(f"{folder}/rank-{rank}.err") as file:
                        failed.append(f"rank {rank} ended with {status}: {file.read()[-2000:]}")
        if children and time.monotonic() > until_s:
            failed.append(f"ranks {sorted(children.values())} were not done after {timeout_s:g} s")
            for child in children:
                os.kill(child, signal.SIGKILL)
            until_s = float("inf")
        time.sleep(0.02)
    if failed:
        return {"failed": "\n".join(failed)}
    with open(f"{folder}/found.json") as file:
        return json.load(file)


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(ask(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
