"""`CodeModel`: the decoder that lakh trains, built from its architecture's description (architectures/).

Shapes: B batch, T tokens of a sequence, W width, V vocabulary.

Parameters keep the names of the architecture's table, which checkpoints, exports and sharding use. Operations come
from one `ModelOps` (ops.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lakh.spec.model import Model
from lakh.workloads.code.adapted_ops import adapted_ops, low_rank
from lakh.workloads.code.architectures import architecture_of, parameters
from lakh.workloads.code.attention import AttentionVariant, Documents
from lakh.workloads.code.kernels import nf4
from lakh.workloads.code.kernels.low_rank_block import widened
from lakh.workloads.code.loss import linear_cross_entropy, sequence_losses
from lakh.workloads.code.objective import PLAIN, Objective
from lakh.workloads.code.ops import ModelOps, Rope, local, rotary_tables, softcap

__all__ = ["Block", "CodeModel", "init_weights"]

INIT_STD = 0.02
DEFAULT_OPS = ModelOps()


class Weight(nn.Module):
    """The weight of a norm, a bias, or the matrices of all experts."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


class Block(nn.Module):
    """One decoder block: the parameters of its architecture, which computes with them (`LayerWeights`)."""

    def __init__(self, spec: Model, layer: int) -> None:
        super().__init__()
        self.spec, self.ops, self.layer = spec, DEFAULT_OPS, layer
        self.variant = AttentionVariant.of(spec, layer)
        self.architecture = architecture_of(spec)
        self.adapter_scale: float | None = None
        """Of the low-rank adapters, where the matrices have some (adapters.py)."""
        self._vectors: dict[str, nn.Module] = {}
        self._fused: dict[str, list[nn.Module]] = {}
        self._frozen: dict[str, Tensor] = {}
        """Fused matrices that are not trained, whose parts are views of them (`fuse_frozen`)."""
        self._scales: dict[str, Tensor] = {}
        """Of those that are in 4 bits."""
        self._wide: dict[str, Tensor] = {}
        """Of those that have adapters, where the operations of a block write these beside them (low_rank_block.py)."""
        has_experts = spec.experts is not None and spec.experts.are_in(layer)
        self.load: Tensor | None
        """Of the experts: the sum of their shares of all choices, over the micro-batches since it was last read."""
        self.register_buffer("load", torch.zeros(spec.num_experts) if has_experts else None, persistent=False)
        for name, info in self.architecture.block_parameters(spec).items():
            if not info.is_in(layer):
                continue
            *path, last = name.split(".")
            parent: nn.Module = self
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            is_matrix = len(info.shape) == 2
            module = nn.Linear(info.shape[1], info.shape[0], bias=False) if is_matrix else Weight(*info.shape)
            parent.add_module(last, module)
            if info.fused:
                self._fused.setdefault(info.fused, []).append(module)
            else:
                self._vectors[name] = module

    def matrix(self, name: str, dtype: torch.dtype) -> Tensor:
        """The matrices are separate tensors, so that checkpoints, exports and sharding see plain names; concatenating
        them costs one pass over the weights, negligible beside the thousands of tokens of a step."""
        modules = self._fused[name]
        scales = self._scales.get(name)
        if name in self._frozen:
            whole = self._frozen[name] if scales is not None else self._frozen[name].to(dtype)
        else:
            parts = [local(module.weight) for module in modules]  # type: ignore[arg-type]
            whole = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=max(parts[0].dim() - 2, 0))).to(dtype)
        if self.adapter_scale is None:
            return whole
        wide = self._wide.get(name)
        return low_rank(whole, modules, self.adapter_scale, scales, wide if whole.dtype == dtype else None)

    def fuse_frozen(self, bits: int) -> None:
        """Concatenate frozen matrices once and for all, those with adapters in 4 `bits` where asked. Call when the
        weights are where they stay."""
        for name, modules in self._fused.items():
            weights: list[Any] = [module.weight for module in modules]
            if any(weight.requires_grad or weight.dim() != 2 for weight in weights):
                continue
            whole = torch.cat([weight.detach() for weight in weights])
            ranks = [len(module.lora_a) for module in modules if hasattr(module, "lora_a")]  # type: ignore[arg-type]
            if bits == 16 and whole.is_cuda and self.architecture.fuses_norms and ranks and sum(ranks) % 8 == 0:
                self._wide[name] = widened(whole, sum(ranks))
                whole = self._wide[name][: len(whole), : whole.shape[1]]
            parts = whole.split([len(weight) for weight in weights])
            if bits == 4 and ranks:
                whole, self._scales[name] = nf4.quantize(whole)
                parts = tuple(weight.new_empty(0) for weight in weights)  # the matrix itself is no longer needed
            for weight, rows in zip(weights, parts, strict=True):
                weight.data = rows
            self._frozen[name] = whole

    def matrices(self) -> Iterator[tuple[str, nn.Linear]]:
        """The two-dimensional matrices that the block multiplies with, by name: not routers, nor experts."""
        multiplied = {id(module) for modules in self._fused.values() for module in modules}
        for name, module in self.named_modules():
            if id(module) in multiplied and isinstance(module, nn.Linear):
                yield name, module

    def vector(self, name: str) -> Tensor:
        return self.ops.norm_weight(self._vectors[name].weight)  # type: ignore[arg-type]

    def observe_load(self, share_E: Tensor) -> None:
        # A compiled block cannot change a buffer while it is checkpointed.
        if self.load is not None and self.training and not (self.ops.checkpoint and torch.compiler.is_compiling()):
            self.load += share_E.detach()

    def forward(
        self, x: Tensor, delta: Tensor | None, rope: Rope, documents: Documents | None = None
    ) -> tuple[Tensor, Tensor]:
        """The residual stream, and the delta that the next norm adds to it."""
        if self.ops.checkpoint is None:
            return self.compute(x, delta, rope, documents)
        x = x if delta is None else x + delta  # outside: the checkpoint keeps one input, not two
        result: tuple[Tensor, Tensor] = self.ops.checkpoint(self.compute, x, None, rope, documents)
        return result

    def compute(self, x: Tensor, delta: Tensor | None, rope: Rope, context: Any) -> tuple[Tensor, Tensor]:
        return self.architecture.block(self.spec, self, self.ops, x, delta, rope, context)


