"""Model architectures: one short file per family, used by training, serving, parallelism and the file formats alike.

A `ModelArchitecture` declares the parameters of a block (shape, tensor-parallel dim, names in other formats) and its
computation, a function over `ModelOps`. Everything else is derived: CodeModel and its state_dict, the sharding of
tensor parallelism, the server's fused weights and its generic forward pass, checks of loaded weights, and names in
Hugging Face and GGUF files. docs/how-to/add-a-model-architecture.md adds one step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lakh.errors import CorruptCheckpoint
from lakh.spec.model import Model
from lakh.workloads.code.attention import AttentionVariant
from lakh.workloads.code.ops import ModelOps, Rope, rms_norm

__all__ = [
    "POSITIONS",
    "GgufLayout",
    "HfModules",
    "LayerWeights",
    "ModelArchitecture",
    "ParameterInfo",
    "architecture_of",
    "architectures",
    "check_weights",
    "join_rows",
    "parameters",
    "require_finite",
    "rows_of_file_tensors",
    "shapes",
    "split_rows",
]

POSITIONS = "positions.weight"
"""The learned embeddings of positions."""
GgufLayout = Literal["", "offset", "alternate", "latent"]
"""Of a parameter in a GGUF file. offset: plus 1; alternate: gate and up, whose rows alternate, as two tensors; latent:
the matrices to keys and to values as two tensors."""


@dataclass(frozen=True)
class ParameterInfo:
    shape: tuple[int, ...]
    hf: str
    """Name in a Hugging Face file, of a block's parameter that inside the block (`HfModules`); with `{}` for the number
    of an expert where the file has a tensor for each. Parameters of one name are the rows of one tensor, in order."""
    gguf: str
    """Name in a GGUF file, without "blk.N."; empty where GGUF's architecture has no such tensor; with `{}` for the
    parts that `gguf_layout` names. Parameters of one name are the rows of one tensor, in order."""
    shard_dim: int | None = None
    """The dim that tensor parallelism shards: 0 column-parallel, 1 row-parallel, None replicated."""
    fused: str = ""
    """The tensor that the block computes with; parameters of one name are concatenated in order, by rows."""
    writes_residual: bool = False
    """Initialized with a smaller deviation, because its output is added to the residual stream."""
    initial: float = 1.0
    """Of a vector: its value before training; 0 also for biases of all experts."""
    num_heads: int = 0
    """Of a vector with a part for each head: a Hugging Face file has a tensor for each, and `{}` in its name; a GGUF
    file has a matrix with a row for each. 0 for other parameters."""
    hf_layout: Literal["", "transposed", "flat", "heads"] = ""
    """How the file has it: with the last two dims exchanged (of several parameters that are one tensor, too); without
    the last dim, which is 1; or, where several parameters are one tensor, with the rows of each head together."""
    gguf_layout: GgufLayout = ""
    """How a GGUF file has it, if not as it is (formats/gguf_layouts.py)."""
    layers: Sequence[int] | None = None
    """The layers that have it; None: all."""

    @property
    def is_expert(self) -> bool:
        """Whether it holds a matrix, or a bias, of each expert of a layer: dim 0 counts them."""
        return len(self.shape) == 3

    def is_in(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers


class LayerWeights(Protocol):
    """The weights of one block, as this rank computes with them."""

    @property
    def variant(self) -> AttentionVariant | None:
        """How its attention differs from plain causal attention."""
        ...

    @property
    def layer(self) -> int: ...

    def matrix(self, name: str, dtype: torch.dtype) -> Tensor:
        """A fused tensor (`ParameterInfo.fused`)."""
        ...

    def vector(self, name: str) -> Tensor:
        """A replicated tensor that is not fused, such as the weight of a norm."""
        ...

    def observe_load(self, share_E: Tensor) -> None:
        """Take note of the share of choices that each expert of this layer got."""
        ...


BlockFunction = Callable[[Model, LayerWeights, ModelOps, Tensor, Tensor | None, Rope, Any], tuple[Tensor, Tensor]]


FinalNorm = Callable[[Model, Callable[[str], Tensor], Tensor], Tensor]
"""(spec, vector by name, hidden states) to normalized hidden states."""


@dataclass(frozen=True)
class HfModules:
    """The modules of a model in a Hugging Face file."""

    prefix: str = "model."
    """Of all but the output head."""
    embedding: str = "embed_tokens"
    positions: str = ""
    """The embedding of positions, where a family has one."""
    blocks: str = "layers"
    norm: str = "norm"


@dataclass(frozen=True)
class ModelArchitecture:
    name: str
    """Key of spec.model.FAMILIES."""
    hf_model_type: str
    hf_class: str
    hf_config: Mapping[str, Any]
    """Fields of config.json with the only values that lakh's block computes."""
    gguf: str | None
    """`general.architecture` of a GGUF file; None where it knows no such model."""
    block_parameters: Callable[[Model], dict[str, ParameterInfo]]
    """By name inside a block; the order decides that of the state_dict and of the optimizer."""
    block: BlockFunction
    """(spec, weights, ops, x, delta, rope, context) to the residual stream x and the delta still to be added to it."""

    # What most families leave as it is.
    final_parameters: Callable[[Model], dict[str, ParameterInfo]] = lambda spec: {}
    """Parameters of the final norm besides its weight."""
    final_norm: FinalNorm = lambda spec, vector, x: rms_norm(x, vector("norm"), spec.norm_eps)
    final_norm_initial: float = 1.0
    fuses_norms: bool = False
    """The block takes operations that compute a norm together with the products around it (`ModelOps`)."""
    embedding_scale: Callable[[Model], float] | None = None
    """Factor of the embedded tokens."""
    hf_modules: HfModules = HfModules()
    hf_names: Mapping[str, str] = field(default_factory=dict)
    """Names in config.json of numbers of spec.Model, where this family has its own."""
    hf_synonyms: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Other values of fields of `hf_config`, and of model_type, that mean the same."""
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields that a config.json may omit, where they are not those of Llama."""
    hf_choices: Mapping[str, tuple[str, Mapping[str | bool, Any]]] = field(default_factory=dict)
    """Of settings of spec.Model that this family may have: their name in config.json, and what each word there means.
    Of several words with one meaning the first is written."""
    hf_derived: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda given: {}
    """The fields of config.json, with defaults, to values of those that follow from others."""
    hf_more: Callable[[Model], dict[str, Any]] = lambda spec: {}
    """Fields of config.json that this family alone has."""
    hf_experts: Mapping[str, str] = field(default_factory=dict)
    """Names in config.json of the fields of spec.Experts, for a mixture of experts. Empty for a field that follows from
    others: `hf_derived` gives it as `experts.FIELD`, and `hf_more` writes those."""
    hf_latent: Mapping[str, str] = field(default_factory=dict)
    """Names in config.json of the fields of spec.Latent, for latent attention."""
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    """Keys in a GGUF file of numbers of spec.Model, where this family has its own."""
    gguf_windows: float = 1.0
    """Share of the layers with a sliding window in a GGUF file that has one."""
    hf_windows: Literal["all", "late", "alternate", "but_fourth", "but_sixth", "given"] | None = None
    """Layers with a sliding window where config.json has no layer_types: all, those from max_window_layers on, the
    first, third and so on, or all but every fourth or sixth; given: `hf_derived` gives layer_types, and `hf_more`
    writes them. None for a family without windows."""

    @property
    def hf_model_types(self) -> tuple[str, ...]:
        return (self.hf_model_type, *self.hf_synonyms.get("model_type", ()))


