"""`InferenceModel`: the network as the engine runs it, on fused weights, a ragged batch and a paged KV cache.

Shapes: N new tokens of all sequences, L layers, W width, V ids that are scored.

`forward` computes the chunks of all sequences together, stores their keys and values, and returns the logits of the
last `scored` tokens of each. The composition of the batch changes sums only by rounding: a prompt in chunks, a batch
and a single sequence give the same logits to about 1e-5 in float32.

The generic path runs the block of the model's architecture (workloads/code/architectures) in torch, on any device. On
the CPU, steps of up to kernels.MAX_TOKENS tokens (more for a small model) use compiled kernels that read every weight
once; on a GPU, runner.py sends most steps to CUDA graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lakh.errors import UserError
from lakh.server.model.cpu import kernels
from lakh.server.model.kv_cache import PagedCache
from lakh.server.model.paged_attention import PagedStep, SequenceChunk, flat_slots, scored_positions, slots_of
from lakh.spec.model import Model
from lakh.workloads.code.architectures import architecture_of, parameters
from lakh.workloads.code.attention import AttentionVariant
from lakh.workloads.code.ops import ModelOps, Rope, rotary_tables, softcap

__all__ = ["InferenceModel", "ModelShard", "Precision", "SequenceChunk", "check_divisible"]

Precision = Literal["f32", "bf16", "int8"]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.float32}


@dataclass(frozen=True)
class ModelShard:
    """The part of every layer that this process holds, and how partial results are summed (tensor_parallel.py)."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = lambda part: part
    """The sum over all processes; may work in place."""


