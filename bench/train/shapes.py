"""What `lakh bench train` measures: the shapes of models and batches, and the systems beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lakh.spec import Adapter, Model
from lakh.spec.model import Experts

__all__ = [
    "ABLATIONS",
    "FULL",
    "LAKH",
    "PEERS",
    "SHAPES",
    "BenchShape",
    "BenchSystem",
    "compared_systems",
    "systems_of",
]

_1_2B = Model(layers=24, width=2048, heads=16, kv_heads=8, ffn=5504, vocab=32064, tied=False, context=16384)
_DEMO = Model(layers=4, width=192, heads=6, kv_heads=2, ffn=512, vocab=4096, context=512)
_LORA = Adapter(rank=16)
_MOE_4B = Model(
    layers=16,
    width=2048,
    heads=16,
    kv_heads=8,
    ffn=2304,
    vocab=32064,
    tied=False,
    context=16384,
    experts=Experts(count=16, top_k=4, ffn=2304),
)
"""1.1B active of 4.0B parameters; 4 of 16 experts as in DBRX."""


@dataclass(frozen=True)
class BenchShape:
    model: Model
    sequence: int
    micro_batch: int
    document: int = 0
    """Length of the documents that a sequence is packed from, separated by masks; 0 for none."""
    adapter: Adapter | None = None
    """Low-rank adapters that are trained in place of the model."""


# Micro-batches of the GPU shapes: the best wave quantization of those that fit an H200 for every system. That of
# adapters is one that people tune with: few sequences, so that the state of full training is most of its memory.
SHAPES = {
    "demo": BenchShape(_DEMO, 256, 8),
    "162m-2k": BenchShape(
        Model(layers=16, width=768, heads=12, kv_heads=12, ffn=2048, vocab=32064, tied=False, context=2048), 2048, 66
    ),
    "15m-1k": BenchShape(Model(layers=6, width=320, heads=5, kv_heads=5, ffn=896, vocab=16384, context=1024), 1024, 4),
    "350k": BenchShape(
        Model(layers=4, width=80, heads=4, kv_heads=4, ffn=208, vocab=256, tied=False, context=128), 64, 8
    ),
    "20m-deep": BenchShape(
        Model(layers=24, width=256, heads=4, kv_heads=4, ffn=688, vocab=4096, tied=False, context=512), 128, 4
    ),
    "1.2b-4k": BenchShape(_1_2B, 4096, 17),
    "1.2b-16k": BenchShape(_1_2B, 16384, 5),
    "1.2b-16k-packed": BenchShape(_1_2B, 16384, 5, document=2048),
    "lora-demo": BenchShape(_DEMO, 256, 8, adapter=_LORA),
    "lora-1.2b": BenchShape(_1_2B, 4096, 2, adapter=_LORA),
    "moe-demo": BenchShape(
        replace(_DEMO, ffn=256, tied=False, experts=Experts(count=8, top_k=2, ffn=256)), 256, 4
    ),
    "moe-4b": BenchShape(_MOE_4B, 4096, 8),
}  # fmt: skip


@dataclass(frozen=True)
class BenchSystem:
    """One measured configuration: whose model, and with which features."""

    name: str
    is_peer: bool = False
    precision: str = "bf16"
    """bf16 (weights and moments too), mixed (bf16 products, float32 weights), f32; fp8 and fp8-mixed are bf16 and mixed
    with 8-bit products, and emulated-fp8 is f32 with operands rounded to 8 bits."""
    recipe: str = "tensorwise"
    """Scaling of 8-bit products."""
    bf16_ends: int = 0
    """First and also last blocks whose products are in bf16, where the others are in 8 bits."""
    compile: str = "auto"
    attention: str = "auto"
    recompute: str = "none"
    chunked_loss: bool = True
    kernels: bool = True
    graphs: bool = False
    full: bool = False
    """Of a shape with adapters: trains the whole model instead."""
    checkout: str = ""
    """Of a peer that is not installed."""

    @property
    def is_fp8(self) -> bool:
        return "fp8" in self.precision

    @property
    def features(self) -> str:
        scaling = [self.recipe] if self.is_fp8 else []
        scaling += [f"first and last {self.bf16_ends} in bf16"] if self.bf16_ends else []
        words = [self.precision, *scaling, f"compile {self.compile}", f"attention {self.attention}"]
        words += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        words += ["chunked loss"] if self.chunked_loss else []
        words += ["lakh's kernels"] if self.kernels and not self.is_peer else []
        words += ["CUDA graph"] if self.graphs else []
        words += ["all weights trained"] if self.full else []
        return ", ".join(words)

    def can_measure(self, shape: BenchShape) -> bool:
        """Peers have no document masks here; torchtitan ties no embeddings and has no adapters; peft has only those."""
        if not self.is_peer:
            return not self.full or shape.adapter is not None
        if shape.document or (self.name == "peft") != (shape.adapter is not None):
            return False
        return not (self.name == "torchtitan" and shape.model.tied)


LAKH = BenchSystem("lakh")
FULL = "lakh, all weights, float32"
"""The system that a row of adapters is compared with: full training as `lakh train` does it."""
FP8_RECIPES = ("tensorwise", "rowwise", "int8_forward", "blockwise")
PEERS = {
    "transformers": BenchSystem("transformers", is_peer=True, compile="model", attention="torch", chunked_loss=False),
    "torchtitan": BenchSystem("torchtitan", is_peer=True, compile="block", attention="torch", chunked_loss=False),
    "peft": BenchSystem("peft", is_peer=True, compile="model", attention="torch", chunked_loss=False),
}
ABLATIONS = (
    BenchSystem("eager", compile="none", attention="torch", chunked_loss=False),
    BenchSystem("+compile", compile="block", attention="torch", chunked_loss=False),
    BenchSystem("+attention", compile="block", chunked_loss=False),
    BenchSystem("+chunked loss", compile="block"),
    BenchSystem("whole-model compile", compile="model"),
    BenchSystem("selective recomputation", recompute="selective"),
    BenchSystem("full recomputation", recompute="full"),
    BenchSystem("float32 master weights", precision="mixed"),
    BenchSystem("CUDA graph", graphs=True),
)


def systems_of(shape: BenchShape, peers: list[BenchSystem], *, ablations: bool, fp8: bool) -> list[BenchSystem]:
    """The systems that are measured on a GPU for a shape, in order."""
    systems = [*peers, LAKH]
    if shape.adapter is not None:
        systems[-1] = replace(LAKH, graphs=True)  # as `lakh tune` decides at this size (decide_cuda_graphs)
        systems += [
            BenchSystem("lakh, all weights", full=True),
            BenchSystem(FULL, full=True, precision="mixed"),
            BenchSystem("lakh, budget of memory", recompute="budget", graphs=True),
        ]
    elif ablations:
        systems += [system for system in ABLATIONS if not (shape.model.experts and system.recompute == "selective")]
    else:
        systems.append(BenchSystem("lakh, float32 weights", precision="mixed"))
    if fp8:
        systems += [BenchSystem(f"lakh, fp8 {recipe}", precision="fp8", recipe=recipe) for recipe in FP8_RECIPES]
    return [system for system in systems if system.can_measure(shape)]


def compared_systems(systems: Sequence[BenchSystem]) -> list[BenchSystem]:
    """lakh, and what its ratio compares it with: of adapters full training, otherwise the first peer."""
    lakh = [system for system in systems if system.name == LAKH.name]
    full, peers = (
        [system for system in systems if system.name == FULL],
        [system for system in systems if system.is_peer],
    )
    return [*(full or peers)[:1], *lakh]