def architectures() -> tuple[ModelArchitecture, ...]:
    """All of them, in the order of `lakh models`."""
    from lakh.workloads.code.architectures import (
        gemma,
        gemma2,
        gemma3,
        glm4,
        gpt_bigcode,
        granite,
        llama,
        olmo2,
        phi3,
        stablelm,
        starcoder2,
    )
    from lakh.workloads.code.architectures.mixtures import (
        deepseek_v2,
        glm4_moe,
        gpt_oss,
        llama4,
        minimax_m2,
        mixtral,
        qwen2_moe,
    )

    return (
        *(
            llama.LLAMA,
            llama.MISTRAL,
            llama.MINISTRAL3,
            llama.QWEN2,
            llama.QWEN3,
            llama.SEED_OSS,
            phi3.PHI3,
            llama.SMOLLM3,
        ),
        glm4.GLM4,
        *(gpt_bigcode.GPT_BIGCODE, starcoder2.STARCODER2, stablelm.STABLELM, granite.GRANITE, olmo2.OLMO2),
        olmo2.OLMO3,
        *(gemma.GEMMA, gemma2.GEMMA2, gemma3.GEMMA3),
        *(mixtral.MIXTRAL, qwen2_moe.QWEN2_MOE, mixtral.QWEN3_MOE, minimax_m2.MINIMAX_M2),
        *(deepseek_v2.DEEPSEEK_V2, deepseek_v2.DEEPSEEK_V3),
        llama4.LLAMA4,
        *(glm4_moe.GLM4_MOE, gpt_oss.GPT_OSS),
    )