class LayerView(NamedTuple):
    """One layer of an InferenceModel as `LayerWeights`."""

    model: InferenceModel
    layer: int

    def matrix(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.model.matrix(name, self.layer)

    def vector(self, name: str) -> Tensor:
        return self.model.vectors[name][self.layer]

    @property
    def variant(self) -> AttentionVariant | None:
        return self.model.variants[self.layer]


class InferenceModel:
    def __init__(
        self,
        spec: Model,
        weights: Mapping[str, Tensor],
        num_ids: int,
        device: torch.device,
        precision: Precision,
        shard: ModelShard = ModelShard(),  # noqa: B008 - frozen
    ) -> None:
        """`num_ids`: how many ids can be sampled; a padded embedding table has more.

        A `shard` holds a share of the heads and of the feed-forward; embedding and head are whole in every process.
        """
        self.spec, self.num_ids, self.device, self.precision = spec, num_ids, device, precision
        self.dtype = DTYPES[precision]
        self.shard, self.architecture = shard, architecture_of(spec)
        self.variants = [AttentionVariant.of(spec, layer) for layer in range(spec.layers)]
        self.is_plain = not any(self.variants) and spec.logit_softcap is None
        """Every layer has plain causal attention, and logits are not bounded: what the kernels compute."""
        check_divisible(spec, shard.size)
        if precision == "int8":
            _check_int8(spec, device, shard.size)
        self.heads, self.kv_heads, self.ffn = (n // shard.size for n in (spec.heads, spec.kv_heads, spec.ffn))
        self.cos, self.sin = _rope_tables(spec, device)
        self._allocate()
        self.load(weights)

    def _allocate(self) -> None:
        spec, precision, device = self.spec, self.precision, self.device
        # Of each parameter of a block: its fused tensor, first row there and dim that is sharded.
        self._rows: dict[str, tuple[str, int, int | None]] = {}
        block, shapes = self.architecture.block_parameters(spec), dict[str, tuple[int, ...]]()
        for name, info in block.items():
            if info.fused:
                own = [n // self.shard.size if dim == info.shard_dim else n for dim, n in enumerate(info.shape)]
                row_dim = _row_dim(info.shape)
                first = shapes[info.fused][row_dim] if info.fused in shapes else 0
                self._rows[name] = (info.fused, first, info.shard_dim)
                own[row_dim] += first
                shapes[info.fused] = tuple(own)
        self._w: dict[str, tuple[Tensor, ...]] = {}
        """The fused tensors of all layers, L first; a matrix in int8 has its scales beside it."""
        for name, shape in shapes.items():
            if precision == "int8" and len(shape) == 2:
                rows, columns = (spec.layers, shape[0]), shape[1]
                scales = torch.empty((*rows, columns // kernels.GROUP))
                self._w[name] = (torch.empty((*rows, columns), dtype=torch.int8), scales)
            else:
                self._w[name] = (torch.empty((spec.layers, *shape), dtype=self.dtype, device=device),)
        self.norms = torch.empty((2 * spec.layers + 1, spec.width), dtype=self.dtype, device=device)
        # Norms of query and key heads, whole in every shard; no layers in a model without them.
        normed_layers = spec.layers if spec.qk_norm else 0
        self.head_norms = torch.empty((normed_layers, 2, spec.head_dim), dtype=self.dtype, device=device)
        self.vectors = {"attention_norm": self.norms[:-1:2], "ffn_norm": self.norms[1::2]}
        """The vectors of all layers by name, L first."""
        self.vectors |= {"attention.q_norm": self.head_norms[:, 0], "attention.k_norm": self.head_norms[:, 1]}
        for name, info in block.items():
            if not info.fused and name not in self.vectors:
                self.vectors[name] = torch.empty((spec.layers, *info.shape), dtype=self.dtype, device=device)
        self.final = {"norm": self.norms[-1]}
        """The vectors of the final norm by name."""
        for name, info in self.architecture.final_parameters(spec).items():
            self.final[name] = torch.empty(info.shape, dtype=self.dtype, device=device)
        self.embed = torch.empty((spec.vocab, spec.width), dtype=self.dtype, device=device)
        self.head = self.embed[: self.num_ids] if spec.tied else torch.empty_like(self.embed[: self.num_ids])
        self._head_int8: tuple[Tensor, Tensor] | None = None
        self._arrays: tuple[Any, ...] | None = None
        is_small = precision == "f32" and self.weight_bytes <= kernels.SMALL_MODEL_BYTES
        has_kernels = self.architecture.name in kernels.ARCHITECTURES and self.shard.size == 1 and self.is_plain
        on_cpu = device.type == "cpu" and self.dtype == torch.float32 and has_kernels
        self._max_kernel_tokens = on_cpu * (kernels.MAX_TOKENS_SMALL_MODEL if is_small else kernels.MAX_TOKENS)

    # --- weights ---

    def has_finite_weights(self) -> bool:
        """Whether no weight is NaN or infinite: the sum of a tensor would be, too."""
        floats = [tensor for tensor in self._tensors() if tensor.is_floating_point()]
        return all(bool(tensor.sum().isfinite()) for tensor in floats)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Replace all weights, tensor by tensor."""
        for name in parameters(self.spec):
            self.load_tensor(name, weights[name])
        self.finish_loading()

    @torch.inference_mode()
    def load_tensor(self, name: str, tensor: Tensor) -> None:
        """One whole tensor; a shard takes its part. Call `finish_loading` after all of them."""
        if name == "embed.weight":
            self.embed.copy_(tensor)
        elif name == "head.weight":
            self.head.copy_(tensor[: self.num_ids])
        elif name.removesuffix(".weight") in self.final:
            self.final[name.removesuffix(".weight")].copy_(tensor)
        else:
            _, layer, part = name.removesuffix(".weight").split(".", 2)
            if part in self._rows:
                self._load_matrix(int(layer), part, tensor)
            else:
                self.vectors[part][int(layer)].copy_(tensor)

    def _load_matrix(self, layer: int, part: str, tensor: Tensor) -> None:
        name, first, shard_dim = self._rows[part]
        if shard_dim is not None:
            tensor = tensor.chunk(self.shard.size, dim=shard_dim)[self.shard.rank]
        row_dim = _row_dim(tensor.shape)
        parts = (tensor,) if len(self._w[name]) == 1 else _to_int8(tensor)
        for whole, own in zip(self._w[name], parts, strict=True):
            whole[layer].narrow(row_dim, first, tensor.shape[row_dim]).copy_(own)

    def finish_loading(self) -> None:
        if self.precision == "int8":
            self._head_int8 = _to_int8(self.head)
            self._arrays = None

    def empty_like(self) -> InferenceModel:
        """A model of the same shape with uninitialized weights of its own, for `swap_weights`."""
        other = copy.copy(self)
        other._allocate()
        return other

    @torch.inference_mode()
    def swap_weights(self, other: InferenceModel) -> None:
        """Compute with the weights of `other` (from `empty_like`) from now on. On a GPU the values are copied, because
        CUDA graphs hold addresses; elsewhere the tensors are exchanged.
        """
        if self.device.type == "cuda":
            for own, its in zip(self._tensors(), other._tensors(), strict=True):
                own.copy_(its)
            torch.cuda.synchronize(self.device)
            return
        for name in ("_w", "norms", "head_norms", "vectors", "final", "embed", "head", "_head_int8"):
            mine = getattr(self, name)
            setattr(self, name, getattr(other, name))
            setattr(other, name, mine)
        self._arrays = other._arrays = None

    def _tensors(self) -> list[Tensor]:
        """All weights; views of one tensor are listed several times."""
        fused = [tensor for parts in self._w.values() for tensor in parts]
        vectors = [*self.vectors.values(), *self.final.values()]
        return [*fused, *vectors, self.norms, self.head_norms, self.embed, self.head]

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one step reads."""
        head = self._head_int8 or (self.head,)
        read = [*self._w.values(), (self.norms, self.head_norms), head]
        return sum(tensor.nbytes for parts in read for tensor in parts)

    def matrix(self, name: str, layer: int) -> Tensor:
        """A fused tensor of one layer in the type of activations."""
        values, *scales = (tensor[layer] for tensor in self._w[name])
        if not scales:
            return values
        return (values.unflatten(-1, (-1, kernels.GROUP)).float() * scales[0][:, :, None]).flatten(1)

    # --- forward ---

    @torch.inference_mode()
    def forward(self, chunks: Sequence[SequenceChunk], cache: PagedCache) -> Tensor:
        """Logits of the scored tokens, chunk after chunk: scored x V, float32 on the CPU."""
        if sum(len(chunk.tokens) for chunk in chunks) <= self._max_kernel_tokens:
            return self._forward_kernels(chunks, cache)
        tokens = [token for chunk in chunks for token in chunk.tokens]
        positions = [chunk.start + i for chunk in chunks for i in range(len(chunk.tokens))]
        slots = slots_of(chunks)
        new = np.concatenate([own[chunk.start :] for own, chunk in zip(slots, chunks, strict=True)])
        new_N = torch.from_numpy(new).to(self.device)
        step = PagedStep(chunks, slots, self.device, self.dtype)

        def attention(
            q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, layer: int, variant: AttentionVariant | None = None
        ) -> Tensor:
            keys_KCD, values_KCD = cache.keys_LKCD[layer], cache.values_LKCD[layer]
            keys_KCD[:, new_N] = k_NKD.transpose(0, 1)
            values_KCD[:, new_N] = v_NKD.transpose(0, 1)
            return step.attention(variant)(q_NHD, keys_KCD, values_KCD)

        positions_N = torch.tensor(positions, device=self.device)
        cos, sin = (table[positions_N][:, None].repeat(1, 1, 2) for table in (self.cos, self.sin))
        ops = ModelOps(
            attention=attention,
            variant_attention=attention,
            leave=self.shard.all_reduce,
            tensor_parallel=self.shard.size,
        )
        x_NW = self.embed[torch.tensor(tokens, device=self.device)]
        if self.architecture.embedding_scale is not None:
            x_NW = x_NW * self.architecture.embedding_scale(self.spec)
        x_NW, delta_NW = self.run_blocks(x_NW, ops, (cos, sin))
        scored = scored_positions(chunks)
        if not scored:
            return x_NW.new_empty(0, self.num_ids)
        places = torch.tensor(scored, device=self.device)
        x_NW = self.architecture.final_norm(self.spec, self.final.__getitem__, x_NW[places] + delta_NW[places])
        if self._head_int8 is not None and len(x_NW) <= kernels.MAX_TOKENS:
            logits = torch.from_numpy(kernels.head(self._head_arrays(), x_NW.numpy()))
        else:
            logits = F.linear(x_NW, self.head)
        return softcap(logits, self.spec.logit_softcap)

    def run_blocks(self, x_NW: Tensor, ops: ModelOps, rope: Rope) -> tuple[Tensor, Tensor]:
        """All layers; returns the residual stream and the delta still to be added to it."""
        delta = None
        for layer in range(self.spec.layers):
            x_NW, delta = self.architecture.block(self.spec, LayerView(self, layer), ops, x_NW, delta, rope, layer)
        assert delta is not None
        return x_NW, delta

    def norm_queries_and_keys(self, qkv_NX: Tensor, layer: int) -> Tensor:
        """Normalize each query and key head in place, before rotary positions, in a model with QK norm."""
        if len(self.head_norms):
            heads = qkv_NX.unflatten(-1, (-1, self.spec.head_dim))
            queries, keys, _ = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
            for part, norm in zip((queries, keys), self.head_norms[layer], strict=True):
                part.copy_(F.rms_norm(part, (self.spec.head_dim,), norm, self.spec.norm_eps))
        return qkv_NX

    def _forward_kernels(self, chunks: Sequence[SequenceChunk], cache: PagedCache) -> Tensor:
        """A few tokens on the CPU."""
        self._arrays = self._arrays or self._as_arrays()
        embed, weights, vectors, rope, head = self._arrays
        x = embed[[token for chunk in chunks for token in chunk.tokens]]
        place = flat_slots(chunks, slots_of(chunks))
        eps, positions, heads = self.spec.norm_eps, place[2] - 1, self.spec.heads
        x = kernels.run(x, weights, vectors, eps, positions, rope, cache.arrays, heads, place)
        return torch.from_numpy(kernels.head(head, x[scored_positions(chunks)]))

    def _as_arrays(self) -> tuple[Any, ...]:
        """Embedding, matrices, vectors, rotary tables and head as numpy arrays on the same memory, for the kernels."""
        matrices = tuple(tuple(part.numpy() for part in self._w[name]) for name in ("qkv", "o", "gate_up", "down"))
        bias = self._w["qkv_bias"][0].numpy() if "qkv_bias" in self._w else np.empty((0, 0), np.float32)
        vectors = (self.norms.numpy(), self.head_norms.numpy(), bias)
        return self.embed.numpy(), matrices, vectors, (self.cos.numpy(), self.sin.numpy()), self._head_arrays()

    def _head_arrays(self) -> tuple[Any, ...]:
        """The head as a matrix of one layer, for the CPU kernels."""
        return tuple(tensor.numpy()[None] for tensor in self._head_int8 or (self.head,))


def _rope_tables(spec: Model, device: torch.device) -> Rope:
    """Cosines and sines of every position, context x D/2, in float32."""
    cos, sin = (table[0, :, 0, : spec.head_dim // 2] for table in rotary_tables(spec, torch.arange(spec.context)[None]))
    return cos.contiguous().to(device), sin.contiguous().to(device)


def _row_dim(shape: Sequence[int]) -> int:
    """The dim along which fused tensors are concatenated: the rows of a matrix, and of each expert's."""
    return max(len(shape) - 2, 0)


def _to_int8(tensor: Tensor) -> tuple[Tensor, Tensor]:
    grouped = tensor.float().unflatten(-1, (-1, kernels.GROUP))
    scales = grouped.abs().amax(dim=-1) / 127
    numbers = (grouped / scales.clamp_min(1e-30)[..., None]).round().to(torch.int8)
    return numbers.flatten(-2).contiguous(), scales.contiguous()


def check_divisible(spec: Model, num_shards: int) -> None:
    for name in ("heads", "kv_heads", "ffn", "expert_ffn"):
        size = getattr(spec, name)
        if size % num_shards:
            todo = f"choose a number that divides {size}"
            raise UserError(f"--tensor {num_shards}", f"does not divide the model's {name} ({size})", todo)


def _check_int8(spec: Model, device: torch.device, num_shards: int) -> None:
    if device.type != "cpu":
        raise UserError("precision int8", "is a CPU format", "use bf16 on a GPU")
    if spec.experts is not None:
        raise UserError("precision int8", "is not implemented for experts", "use f32")
    group = kernels.GROUP
    queries = spec.heads * spec.head_dim
    sizes = (("width", spec.width, group), ("query heads", queries, group), ("ffn", spec.ffn, group * num_shards))
    for name, size, multiple in sizes:
        if size % multiple:
            found = f"needs widths divisible by {group}, and {name} is {size}"
            raise UserError("precision int8", found, "use f32 for this model")
