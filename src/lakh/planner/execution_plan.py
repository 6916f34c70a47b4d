"""How a run executes: degrees of parallelism, batch, schedule, what is sharded, overlapped and recomputed.

An `ExecutionPlan` is the planner's counterpart of a run's mesh, data and training settings. Every field may be a number
or a numpy array, so that it describes one plan or a million candidates. `plan_of_run` reads a run, `run_with_plan`
writes the plan back as settings that `lakh train` accepts.

Ranks are numbered from the inside outwards: tp, cp, data ranks, pipeline stages (`pp_inside` puts the stages before the
data ranks, as runs with very many replicas do).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from lakh import config
from lakh.planner.stacked import Array
from lakh.spec.cluster import Cluster
from lakh.spec.mesh import Mesh
from lakh.spec.model import Model
from lakh.spec.parallel_check import STAGES_PER_RANK
from lakh.spec.run import Data, Run, Training

__all__ = ["CUDA_GRAPHS", "RECOMPUTE", "SCHEDULES", "ExecutionPlan", "plan_of_run", "run_of_model", "run_with_plan"]

NONE, SELECTIVE, FULL, HALF = 0, 1, 2, 3
RECOMPUTE = ("none", "selective", "full", "half")
CUDA_GRAPHS = ("none", "layers", "step")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "lean", "zb-h1")


@dataclass(frozen=True, kw_only=True)
class ExecutionPlan:
    gpus: Array
    sequence: Array
    batch: Array
    """Sequences in one optimizer step."""
    micro_batch: Array = 1.0
    tp: Array = 1.0
    pp: Array = 1.0
    cp: Array = 1.0
    ep: Array = 1.0
    shard: Array = 1.0
    """Ranks that shard parameters, gradients and optimizer states (FSDP, ZeRO-3): dp_shard x cp of a mesh."""
    zero: Array = 0.0
    """ZeRO stage without `shard`: 0 none, 1 optimizer states, 2 also gradients, of which only those of two chunks (or
    layers) are whole at a time."""
    chunks: Array = 1.0
    """Interleaved model chunks per pipeline stage."""
    chunks_ahead: Array = 2.0
    """Chunks by which a stage of an interleaved pipeline runs ahead of the next one. 2 hides the transfers between them
    (Megatron, torch); 1 is the least that adds no bubble, and keeps the fewest activations ("lean")."""
    extra_warm_up: Array = 0.0
    """Forward passes that the first stage runs before its first backward pass beyond those of the schedule."""
    gpipe: Array = 0.0
    """1 runs all forward passes before the first backward pass: every micro-batch is in flight."""
    zero_bubble: Array = 0.0
    """1 splits the backward pass so that weight gradients fill the pipeline's bubble (ZB-H1)."""
    pp_inside: Array = 0.0
    recompute: Array = 0.0
    """Index into RECOMPUTE: none, selective (attention scores), full, half (every other layer or matrix product)."""
    recompute_expert_activation: Array = 0.0
    """1 recomputes the activation between an expert's matrix products."""
    recompute_latent: Array = 0.0
    """1 recomputes the up-projections of latent attention."""
    sequence_parallel: Array = 0.0
    flash: Array = 1.0
    """1 for fused attention, which never writes the score matrix."""
    native_attention: Array = 1.0
    """1 for a fused kernel written for this GPU (FlashAttention-3, cuDNN 9), 0 for an older one."""
    narrow_attention: Array = 0.0
    """1 computes attention in fp8, too."""
    fused_experts: Array = 0.0
    """1 computes an expert's matrix products, its activation and the casts to narrow types in one kernel."""
    eager: Array = 0.0
    """1 when each element-wise operation is its own kernel, as in PyTorch without compilation."""
    eager_rotary: Array = 0.0
    """1 when each operation of rotary positions is its own kernel, as in Megatron-Core for YaRN's scaled positions."""
    eager_loss: Array = 0.0
    """1 when each operation of the loss is its own kernel on float32 logits, and the host waits for the GPU once per
    micro-batch, as in programs before fused attention."""
    overlap: Array = 1.0
    """1 overlaps gradient and parameter traffic with computation."""
    context_overlap: Array = 1.0
    """1 passes keys and values round a ring while attention runs; 0 gathers them first, as Llama 3 did."""
    tensor_overlap: Array = 0.0
    """1 overlaps tensor-parallel collectives with matrix products (asynchronous TP, user buffers)."""
    expert_overlap: Array = 0.0
    """1 overlaps the all-to-all of experts with the computation of another micro-batch."""
    offload: Array = 0.0
    """1 keeps the optimizer states in host memory."""
    whole_experts: Array = 1.0
    """1 gives each rank whole experts and spreads them over tensor ranks too; 0 splits every expert over tp."""
    node_dispatch: Array = 1.0
    """1 sends a token once to each node that needs it and copies it inside; 0 sends it once per expert."""
    gathered_dispatch: Array = 0.0
    """1 when every tensor-parallel rank sends all tokens of its sequences to the experts, as `lakh train` does, and not
    only its own part of them."""
    cuda_graphs: Array = 0.0
    """Index into CUDA_GRAPHS: none, each layer's attention and router, or the full step."""
    adapters: Array = 0.0
    """1 trains low-rank adapters beside frozen weights: no gradients, states or traffic of the weights themselves."""
    low_precision: Array = 0.0
    """Peak of the linear layers relative to bf16, minus one: 0 bf16, 1 fp8, 3 nvfp4."""
    gradient_bytes: Array = 2.0
    """Bytes of one communicated gradient."""
    weight_bytes: Array = 2.0
    """Bytes of one stored weight: 2 with a float32 master copy, 4 when the weight is its own master."""
    optimizer_bytes: Array = 12.0
    """Bytes of optimizer state per parameter: AdamW has a master copy and two moments in float32."""

    @property
    def data_ranks(self) -> Array:
        return self.gpus / (self.tp * self.pp * self.cp)

    @property
    def micro_batches(self) -> Array:
        """Micro-batches of each pipeline in one step."""
        return self.batch / (self.data_ranks * self.micro_batch)

    @property
    def tensor_stride(self) -> Array:
        """Distance in ranks between neighbours of a tensor-parallel group."""
        return 1.0

    @property
    def context_stride(self) -> Array:
        return self.tp

    @property
    def data_stride(self) -> Array:
        """Distance in ranks between neighbours of a data-parallel group."""
        return self.tp * self.cp * np.where(self.pp_inside, self.pp, 1.0)

    @property
    def gradient_stride(self) -> Array:
        """The same where context ranks belong to the group: they hold shards and gradients too."""
        return self.data_stride / self.cp

    @property
    def stage_stride(self) -> Array:
        return self.tp * self.cp * np.where(self.pp_inside, 1.0, self.data_ranks)

    @property
    def expert_stride(self) -> Array:
        """Distance in ranks between neighbours of an expert-parallel group."""
        apart = self.tp * np.where(self.gathered_dispatch, 1.0, self.cp)
        return np.where(self.whole_experts, 1.0, apart)

    @property
    def schedule(self) -> str:
        """Of a single plan, one of SCHEDULES."""
        if self.zero_bubble or self.gpipe:
            return "zb-h1" if self.zero_bubble else "gpipe"
        return "1f1b" if int(self.chunks) == 1 else "lean" if float(self.chunks_ahead) < 2 else "interleaved"

    @property
    def mesh(self) -> Mesh:
        """The mesh of a single plan: shards inside, replicas outside."""
        shard = max(int(self.shard) // int(self.cp), 1) if int(self.shard) > 1 else 1
        schedule: Literal["1f1b", "interleaved"] = "interleaved" if int(self.chunks) > 1 else "1f1b"
        tp, pp, cp, ep = (int(getattr(self, axis)) for axis in ("tp", "pp", "cp", "ep"))
        replicas = int(self.data_ranks) // shard
        return Mesh(dp_replicate=replicas, dp_shard=shard, pp_schedule=schedule, tp=tp, pp=pp, cp=cp, ep=ep)

    @classmethod
    def of(cls, **values: float) -> ExecutionPlan:
        """A single plan; whole numbers and flags become floats, as in an array of plans."""
        return cls(**{name: float(value) for name, value in values.items()})

    def take(self, index: Any) -> ExecutionPlan:
        """Some of an array of plans."""
        return replace(self, **{f.name: v[index] for f in fields(self) if np.ndim(v := getattr(self, f.name))})

    def summary(self) -> dict[str, Any]:
        """A single plan in the terms of the command line."""
        return {
            **{name: int(getattr(self, name)) for name in ("tp", "pp", "cp", "ep")},
            "dp": int(self.data_ranks),
            **{name: int(getattr(self, name)) for name in ("shard", "micro_batch", "micro_batches", "chunks")},
            "recompute": RECOMPUTE[int(self.recompute)],
            "zero": 3 if int(self.shard) > 1 else int(self.zero),
            "offload": bool(self.offload),
            "expert_overlap": bool(self.expert_overlap),
            "graphs": CUDA_GRAPHS[int(self.cuda_graphs)],
            "adapters": bool(self.adapters),
            "schedule": self.schedule,
        }

    def __str__(self) -> str:
        shown = self.summary()
        axes = [f"{axis}={shown[axis]}" for axis in ("tp", "pp", "cp", "ep", "dp") if shown[axis] > 1]
        details = [f"micro-batch {shown['micro_batch']}", shown["schedule"], f"recompute {shown['recompute']}"]
        if shown["shard"] > 1:
            details.append(f"shard {shown['shard']}")
        elif shown["zero"]:
            details.append(f"zero-{shown['zero']}")
        details += ["offload"] * shown["offload"] + ["expert overlap"] * shown["expert_overlap"]
        return f"{' '.join(axes) or 'one GPU'} ({', '.join(details)})"


def plan_of_run(run: Run, world: int) -> ExecutionPlan:
    """How the trainer executes a run: FSDP2 over dp_shard (and cp), float32 master weights, bf16 products."""
    run.accumulation(world)  # refuses a batch that does not divide, with the reason
    mesh, recompute = run.mesh.resolve(world), run.train.recompute
    schedule = mesh.pp_schedule if mesh.pp > 1 else "1f1b"
    return ExecutionPlan.of(
        gpus=world,
        sequence=run.data.sequence,
        batch=run.data.batch,
        micro_batch=run.data.micro_batch,
        **{axis: getattr(mesh, axis) for axis in ("tp", "pp", "cp", "ep")},
        shard=mesh.dp_shard * mesh.cp,
        chunks=STAGES_PER_RANK[schedule],
        chunks_ahead=1 if schedule == "zero_bubble" else 2,
        gpipe=schedule == "gpipe",
        zero_bubble=schedule == "zero_bubble",
        low_precision=run.train.fp8,
        recompute=RECOMPUTE.index(recompute) if recompute in RECOMPUTE else FULL,
        sequence_parallel=mesh.tp > 1,
        whole_experts=0,
        node_dispatch=0,
        gathered_dispatch=1,
        eager=run.train.compile == "none",
        native_attention=run.train.attention in ("auto", "cudnn"),
        pp_inside=mesh.dp_replicate > 1,
        gradient_bytes=4,
        weight_bytes=4,
        optimizer_bytes=8 if run.optim.kind == "adamw" else 4,  # moments; the float32 weight is its own master
    )


def run_with_plan(run: Run, plan: ExecutionPlan, cluster: Cluster) -> Run:
    """The same run with the mesh, micro-batch and recomputation of a single plan."""
    run.model.require_trainable()
    planned = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "pp_schedule")
    sets = [f"mesh.{name}={getattr(plan.mesh, name)}" for name in planned]
    sets += [f"data.micro_batch={int(plan.micro_batch)}", f"train.recompute={RECOMPUTE[int(plan.recompute)]}"]
    return config.with_sets(replace(run, cluster=cluster), sets, origin="the plan")


def run_of_model(name: str, model: Model, plan: ExecutionPlan, cluster: Cluster, *, tokens: float) -> Run:
    """A run that trains a catalogue model by this plan."""
    model.require_trainable()
    batch, sequence = int(plan.batch), int(plan.sequence)
    data = Data(sequence=sequence, batch=batch, micro_batch=int(plan.micro_batch))
    train = Training(steps=max(int(tokens // (batch * sequence)), 20), precision="bf16")
    trained = replace(model, context=sequence)
    if not model.traits.has_learned_positions:
        trained = replace(trained, rope_base=500_000.0)
    return run_with_plan(Run(name=name, model=trained, cluster=cluster, data=data, train=train), plan, cluster)
