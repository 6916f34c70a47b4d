"""`InferenceModel`: the network as the engine runs it, on fused weights, a ragged batch and a paged KV cache.

Shapes: N new tokens of all sequences, L layers, W width, V ids that are scored.

`forward` computes the chunks of all sequences together, stores their keys and values, and returns the logits of the
last `scored` tokens of each. On a CPU a prompt in chunks, a batch and a single sequence give the same logits to the
last bit, on a GPU to rounding.

The generic path runs the block of the model's architecture (workloads/code/architectures) in torch, on any device. On a
CPU the same block, traced, is one native call (cpu/tracing.py, cpu/decoder.py), except for tokens of adapters, for
which products, experts and attention are native. On a GPU, runner.py sends most steps to CUDA graphs.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lakh.errors import UserError
from lakh.server.model.adapters import (
    AdapterRows,
    ServedAdapter,
    UpdatedMatrix,
    place_adapter,
    read_adapter,
    with_updates,
)
from lakh.server.model.cpu import native, packed
from lakh.server.model.cpu.decoder import NativeDecoder
from lakh.server.model.cpu.packed import PackedMatrix, Piece
from lakh.server.model.cpu.tracing import BlockTracer, Untraceable
from lakh.server.model.gpu import quantized as gpu_quantized
from lakh.server.model.kv_cache import PagedCache
from lakh.server.model.paged_attention import PagedStep, SequenceChunk, flat_slots, scored_positions, slots_of
from lakh.spec.model import Model
from lakh.workloads.code.architectures import POSITIONS, architecture_of, parameters
from lakh.workloads.code.attention import AttentionVariant
from lakh.workloads.code.formats.gguf import GgufWeights
from lakh.workloads.code.formats.gguf_types import integers
from lakh.workloads.code.ops import (
    ModelOps,
    Rope,
    full_linear,
    joint_norm,
    joint_norm_over,
    rotary_tables,
    run_experts,
    softcap,
)

__all__ = [
    "InferenceModel",
    "ModelShard",
    "Precision",
    "SequenceChunk",
    "can_keep_stored",
    "check_divisible",
    "not_quantizable",
]

log = logging.getLogger(__name__)

Precision = Literal["f32", "bf16", "fp8", "int8", "int4", "stored"]
"""fp8: of a GPU; int8: of a CPU; stored: the integers of a GGUF file as they are, for the native library."""
BITS = {"f32": 32, "int8": 8, "int4": 4, "stored": 8}
"""Of numbers in the native library; stored: of tensors whose type has no groups of 32."""
WEIGHTS: tuple[str, ...] = ("_w", "_packed", "norms", "head_norms", "vectors", "final", "embed", "positions", "head")
WEIGHTS += ("_packed_embed", "_packed_head", "_quantized_head", "_decoder")
"""The attributes that hold them."""
UNQUANTIZED = ("ffn.router", "ffn.shared_router", "attention.q_a", "attention.kv_a")
"""Matrices for ModelOps.full_linear: with fewer bits, they cost a model more than they save."""
FLOAT32 = ("ffn.router_bias",)
"""Vectors that are not rounded: small differences of the bias choose experts."""
RESHAPED = ("kv_b",)
"""Matrices that a block does not multiply by ModelOps.linear."""
LEAST_EMBEDDING_BITS = 8  # with fewer a small model loses most here, because its head is the embedding


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
    adapted: Sequence[AdapterRows] = ()
    """The tokens of this step that use adapters."""

    def matrix(self, name: str, dtype: torch.dtype) -> Any:
        """A tensor, a PackedMatrix or an UpdatedMatrix, which ModelOps.linear of `forward` multiplies."""
        base = self.model.matrix(name, self.layer)
        key = name, self.layer
        updates = [(rows, adapter.updates[key]) for adapter, rows in self.adapted if key in adapter.updates]
        return UpdatedMatrix(base, updates) if updates else base

    def vector(self, name: str) -> Any:
        """A tensor, or a PackedMatrix for ModelOps.full_linear."""
        if name in self.model._packed:
            return self.model.matrix(name, self.layer)
        return self.model.vectors[name][self.model.place(name, self.layer)]

    def observe_load(self, share_E: Tensor) -> None:
        """The server keeps no statistics of experts."""

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
        self._gpu_bits = gpu_quantized.BITS.get(precision) if device.type == "cuda" else None
        """Of a quantized number on a GPU."""
        is_narrow = precision == "bf16" or self._gpu_bits is not None
        self.dtype = torch.bfloat16 if is_narrow else torch.float32
        """Of activations; weights have the same type unless they are quantized."""
        self.shard, self.architecture = shard, architecture_of(spec)
        self.variants = [AttentionVariant.of(spec, layer) for layer in range(spec.layers)]
        self.is_plain = not any(self.variants) and spec.logit_softcap is None
        self.is_plain &= spec.rotary_size is None and len(spec.rope_bases) == 1 and not spec.has_query_tables
        """Every layer has plain causal attention with whole heads rotated alike, and logits are not bounded: what the
        kernels compute."""
        check_divisible(spec, shard.size)
        has_library = device.type == "cpu" and native.open_library() is not None
        self._bits = BITS.get(precision) if has_library else None
        """Of a number in the native library, for which matrices, embedding and head are PackedMatrix."""
        if precision not in ("f32", "bf16"):
            _check_quantized(spec, device, shard.size, precision)
        self.heads, self.kv_heads, self.ffn = (n // shard.size for n in (spec.heads, spec.cache_heads, spec.ffn))
        self.ropes = _rope_tables(spec, device)
        self.cos, self.sin = self.ropes[0][:2]
        self._allocate()
        self.load(weights)

    def _allocate(self) -> None:
        spec, device = self.spec, self.device
        # Of each parameter of a block: its fused tensor, first row there and dim that is sharded.
        self._rows: dict[str, tuple[str, int, int | None]] = {}
        block, shapes = self.architecture.block_parameters(spec), dict[str, tuple[int, ...]]()
        # Of a tensor that only some layers have, such as experts after dense layers: these layers.
        self._layers = {info.fused or name: info.layers for name, info in block.items() if info.layers is not None}
        for name, info in block.items():
            if info.fused:
                own = [n // self.shard.size if dim == info.shard_dim else n for dim, n in enumerate(info.shape)]
                row_dim = _row_dim(info.shape)
                first = shapes[info.fused][row_dim] if info.fused in shapes else 0
                self._rows[name] = (info.fused, first, info.shard_dim)
                own[row_dim] += first
                shapes[info.fused] = tuple(own)
        self._w: dict[str, tuple[Tensor, ...]] = {}
        """The fused tensors of all layers, L first."""
        self._columns: dict[str, int] = {}
        """Of matrices that are quantized on a GPU."""
        self._packed: dict[str, list[PackedMatrix]] = {}
        """The matrices of all layers for the native library."""
        for name, shape in shapes.items():
            layers = len(self._layers.get(name, range(spec.layers)))
            if self._bits is not None and len(shape) > 1 and shape[-1] > 1 and name not in RESHAPED:
                self._packed[name] = [PackedMatrix(shape[-1]) for _ in range(layers)]
            elif self._gpu_bits is not None and len(shape) == 2:
                self._w[name] = gpu_quantized.empty(layers, *shape, self._gpu_bits, device)
                self._columns[name] = shape[1]
            else:
                self._w[name] = (torch.empty((layers, *shape), dtype=self.dtype, device=device),)
        self.norms = torch.empty((2 * spec.layers + 1, spec.width), dtype=self.dtype, device=device)
        # Norms of query and key heads, whole in every shard; no layers in a model without them.
        normed_layers = spec.layers if spec.has_head_norms else 0
        self.head_norms = torch.empty((normed_layers, 2, spec.head_dim), dtype=self.dtype, device=device)
        self.vectors = {"attention_norm": self.norms[:-1:2], "ffn_norm": self.norms[1::2]}
        """The vectors of all layers by name, L first."""
        self.vectors |= {"attention.q_norm": self.head_norms[:, 0], "attention.k_norm": self.head_norms[:, 1]}
        for name, info in block.items():
            layers = len(range(spec.layers) if info.layers is None else info.layers)
            if self._bits is not None and name in UNQUANTIZED:
                self._packed[name] = [PackedMatrix(info.shape[1]) for _ in range(layers)]
                self._rows[name] = (name, 0, None)
            elif not info.fused and name not in self.vectors:
                dtype = torch.float32 if name in FLOAT32 else self.dtype
                self.vectors[name] = torch.empty((layers, *info.shape), dtype=dtype, device=device)
        self.final = {"norm": self.norms[-1]}
        """The vectors of the final norm by name."""
        for name, info in self.architecture.final_parameters(spec).items():
            self.final[name] = torch.empty(info.shape, dtype=self.dtype, device=device)
        num_floats = 0 if self._bits is not None else spec.vocab
        self.embed = torch.empty((num_floats, spec.width), dtype=self.dtype, device=device)
        self.head = self.embed[: self.num_ids] if spec.tied else torch.empty_like(self.embed[: self.num_ids])
        num_positions = spec.context if spec.traits.has_learned_positions else 0
        self.positions = torch.empty((num_positions, spec.width), dtype=self.dtype, device=device)
        """The embeddings of positions, where they are learned."""
        self._packed_embed = PackedMatrix(spec.width)
        self._packed_head = self._packed_embed if spec.tied else PackedMatrix(spec.width)
        self._quantized_head: tuple[Tensor, ...] | None = None
        """Of one layer, on a GPU."""
        if self._gpu_bits is not None:
            rows = -(-self.num_ids // 16) * 16  # a multiple that cuBLAS needs for 8 bits
            self._quantized_head = gpu_quantized.empty(1, rows, spec.width, self._gpu_bits, device)
            for part in self._quantized_head:
                part.view(torch.uint8).zero_()
        self._decoder: NativeDecoder | None = None
        """All layers in one native call, where the library has every operation of the block."""

    # --- weights ---

    def has_finite_weights(self) -> bool:
        """Whether no weight is NaN or infinite: the sum of a tensor would be, too."""
        floats = [tensor for tensor in self._tensors() if tensor.is_floating_point() and tensor.itemsize > 1]
        return all(bool(tensor.sum(dtype=torch.float32).isfinite()) for tensor in floats)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Replace all weights, tensor by tensor."""
        file = weights if self.precision == "stored" and isinstance(weights, GgufWeights) else None
        for name, info in parameters(self.spec).items():
            is_matrix = len(info.shape) > 1 and info.shape[-1] > 1 and info.fused not in RESHAPED and name != POSITIONS
            numbers = integers(file.stored(name)) if file is not None and is_matrix else None
            if numbers is not None:
                self._load_piece(name, packed.pack_integers(numbers, info.shape[0] if info.is_expert else 1))
            else:
                self.load_tensor(name, weights[name])
        self.finish_loading()

    @torch.inference_mode()
    def load_tensor(self, name: str, tensor: Tensor) -> None:
        """One whole tensor; a shard takes its part. Call `finish_loading` after all of them."""
        if self._bits is not None and name in ("embed.weight", "head.weight"):
            self._load_piece(name, packed.pack(tensor, max(self._bits, LEAST_EMBEDDING_BITS)))
        elif name == "embed.weight":
            self.embed.copy_(tensor)
        elif name == POSITIONS:
            self.positions.copy_(tensor[: len(self.positions)])  # a shorter context than that of the weights
        elif name == "head.weight":
            self.head.copy_(tensor[: self.num_ids])
        elif name.removesuffix(".weight") in self.final:
            self.final[name.removesuffix(".weight")].copy_(tensor)
        else:
            _, layer, part = name.removesuffix(".weight").split(".", 2)
            if part in self._rows:
                self._load_matrix(name, int(layer), part, tensor)
            else:
                self.vectors[part][self.place(part, int(layer))].copy_(tensor)

    def _load_matrix(self, name: str, layer: int, part: str, tensor: Tensor) -> None:
        fused, first, shard_dim = self._rows[part]
        if shard_dim is not None:
            tensor = tensor.chunk(self.shard.size, dim=shard_dim)[self.shard.rank]
        layer = self.place(fused, layer)
        if fused in self._packed:
            assert self._bits is not None
            self._load_piece(name, packed.pack(tensor, 32 if fused in UNQUANTIZED else self._bits))
            return
        row_dim = _row_dim(tensor.shape)
        own: tuple[Tensor, ...] = (tensor,)
        if fused in self._columns:
            own = gpu_quantized.quantize(tensor.to(self.device), self._gpu_bits or 0)
        for whole, rows in zip(self._w[fused], own, strict=True):
            whole[layer].narrow(row_dim, first, rows.shape[row_dim]).copy_(rows)

    def _load_piece(self, name: str, piece: Piece) -> None:
        if name == "embed.weight":
            self._packed_embed.put(0, piece)
        elif name == "head.weight":
            self._packed_head.put(0, piece)
        else:
            _, layer, part = name.removesuffix(".weight").split(".", 2)
            fused, first, _ = self._rows[part]
            self._packed[fused][self.place(fused, int(layer))].put(first, piece)

    def place(self, name: str, layer: int) -> int:
        """The place of a layer among those that have this fused tensor or vector."""
        return self._layers[name].index(layer) if name in self._layers else layer

    @torch.inference_mode()
    def finish_loading(self) -> None:
        if self._bits is not None:
            self._decoder = self._native_decoder() if self.shard.size == 1 else None
            self.use_threads(torch.get_num_threads())
        elif self._gpu_bits is not None:
            assert self._quantized_head is not None
            for whole, own in zip(self._quantized_head, gpu_quantized.quantize(self.head, self._gpu_bits), strict=True):
                whole[0, : len(own)].copy_(own)

    def use_threads(self, count: int) -> None:
        """Threads of later products in native code; torch has its own setting."""
        if self._bits is not None:
            packed.use_threads(count)

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
        for name in WEIGHTS:
            mine = getattr(self, name)
            setattr(self, name, getattr(other, name))
            setattr(other, name, mine)

    def _tensors(self) -> list[Tensor]:
        """All weights; views of one tensor are listed several times."""
        fused = [tensor for parts in self._w.values() for tensor in parts]
        fused += [tensor for matrix in self._packed_matrices() for tensor in matrix.tensors()]
        vectors = [*self.vectors.values(), *self.final.values()]
        tables = [self.embed, self.positions, self.head, *(self._quantized_head or ())]
        return [*fused, *vectors, self.norms, self.head_norms, *tables]

    def _packed_matrices(self) -> list[PackedMatrix]:
        """Those that one step reads."""
        return [*(matrix for layers in self._packed.values() for matrix in layers), self._packed_head]

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one step reads."""
        read = [*self._w.values(), (self.norms, self.head_norms), self._quantized_head or (self.head,)]
        read += [tuple(matrix.tensors()) for matrix in self._packed_matrices()]
        return sum(tensor.nbytes for parts in read for tensor in parts)

    def read_adapter(self, name: str, folder: str) -> tuple[ServedAdapter, str]:
        """An adapter of this model for `SequenceChunk.adapter`, and the fingerprint of the base it was trained on."""
        if self.shard.size > 1 or self.spec.is_latent or self.spec.experts is not None:
            found = "adapters are not served with tensor parallelism, latent attention or experts"
            raise UserError(folder, found, "merge it into the model: lakh export")
        file = read_adapter(folder, self.spec)
        return place_adapter(name, folder, file, self._rows, self.device, self.dtype), file.base_sha256

    def matrix(self, name: str, layer: int) -> Any:
        """A fused tensor of one layer in the type of activations, or a quantized matrix for `linear`."""
        layer = self.place(name, layer)
        if name in self._packed:
            return self._packed[name][layer]
        parts = tuple(tensor[layer] for tensor in self._w[name])
        if name in self._columns:
            return gpu_quantized.as_matrix(parts, self._columns[name])
        return parts[0]

    def head_matrix(self) -> Any:
        """The head on a GPU, for `linear`; a quantized one may have more rows than there are ids."""
        if self._gpu_bits is None or self._quantized_head is None:
            return self.head
        return gpu_quantized.as_matrix(tuple(part[0] for part in self._quantized_head), self.spec.width)

    def logits(self, x_NW: Tensor) -> Tensor:
        """Of normalized hidden states, by `linear`."""
        logits_NV = self.linear(x_NW, self.head_matrix())
        return logits_NV if logits_NV.shape[1] == self.num_ids else logits_NV[:, : self.num_ids].contiguous()

    @property
    def linear(self) -> Callable[[Tensor, Any], Tensor]:
        """The product of tokens with `matrix`."""
        if self._gpu_bits is not None:
            return gpu_quantized.linear
        return F.linear if self._bits is None else packed.linear

    def embedding(self, tokens: Sequence[int]) -> Tensor:
        """The rows of these tokens."""
        if self._bits is not None:
            return self._packed_embed.take(tokens)
        return self.embed[torch.tensor(tokens, device=self.device)]

    # --- forward ---

    @torch.inference_mode()
    def forward(self, chunks: Sequence[SequenceChunk], cache: PagedCache) -> Tensor:
        """Logits of the scored tokens, chunk after chunk: scored x V, float32 on the CPU."""
        if self._decoder is not None:
            return self._forward_packed(chunks, cache)
        return self._forward_torch(chunks, cache, _adapter_rows(chunks, self.device))

    def _forward_packed(self, chunks: Sequence[SequenceChunk], cache: PagedCache) -> Tensor:
        """All chunks natively, except those with adapters: these do not change the rounding of the others."""
        adapted = [chunk for chunk in chunks if chunk.adapter is not None]
        plain = [chunk for chunk in chunks if chunk.adapter is None]
        if not adapted:
            return self._forward_native(plain, cache)
        found = self._forward_torch(adapted, cache, _adapter_rows(adapted, self.device))
        if not plain:
            return found
        logits = [
            iter(part.split([chunk.scored for chunk in own]))
            for part, own in ((self._forward_native(plain, cache), plain), (found, adapted))
        ]
        return torch.cat([next(logits[chunk.adapter is not None]) for chunk in chunks])

    def _forward_torch(
        self, chunks: Sequence[SequenceChunk], cache: PagedCache, adapted: Sequence[AdapterRows] = ()
    ) -> Tensor:
        """Any number of tokens on any device, through the block of the architecture."""
        tokens = [token for chunk in chunks for token in chunk.tokens]
        positions = [chunk.start + i for chunk in chunks for i in range(len(chunk.tokens))]
        slots = slots_of(chunks)
        new = np.concatenate([own[chunk.start :] for own, chunk in zip(slots, chunks, strict=True)])
        new_N = torch.from_numpy(new).to(self.device)
        step = PagedStep(chunks, slots, self.device, is_native=self._bits is not None)

        def attention(
            q_NHD: Tensor,
            k_NKD: Tensor,
            v_NKD: Tensor,
            layer: int,
            variant: AttentionVariant | None = None,
            sinks_H: Tensor | None = None,
        ) -> Tensor:
            keys, values = cache.keys(layer), cache.values(layer)
            keys.write(new_N, k_NKD.transpose(0, 1))
            values.write(new_N, v_NKD.transpose(0, 1))
            return step.attention(variant)(q_NHD, keys, values, sinks_H)

        positions_N = torch.tensor(positions, device=self.device)
        ropes = [tuple(table[positions_N][:, None].repeat(1, 1, 2) for table in rope) for rope in self.ropes]
        ops = ModelOps(
            attention=attention,
            variant_attention=attention,
            linear=with_updates(self.linear) if adapted else self.linear,
            full_linear=full_linear if self._bits is None else packed.linear,
            experts=run_experts if self._bits is None else packed.run_experts,
            compresses_keys=True,
            leave=self.shard.all_reduce,
            joint_norm=joint_norm_over(self.shard.size, self.shard.all_reduce) if self.shard.size > 1 else joint_norm,
            tensor_parallel=self.shard.size,
        )
        x_NW = self._entered(self.embedding(tokens), lambda table: table[positions_N])
        x_NW, delta_NW = self.run_blocks(x_NW, ops, ropes, adapted)
        scored = scored_positions(chunks)
        if not scored:
            return x_NW.new_empty(0, self.num_ids)
        places = torch.tensor(scored, device=self.device)
        x_NW = self.architecture.final_norm(self.spec, self.final.__getitem__, x_NW[places] + delta_NW[places])
        if self._bits is not None:
            logits = packed.linear(x_NW, self._packed_head, self.num_ids)
        else:
            logits = self.logits(x_NW)
        return softcap(logits, self.spec.logit_softcap)

    def _entered(self, embedded_NW: Tensor, rows_of_positions: Callable[[Tensor], Tensor]) -> Tensor:
        """What the first block takes. `rows_of_positions`: (a row for each position) to those of the tokens."""
        scale = self.architecture.embedding_scale
        x_NW = embedded_NW if scale is None else embedded_NW * scale(self.spec)
        return x_NW + rows_of_positions(self.positions) if self.spec.traits.has_learned_positions else x_NW

    def run_blocks(
        self, x_NW: Tensor, ops: ModelOps, ropes: Sequence[Rope], adapted: Sequence[AdapterRows] = ()
    ) -> tuple[Tensor, Tensor]:
        """All layers; returns the residual stream and the delta still to be added to it. `ropes`: of each kind of layer
        (`Model.rope_kind`)."""
        delta = None
        for layer in range(self.spec.layers):
            weights = LayerView(self, layer, adapted)
            rope = ropes[self.spec.rope_kind(layer)]
            x_NW, delta = self.architecture.block(self.spec, weights, ops, x_NW, delta, rope, layer)
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

    def _forward_native(self, chunks: Sequence[SequenceChunk], cache: PagedCache) -> Tensor:
        """Quantized weights on the CPU: any number of tokens."""
        assert self._decoder is not None
        tokens = [token for chunk in chunks for token in chunk.tokens]
        place = flat_slots(chunks, slots_of(chunks))
        return self._decoder.forward(tokens, place, scored_positions(chunks), cache.structure)

    def _native_decoder(self) -> NativeDecoder | None:
        """The block's graph; None where it has an operation that the native library lacks."""
        matrix_bits = 32 if self._bits == 32 else 8
        tracer = BlockTracer(
            self.spec.width, 2 * self.cos.shape[1], matrix_bits, [len(rope) // 2 for rope in self.ropes]
        )
        try:
            with tracer:
                x_NW = self._entered(tracer.hidden, tracer.rows_of_positions)
                x_NW, delta_NW = self.run_blocks(x_NW, tracer.ops, tracer.ropes)
                last = self.architecture.final_norm(self.spec, self.final.__getitem__, x_NW + delta_NW)
            graph = tracer.finish(last)
        except Untraceable as error:
            log.warning("%s computes in torch between native products: %s", self.architecture.name, error)
            return None
        return NativeDecoder(self.spec, graph, self._packed_embed, self._packed_head, self.num_ids, self.ropes)


def _adapter_rows(chunks: Sequence[SequenceChunk], device: torch.device) -> list[AdapterRows]:
    """The tokens of each adapter in a step."""
    places: dict[ServedAdapter, list[int]] = {}
    at = 0
    for chunk in chunks:
        if chunk.adapter is not None:
            places.setdefault(chunk.adapter, []).extend(range(at, at + len(chunk.tokens)))
        at += len(chunk.tokens)
    return [
        AdapterRows(adapter, slice(None) if len(rows) == at else torch.tensor(rows, device=device))
        for adapter, rows in places.items()
    ]


def _rope_tables(spec: Model, device: torch.device) -> list[Rope]:
    """Cosines and sines of every position, context x D/2, in float32, for each kind of layer."""

    def half(table: Tensor) -> Tensor:
        return table[0, :, 0].chunk(2, dim=-1)[0].contiguous().to(device)  # the second half repeats the first

    return [tuple(map(half, rope)) for rope in rotary_tables(spec, torch.arange(spec.context)[None])]


def _row_dim(shape: Sequence[int]) -> int:
    """The dim along which fused tensors are concatenated: the rows of a matrix, and of each expert's."""
    return max(len(shape) - 2, 0)


def check_divisible(spec: Model, num_shards: int) -> None:
    if spec.is_latent and num_shards > 1:
        found = "latent attention has one head of keys, which processes cannot share"
        raise UserError(f"--tensor {num_shards}", found, "use one process")
    for name in ("heads", "kv_heads", "ffn", "expert_ffn"):
        size = getattr(spec, name)
        if size % num_shards:
            todo = f"choose a number that divides {size}"
            raise UserError(f"--tensor {num_shards}", f"does not divide the model's {name} ({size})", todo)


def _check_quantized(spec: Model, device: torch.device, num_shards: int, precision: str) -> None:
    where = f"precision {precision}"
    others = {"cpu": ("int8", "int4", "stored"), "cuda": ("fp8", "int4")}[device.type]
    if precision not in others:
        raise UserError(where, f"does not exist on a {device.type.upper()}", f"use {others[0]} or {others[1]}")
    if spec.experts is not None and device.type == "cuda":
        raise UserError(where, "is not implemented for experts on a GPU", "use bf16")
    if device.type == "cuda" and num_shards > 1:
        raise UserError(where, "is not implemented for tensor parallelism on GPUs", "use bf16")
    if device.type == "cpu" and native.open_library() is None:
        todo = "install a C++ compiler (Debian, Ubuntu: apt-get install g++) and install lakh again, or use f32"
        raise UserError(where, "needs the native engine library, which is not built", todo)
    if found := not_quantizable(spec, num_shards):
        raise UserError(where, found, "use f32 or bf16 for this model")


def not_quantizable(spec: Model, num_shards: int = 1) -> str | None:
    """Which size of the model does not fit quantized weights; None if all do."""
    sizes = {"width": spec.width, "size of query heads": spec.heads * spec.head_dim // num_shards}
    if spec.mixture_layers < spec.layers:
        sizes["ffn"] = spec.ffn // num_shards
    if spec.experts is not None:
        sizes["ffn of experts"] = spec.expert_ffn // num_shards
    if spec.q_rank:
        sizes["rank of queries"] = spec.q_rank
    for name, size in sizes.items():
        if size % packed.GROUP:
            return f"needs a {name} divisible by {packed.GROUP}, and it is {size}"
    return None


def can_keep_stored(spec: Model, weights: Mapping[str, Tensor], device: torch.device) -> bool:
    """Whether precision "stored" applies: quantized weights of a GGUF file, on a CPU with the native library."""
    is_quantized = isinstance(weights, GgufWeights) and weights.is_quantized
    has_kernels = device.type == "cpu" and native.open_library() is not None
    return is_quantized and has_kernels and not_quantizable(spec) is None
