"""One rank of the parity matrix: trains a tiny model along the meshes it is given and prints losses and norms."""

import json
import sys
from dataclasses import replace

import torch

from lakh.errors import LakhError
from lakh.spec import Data, Mesh, Model, Optimizer, Run, Training
from lakh.spec.cluster import Tier, load_cluster
from lakh.trainer.optim import build_optimizer
from lakh.trainer.step import loss_sum, update
from lakh.trainer.traffic import Traffic
from lakh.trainer.world import World
from lakh.workloads.code.batch import Batch
from lakh.workloads.code.model import CodeModel, init_weights
from lakh.workloads.code.parallel import check, parallelise

# Pairs of ranks share a node, all of them a zone.
CLUSTER = replace(
    load_cluster("laptop"),
    tiers=(
        Tier(name="node", size=2, bandwidth_GBps=1.0, latency_us=1.0),
        Tier(name="zone", size=4, bandwidth_GBps=1.0, latency_us=1.0),
    ),
)
SEQUENCE, BATCH, VOCAB, STEPS = 64, 8, 128, 2


def micro_batches(step: int, packed: bool, part: int, parts: int) -> list[Batch]:
    rows = torch.randint(0, VOCAB, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
    mine = rows.chunk(parts)[part].split(1)
    if not packed:
        return [Batch(row[:, :-1], row[:, 1:]) for row in mine]
    place = torch.arange(SEQUENCE)[None]
    documents = (place >= 20).int() + (place >= 47).int()
    starts = torch.tensor([0, 20, 47])
    return [
        Batch(
            row[:, :-1],
            row[:, 1:],
            documents=documents,
            positions=place - starts[documents],
            cu_seqlens=torch.tensor([0, 20, 47, SEQUENCE], dtype=torch.int32),
            longest=27,
        )
        for row in mine
    ]


def play(world: World, case: dict) -> dict:
    run = Run(
        name="parity",
        model=Model(layers=4, width=64, heads=8, kv_heads=4, ffn=96, vocab=VOCAB, context=SEQUENCE, **case["model"]),
        mesh=Mesh(**case["mesh"]),
        data=Data(sequence=SEQUENCE, batch=BATCH, micro_batch=1),
        optim=Optimizer(lr=1e-3, warmup_steps=0, kind=case["optim"]),
        train=Training(steps=10, precision="f32", device="cpu", **case["train"]),
    )
    mesh = check(run, world.size)

    def build() -> CodeModel:
        model = CodeModel(run.model)
        init_weights(model, 1)
        return model

    model = parallelise(run, mesh, world.groups(mesh, 60), build, bf16=False, device=world.device)
    optimizer = build_optimizer(model, run.optim)
    losses, norms = [], []
    for step in range(STEPS):
        batches = micro_batches(step, case["packed"], mesh.data_rank(world.rank), mesh.data_ranks)
        with Traffic(CLUSTER) as traffic:
            done = update(run, model, optimizer, batches, step)
        (loss,) = world.sum(float(done.loss))
        losses.append(loss * mesh.pp / world.size)
        norms.append(float(done.grad_norm))
    batches = micro_batches(99, case["packed"], mesh.data_rank(world.rank), mesh.data_ranks)
    (heldout,) = world.sum(sum(float(loss_sum(model, batch)) for batch in batches))
    sent = {f"{tier} {kind}": count for (tier, kind), count in traffic.sent_bytes.items()}
    return {"sent": sent, "losses": losses, "norms": norms, "heldout": heldout * mesh.pp * mesh.data_ranks / world.size}


def main() -> None:
    backend = sys.argv[1]
    with World.join(Training(device="cpu", backend=backend, peer_timeout_s=60, threads=1)) as world:
        for case in json.loads(sys.argv[2]):
            try:
                found = play(world, case)
            except LakhError as error:
                found = {"refused": str(error)}
            if world.rank == 0:
                print(json.dumps({"name": case["name"], **found}), flush=True)


if __name__ == "__main__":
    main()
