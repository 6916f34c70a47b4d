"""How a run is laid out over GPUs: degrees of parallelism, micro-batches, what is kept and what is recomputed.

Like a Shape, every field may be a number or an array, so that a Layout is one layout or a million. Ranks are numbered
from the inside outwards: tp, cp, then data ranks, then pipeline stages (`pp_inside` puts the stages before the data
ranks, as runs with very many replicas do). Knows no hardware.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from lakh.planner.shape import Array

__all__ = ["FULL", "GRAPHS", "HALF", "NONE", "RECOMPUTE", "SCHEDULES", "SELECTIVE", "Layout"]

NONE, SELECTIVE, FULL, HALF = 0, 1, 2, 3
RECOMPUTE = ("none", "selective", "full", "half")
GRAPHS = ("none", "layers", "step")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "lean", "zb-h1")


@dataclass(frozen=True, kw_only=True)
class Layout:
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
    """Ranks over which parameters, gradients and optimizer states are cut up (FSDP, ZeRO-3); 1 is none."""
    chunks: Array = 1.0
    """Interleaved model chunks of each pipeline stage."""
    run_ahead: Array = 2.0
    """Chunks by which a stage of an interleaved pipeline runs ahead of the next one. 2 hides the transfers between them
    (Megatron, torch); 1 is the least that costs no bubble, and holds the fewest activations ("lean")."""
    recompute: Array = 0.0
    """0 none, 1 selective (attention scores only), 2 full, 3 half (every other layer or matrix product)."""
    zero1: Array = 0.0
    """1 cuts the optimizer states up over all data ranks (ZeRO-1, distributed optimizer)."""
    zero2: Array = 0.0
    """1 cuts the gradients up in the same way: only those of two chunks (or layers) are whole at a time (ZeRO-2)."""
    sequence_parallel: Array = 0.0
    flash: Array = 1.0
    """1 for fused attention that never writes the score matrix."""
    native_attention: Array = 1.0
    """1 for a fused kernel written for the GPU at hand (FlashAttention-3, cuDNN 9), 0 for an older one."""
    eager: Array = 0.0
    """1 when element-wise operations run one by one, as in plain PyTorch without compilation."""
    overlap: Array = 1.0
    """1 hides gradient and parameter traffic behind computation where there is some."""
    tensor_overlap: Array = 0.0
    """1 hides tensor-parallel collectives behind matrix products (asynchronous TP, user buffers)."""
    offload: Array = 0.0
    """1 keeps the optimizer states in host memory."""
    gpipe: Array = 0.0
    """1 runs all forward passes before the first backward pass: every micro-batch is in flight."""
    zero_bubble: Array = 0.0
    """1 splits the backward pass so that weight gradients fill the pipeline's bubble (ZB-H1)."""
    experts_whole: Array = 1.0
    """1 gives each rank whole experts and spreads them over tensor ranks too; 0 cuts every expert up by tp."""
    node_dispatch: Array = 1.0
    """1 sends a token once to each node that wants it and copies it on inside; 0 sends it once per expert."""
    expert_overlap: Array = 0.0
    """1 hides the experts' exchanges behind the computation of another micro-batch."""
    graphed: Array = 0.0
    """1 replays a recorded graph of each layer's attention and router, 2 of the whole step (CUDA graphs)."""
    adapters: Array = 0.0
    """1 trains low-rank adapters beside frozen weights: no gradients, states or traffic of the weights themselves."""
    repeats_activation: Array = 0.0
    """1 computes the activation between an expert's products again in the backward pass."""
    repeats_latent: Array = 0.0
    """1 computes the up-projections of latent attention again in the backward pass."""
    pp_inside: Array = 0.0
    low_precision: Array = 0.0
    """Speed of linear layers' peak relative to bf16, minus one: 0 bf16, 1 fp8, 3 nvfp4."""
    gradient_bytes: Array = 2.0
    """Bytes of one gradient on the wire."""
    weight_bytes: Array = 2.0
    """Bytes of one stored weight: 2 beside a float32 master copy, 4 when the weight is its own master."""
    optimizer_bytes: Array = 12.0
    """Bytes of optimizer state per parameter: AdamW has a master copy and two moments in float32."""

    @property
    def data_ranks(self) -> Array:
        return self.gpus / (self.tp * self.pp * self.cp)

    @property
    def micro_batches(self) -> Array:
        """Micro-batches that each pipeline works off in one step."""
        return self.batch / (self.data_ranks * self.micro_batch)

    @property
    def schedule(self) -> str:
        """Of a single layout, in the words of SCHEDULES."""
        if self.zero_bubble or self.gpipe:
            return "zb-h1" if self.zero_bubble else "gpipe"
        return "1f1b" if int(self.chunks) == 1 else "lean" if float(self.run_ahead) < 2 else "interleaved"

    @property
    def data_stride(self) -> Array:
        """Distance in ranks between neighbours of a data-parallel group."""
        return self.tp * self.cp * np.where(self.pp_inside, self.pp, 1.0)

    @property
    def stage_stride(self) -> Array:
        return self.tp * self.cp * np.where(self.pp_inside, 1.0, self.data_ranks)

    def take(self, index: Any) -> Layout:
        """Some of the layouts of an array of them."""
        return replace(self, **{f.name: v[index] for f in fields(self) if np.ndim(v := getattr(self, f.name))})