def architecture_of(spec: Model) -> ModelArchitecture:
    """Raises InfeasiblePlan for a model that no architecture computes."""
    spec.require_trainable()
    return next(architecture for architecture in architectures() if architecture.name == spec.family_name)


def parameters(spec: Model) -> dict[str, ParameterInfo]:
    """Every parameter of the model by its state_dict name, with whole names in other formats."""
    architecture = architecture_of(spec)
    block, modules = architecture.block_parameters(spec), architecture.hf_modules
    table, prefix = (spec.vocab, spec.width), modules.prefix
    embedding = f"{prefix}{modules.embedding}.weight"
    result = {"embed.weight": ParameterInfo(table, embedding, "token_embd.weight", shard_dim=0)}
    if spec.traits.has_learned_positions:
        theirs, shape = f"{prefix}{modules.positions}.weight", (spec.context, spec.width)
        result[POSITIONS] = ParameterInfo(shape, theirs, "position_embd.weight", shard_dim=0)
    for layer in range(spec.layers):
        for name, info in block.items():
            if not info.is_in(layer):
                continue
            gguf = info.gguf and f"blk.{layer}.{info.gguf}"
            hf = f"{prefix}{modules.blocks}.{layer}.{info.hf}"
            result[f"blocks.{layer}.{name}.weight"] = replace(info, hf=hf, gguf=gguf)
    initial = architecture.final_norm_initial
    layout: GgufLayout = "offset" if initial == 0 else ""
    theirs = f"{prefix}{modules.norm}.weight"
    norm = ParameterInfo((spec.width,), theirs, "output_norm.weight", initial=initial, gguf_layout=layout)
    for name, info in {"norm": norm, **architecture.final_parameters(spec)}.items():
        result[f"{name}.weight"] = info
    if not spec.tied:
        result["head.weight"] = ParameterInfo(table, "lm_head.weight", "output.weight", shard_dim=0)
    return result


def rows_of_file_tensors(
    table: Mapping[str, ParameterInfo], file_name: Callable[[ParameterInfo], str]
) -> dict[str, dict[str, int]]:
    """Of every tensor in a file: the parameters that are its rows, in order, and how many each has."""
    found: dict[str, dict[str, int]] = {}
    for name, info in table.items():
        found.setdefault(file_name(info), {})[name] = info.shape[0]
    return found


def join_rows(spec: Model, info: ParameterInfo, parts: Sequence[Tensor]) -> Tensor:
    """The tensor of a Hugging Face file whose rows are several parameters, of which `info` is the first."""
    if info.hf_layout == "transposed":
        return torch.cat(list(parts), dim=-1)
    if info.hf_layout == "heads":
        return torch.cat([part.unflatten(0, (spec.heads, -1)) for part in parts], dim=1).flatten(0, 1)
    return torch.cat(list(parts))


def split_rows(spec: Model, info: ParameterInfo, tensor: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The parameters in such a tensor, by their numbers of rows."""
    if info.hf_layout == "heads":
        of_heads = tensor.unflatten(0, (spec.heads, -1)).split([count // spec.heads for count in counts], dim=1)
        return [part.flatten(0, 1) for part in of_heads]
    return list(tensor.split(list(counts)))


def shapes(spec: Model) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of this model."""
    return {name: info.shape for name, info in parameters(spec).items()}


def check_weights(where: str, spec: Model, weights: Mapping[str, Tensor], todo: str) -> None:
    """Raise CorruptCheckpoint unless these are exactly the tensors of this model."""
    expected = shapes(spec)
    for name, shape in expected.items():
        if name not in weights:
            raise CorruptCheckpoint(where, f"has no tensor {name}", todo)
        found = tuple(weights[name].shape)
        if found != shape:
            raise CorruptCheckpoint(where, f"{name} has shape {list(found)}; its settings require {list(shape)}", todo)
    for name in weights:
        if name not in expected:
            raise CorruptCheckpoint(where, f"has an unexpected tensor {name}", todo)


def require_finite(where: str, weights: Mapping[str, Tensor]) -> None:
    """Raise CorruptCheckpoint if a weight is NaN or infinite: the sum of its tensor is, too."""
    for name, tensor in weights.items():
        if not tensor.sum(dtype=torch.float32).isfinite():
            raise CorruptCheckpoint(where, f"{name} has numbers that are NaN or infinite", "use an earlier checkpoint")
