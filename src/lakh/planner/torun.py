"""A plan becomes a run: the mesh, micro-batch and cluster of a layout, in the words that `lakh train` takes.

Only for dense Llama-style models, and for layouts that the trainer knows; anything else is refused with the reason.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from lakh import config
from lakh.errors import InfeasiblePlan
from lakh.planner.catalogue import Architecture
from lakh.planner.layout import RECOMPUTE, Layout
from lakh.spec.cluster import Cluster
from lakh.spec.mesh import Mesh
from lakh.spec.model import Model
from lakh.spec.run import Data, Run, Training

__all__ = ["mesh_of", "run_of", "with_layout"]


PLANNED = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "pp_schedule")  # what a layout says of a mesh


def mesh_of(layout: Layout) -> Mesh:
    """The mesh of a layout: shards inside, whole copies outside."""
    lo = layout
    shard = max(int(lo.shard) // int(lo.cp), 1) if int(lo.shard) > 1 else 1
    ranks = int(lo.data_ranks)
    tp, pp, cp, ep = (int(getattr(lo, axis)) for axis in ("tp", "pp", "cp", "ep"))
    schedule: Literal["1f1b", "interleaved"] = "interleaved" if int(lo.chunks) > 1 else "1f1b"
    return Mesh(dp_replicate=ranks // shard, dp_shard=shard, pp_schedule=schedule, tp=tp, pp=pp, cp=cp, ep=ep)


def with_layout(run: Run, layout: Layout, cluster: Cluster) -> Run:
    """The same run, laid out in this way on this cluster."""
    run.model.require_plain()
    mesh = mesh_of(layout)
    sets = [f"mesh.{name}={getattr(mesh, name)}" for name in PLANNED]
    sets += [f"data.micro_batch={int(layout.micro_batch)}", f"train.recompute={RECOMPUTE[int(layout.recompute)]}"]
    return config.with_sets(replace(run, cluster=cluster), sets, origin="the plan")


def run_of(name: str, model: Architecture, layout: Layout, cluster: Cluster, *, tokens: float, seed: int = 1) -> Run:
    """A run of a catalogue model, where lakh can train it."""
    if (
        model.experts
        or model.kv_rank
        or not model.gated
        or (model.head_dim and model.head_dim != model.width // model.heads)
    ):
        raise InfeasiblePlan(
            f"--model {name}", "is no dense Llama-style model: lakh plans it and does not train it", "leave --out away"
        )
    spec = Model(
        layers=model.layers,
        width=model.width,
        heads=model.heads,
        kv_heads=model.kv_heads,
        ffn=model.ffn,
        vocab=model.vocab,
        tied=model.tied,
        context=int(layout.sequence),
        rope_base=500_000.0,
    )
    batch, sequence = int(layout.batch), int(layout.sequence)
    steps = max(int(tokens // (batch * sequence)), 20)
    data = Data(sequence=sequence, batch=batch, micro_batch=int(layout.micro_batch))
    run = Run(
        name=name, seed=seed, model=spec, cluster=cluster, data=data, train=Training(steps=steps, precision="bf16")
    )
    return with_layout(run, layout, cluster)