class CodeModel(nn.Module):
    """The whole model, or the blocks of one pipeline stage: a stage without an embedding takes hidden states.

    `dtype` is the type of activations and matrix products; the weights may have another one.
    """

    def __init__(self, spec: Model) -> None:
        super().__init__()
        self.spec, self.ops = spec, DEFAULT_OPS
        self.dtype: torch.dtype | None = None
        self.summed_ranks: int | None = None
        """Ranks over which gradients are summed in float64; None if they are averaged."""
        self.embed: nn.Embedding | None = nn.Embedding(spec.vocab, spec.width)
        self.positions = nn.Embedding(spec.context, spec.width) if spec.traits.has_learned_positions else None
        self.blocks = nn.ModuleDict({str(layer): Block(spec, layer) for layer in range(spec.layers)})
        self.architecture = architecture_of(spec)
        self.norm: Weight | None = Weight(spec.width)
        for name, info in self.architecture.final_parameters(spec).items():
            self.add_module(name, Weight(*info.shape))
        self.head = None if spec.tied else nn.Linear(spec.width, spec.vocab, bias=False)
        self._compiled: Callable[..., Tensor] | None = None

    def set_ops(self, ops: ModelOps) -> None:
        """Compute with these operations. Call before the first forward pass and before compilation."""
        self.ops = ops
        for block in self.each_block():
            own = ops.of_layer(block.layer)
            block.ops = own if block.adapter_scale is None else adapted_ops(own)

    def compile_model(self, mode: str) -> None:
        """ "block" compiles every block by itself, "model" all blocks as one graph, "none" nothing."""
        if mode != "none":
            # A block is traced for training and evaluation, with and without a delta, and for each of a few paddings of
            # packed documents: more than torch's default of 8 traces before it gives up and runs eagerly.
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        if mode == "block":
            for block in self.each_block():
                block.compile(dynamic=False)
        elif mode == "model":
            self._compiled = torch.compile(self._run_blocks, dynamic=False)

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        *,
        targets_BT: Tensor | None = None,
        documents: Documents | None = None,
        scale: float | Tensor | None = None,
        objective: Objective = PLAIN,
        per_sequence: bool = False,
    ) -> Tensor:
        """Logits B T V; with targets, `scale` times the sum of their losses (default: the mean), or the sum of each
        sequence's losses (`per_sequence`)."""
        x_BTW = self.hidden(tokens_BT, positions_BT, documents)
        if self.norm is None:
            return x_BTW  # a pipeline stage before the last
        if targets_BT is None:
            return softcap(F.linear(x_BTW, self.head_weight.to(x_BTW.dtype)), self.spec.logit_softcap)
        x_BTW = self.ops.enter(x_BTW)
        if per_sequence:
            return sequence_losses(x_BTW, local(self.head_weight), targets_BT, softcap=self.spec.logit_softcap)
        scale = 1 / targets_BT.numel() if scale is None else scale
        return linear_cross_entropy(
            x_BTW.flatten(0, 1),
            local(self.head_weight),
            self.ops.shard_sequence(targets_BT).flatten(),
            scale=scale * self.ops.context_parallel,  # FSDP averages over ranks that share a sequence, too
            objective=objective,
            softcap=self.spec.logit_softcap,
            group=self.ops.vocab_group,
        )

    def hidden(
        self, tokens_BT: Tensor, positions_BT: Tensor | None = None, documents: Documents | None = None
    ) -> Tensor:
        """The hidden states B T W after the final norm."""
        ops = self.ops
        if positions_BT is None:
            length = tokens_BT.shape[1] * (1 if self.embed is not None else ops.context_parallel * ops.tensor_parallel)
            positions_BT = torch.arange(length, device=tokens_BT.device)[None]
        positions_BT = ops.shard_sequence(positions_BT)
        ropes = rotary_tables(self.spec, positions_BT)
        x_BTW = tokens_BT
        if self.embed is not None:
            weight = self.embed.weight
            x_BTW = ops.embedding(ops.shard_sequence(tokens_BT), local(weight)).to(self.dtype or weight.dtype)
            if self.architecture.embedding_scale is not None:
                x_BTW = x_BTW * self.architecture.embedding_scale(self.spec)
        if self.positions is not None:
            x_BTW = x_BTW + ops.embedding(positions_BT, local(self.positions.weight)).to(x_BTW.dtype)
        return (self._compiled or self._run_blocks)(x_BTW, ropes, documents)

    def _run_blocks(self, x_BTW: Tensor, ropes: Sequence[Rope], documents: Documents | None) -> Tensor:
        delta = None
        for block in self.each_block():
            x_BTW, delta = block(x_BTW, delta, ropes[self.spec.rope_kind(block.layer)], documents)
        x_BTW = x_BTW if delta is None else x_BTW + delta
        return x_BTW if self.norm is None else self.architecture.final_norm(self.spec, self._vector, x_BTW)

    def _vector(self, name: str) -> Tensor:
        """A parameter of the final norm."""
        return self.ops.norm_weight(self.get_submodule(name).weight)  # type: ignore[arg-type]

    def each_block(self) -> Iterator[Block]:
        """The blocks of this stage, in order."""
        for block in self.blocks.values():
            assert isinstance(block, Block)
            yield block

    @property
    def head_weight(self) -> Tensor:
        """The output head: a matrix of its own, or the embedding table."""
        holder = self.embed if self.head is None else self.head
        assert holder is not None
        return holder.weight


@torch.no_grad()
def init_weights(model: CodeModel, seed: int, *, embedding_std: float = INIT_STD) -> None:
    """Normal(0, 0.02), outputs to the residual stream scaled down by sqrt(2 layers), norms 1; the embedding's standard
    deviation is a choice.

    Each tensor has a random generator of its own, keyed by (seed, name): the weights do not depend on the order of
    construction or on the sharding. Runs before sharding, on CPU tensors; on those of a GPU it draws other numbers.
    """
    residual_std = INIT_STD / (2 * model.spec.layers) ** 0.5
    table = parameters(model.spec)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or table[name].initial == 0.0:
            parameter.fill_(table[name].initial)
            continue
        key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        device = parameter.device if parameter.is_cuda else "cpu"
        generator = torch.Generator(device).manual_seed(int.from_bytes(key[:8], "little") >> 1)
        std = residual_std if table[name].writes_residual else INIT_STD
        parameter.normal_(0.0, embedding_std if name == "embed.weight" else std, generator=generator)
