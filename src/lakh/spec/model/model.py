"""A decoder-only transformer as numbers: its settings, and how many parameters, FLOPs and bytes it has.

Conventions of published tables: a multiply-add is two FLOPs; training is three times the forward pass; the embedding
lookup is free; *causal-exact* attention counts the half of the score matrix that is computed, *PaLM-style* counts all
of it (arXiv 2204.02311, appendix B), which most public MFU figures use.

`family` names the architecture (families.py). Settings that no family computes together are counted and planned;
`require_trainable` (trainable.py) refuses to train them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from lakh.config import require, require_positive
from lakh.errors import ConfigError, InfeasiblePlan
from lakh.spec.model.experts import Experts
from lakh.spec.model.families import FAMILIES, ModelFamily
from lakh.spec.model.latent import Latent
from lakh.spec.model.rope import ROPE_BASE, RopeScaling
from lakh.spec.model.trainable import require_trainable
from lakh.spec.model.window import SlidingWindow

__all__ = ["MOST_LAYERS", "Model"]

N = TypeVar("N", int, float)
MOST_LAYERS = 10_000
"""Far above every published model: a damaged file with more is refused before its tensors are listed."""


class _PartNumber(Generic[N]):
    """Attribute of a model: a number of one of its optional parts, or 0 if the model does not have that part."""

    def __init__(self, part: str, name: str) -> None:
        self.part, self.name = part, name

    def __get__(self, model: Model, owner: type[Model]) -> N:
        part = getattr(model, self.part)
        return cast(N, getattr(part, self.name) if part is not None else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    layers: int = 6
    """Transformer blocks."""
    width: int = 256
    """Size of the residual stream."""
    heads: int = 4
    """Query heads; width / heads is the size of one head."""
    kv_heads: int = 2
    """Key and value heads (grouped-query attention); divides heads."""
    ffn: int = 704
    """Inner size of the SwiGLU feed-forward."""
    vocab: int = 4096
    """Size of the embedding table: at least the tokenizer's vocabulary."""
    tied: bool = True
    """Use the embedding table as the output head too."""
    rope_base: float = ROPE_BASE
    """Base of the rotary position frequencies."""
    context: int = 512
    """Longest sequence that the model supports; with learned positions (gpt_bigcode) the size of their table."""
    norm_eps: float = 1e-5
    """Added inside RMSNorm's square root."""
    qk_norm: bool = False
    """Normalise each query and key head before the rotary positions: more stable at high learning rates."""
    head_size: int | None = None
    """Size of one head, when it is not width / heads."""
    gated: bool = True
    """Gated feed-forward (three matrices); false is a plain one (two matrices), as in StarCoder2."""
    attention_bias: bool = False
    """Bias on queries, keys and values (StableLM 2, GLM-4), in llama also on the output of attention (Granite Code)."""
    mlp_bias: bool = False
    """Bias on the matrices of the feed-forward (Granite Code)."""
    exact_gelu: bool = False
    """GELU by the error function in place of its approximation by tanh (GPT-BigCode)."""
    parallel_residual: bool = False
    """Attention and feed-forward take the same norm of a block, and are added together (StableLM 2 12B)."""
    experts: Experts | None = None
    """Mixture of experts instead of the dense feed-forward (Mixtral, Qwen3-MoE)."""
    latent: Latent | None = None
    """Latent attention instead of plain heads (DeepSeek-V2 and V3)."""
    sliding_window: SlidingWindow | None = None
    """Sliding-window attention in some layers."""
    family: str | None = None
    """Architecture, a name of `lakh models`. Default: llama, mixtral with experts; with qk_norm qwen3, qwen3_moe."""
    rope_scaling: RopeScaling | None = None
    """Rotary frequencies changed for a longer context."""
    attention_softcap: float | None = None
    """Bound of attention scores, by tanh (Gemma 2)."""
    logit_softcap: float | None = None
    """Bound of the logits, by tanh (Gemma 2)."""
    query_scale: int | None = None
    """Scores are divided by its square root; default the head size (Gemma 2)."""
    query_growth: float | None = None
    """Queries at position p are multiplied by 1 + this * ln(1 + floor(p / rope_scaling.original_context)) (Ministral
    3), in llama4 those of layers without rotary positions by 1 + this * ln(1 + floor((p + 1) / growth_interval))."""
    growth_interval: int | None = None
    """Positions after which queries grow, in place of rope_scaling.original_context (Llama 4)."""
    rotary_size: int | None = None
    """Elements of a head that rotary positions rotate, from the first; default all (Phi-3, StableLM, GLM-4)."""
    unrotated_interval: int | None = None
    """Of each run of this many layers the last has no rotary positions; default none (SmolLM3, Llama 4)."""
    local_rope_base: float | None = None
    """Base of the rotary position frequencies in layers with a sliding window, which no scaling changes; default that
    of all layers (Gemma 3)."""
    embedding_scale: float | None = None
    """Factor of the embedded tokens (Granite)."""
    score_scale: float | None = None
    """Factor of attention scores; default 1 / sqrt(head size) (Granite)."""
    residual_scale: float | None = None
    """Factor of what attention and feed-forward add to the residual stream (Granite)."""
    logit_divisor: float | None = None
    """The logits are divided by it (Granite)."""

    def __post_init__(self) -> None:
        require_positive(self, "layers", "width", "heads", "kv_heads", "ffn", "vocab", "context", "head_size")
        require(self, "layers", lambda layers: layers <= MOST_LAYERS, f"is above {MOST_LAYERS:,}", "choose fewer")
        if self.head_size is None and self.width % self.heads:
            todo = f"choose one of {_divisors(self.width)}"
            raise ConfigError("heads", f"{self.heads} does not divide width {self.width}", todo)
        if self.head_dim % 2:
            raise ConfigError("heads", f"gives heads of odd size {self.head_dim}", "rotary positions need an even size")
        if self.heads % self.kv_heads:
            todo = f"choose one of {_divisors(self.heads)}"
            raise ConfigError("kv_heads", f"{self.kv_heads} does not divide heads {self.heads}", todo)
        require(
            self,
            ("rope_base", "local_rope_base"),
            lambda base: 1 < base < float("inf"),
            "is not above 1",
            "use e.g. 10000",
        )
        require(self, "norm_eps", lambda eps: 0 < eps < 1, "is not between 0 and 1", "use e.g. 1e-5")
        require_positive(
            self,
            "attention_softcap",
            "logit_softcap",
            "query_scale",
            "rotary_size",
            "unrotated_interval",
            "growth_interval",
        )
        factors = ("embedding_scale", "score_scale", "residual_scale", "logit_divisor", "query_growth")
        require(self, factors, lambda factor: 0 < factor < float("inf"), "is not above 0", "use e.g. 0.5")
        if self.rotary_size is not None and (self.rotary_size % 2 or self.rotary_size > self.head_dim):
            found = f"{self.rotary_size} of heads of {self.head_dim}"
            raise ConfigError("rotary_size", found, "choose an even number, at most the head size")
        if self.rope_scaling is not None and self.rope_scaling.kind == "longrope":
            self._check_longrope(self.rope_scaling)
        if self.query_growth is not None and self.growth_tokens is None:
            todo = "set model.rope_scaling.original_context, in llama4 model.growth_interval"
            raise ConfigError("query_growth", "is set without the context from which queries grow", todo)
        if self.family is not None and self.family not in FAMILIES:
            raise ConfigError("family", f"unknown architecture {self.family!r}", f"choose one of {', '.join(FAMILIES)}")
        if self.experts and self.experts.dense_layers > self.layers:
            found = f"{self.experts.dense_layers} of {self.layers} layers"
            raise ConfigError("experts.dense_layers", found, "choose fewer")
        if self.experts and any(block >= self.layers for block in self.experts.dense_blocks):
            found = f"{max(self.experts.dense_blocks)} of {self.layers} layers"
            raise ConfigError("experts.dense_blocks", found, "name blocks of the model, from 0 on")

    def _check_longrope(self, scaling: RopeScaling) -> None:
        if 2 * len(scaling.short_factors) != self.rotated_dim:
            found = f"has {len(scaling.short_factors)} numbers for {self.rotated_dim // 2} frequencies"
            raise ConfigError("rope_scaling.short_factors", found, "give one for every frequency")
        if scaling.original_context is not None and self.context > scaling.original_context:
            found = f"{self.context} is above rope_scaling.original_context, {scaling.original_context}"
            raise ConfigError("context", found, "use at most that: the frequencies of longer texts are not computed")

    @property
    def head_dim(self) -> int:
        return self.head_size or self.width // self.heads

    @property
    def rotated_dim(self) -> int:
        """Elements of a head that rotary positions rotate: with latent attention those of its rotated key."""
        return self.rope_dim or self.rotary_size or self.head_dim

    @property
    def cache_heads(self) -> int:
        """Heads of the KV cache: latent attention stores one, which all query heads share."""
        return 1 if self.latent else self.kv_heads

    @property
    def cache_head_dim(self) -> int:
        return self.kv_rank + self.rope_dim if self.latent else self.head_dim

    @property
    def family_name(self) -> str:
        if self.family is not None:
            return self.family
        names = ("llama", "qwen3") if self.experts is None else ("mixtral", "qwen3_moe")
        return names[bool(self.qk_norm)]

    @property
    def traits(self) -> ModelFamily:
        """What distinguishes its family from Llama."""
        return FAMILIES[self.family_name]

    @property
    def has_qkv_bias(self) -> bool:
        return self.traits.has_qkv_bias or self.attention_bias

    @property
    def has_output_bias(self) -> bool:
        """Whether the output of attention has a bias."""
        return self.traits.has_output_bias or (self.attention_bias and self.traits.biases_output)

    @property
    def has_ffn_bias(self) -> bool:
        """Whether the matrices of a dense feed-forward have biases."""
        return self.traits.has_output_bias or self.mlp_bias

    def window(self, layer: int) -> int | None:
        """Tokens that this layer attends to; None for all."""
        window = self.sliding_window
        return window.tokens if window is not None and window.covers(layer) else None

    @property
    def has_query_tables(self) -> bool:
        """Whether some positions of the context have a factor of queries, so that these rotate by tables of their
        own."""
        if self.query_growth is None or self.growth_tokens is None:
            return False
        return self.context > self.growth_tokens - self.traits.grows_unrotated

    @property
    def growth_tokens(self) -> int | None:
        """Positions after which queries grow."""
        if self.growth_interval is not None:
            return self.growth_interval
        return None if self.rope_scaling is None else self.rope_scaling.original_context

    @property
    def rope_bases(self) -> tuple[float, ...]:
        """Of the rotary positions of each kind of layer; 0 for none at all."""
        if self.traits.has_learned_positions:
            return (0.0,)
        if self.local_rope_base is not None:
            return self.rope_base, self.local_rope_base
        return (self.rope_base,) if self.unrotated_interval is None else (self.rope_base, 0.0)

    def rotates(self, layer: int) -> bool:
        """Whether this layer has rotary positions."""
        return self.rope_bases[self.rope_kind(layer)] > 0

    def rope_kind(self, layer: int) -> int:
        """Which of `rope_bases` this layer has."""
        if self.local_rope_base is not None:
            return int(self.window(layer) is not None)
        return int(self.unrotated_interval is not None and (layer + 1) % self.unrotated_interval == 0)

    @property
    def has_biases(self) -> bool:
        """Whether a matrix of attention or of a dense feed-forward has a bias."""
        return self.has_qkv_bias or self.has_output_bias or self.has_ffn_bias

    @property
    def has_head_norms(self) -> bool:
        """Whether each query and key head has a norm with a weight that all of them share."""
        traits = self.traits
        differ = traits.has_joint_head_norm or traits.has_separate_head_norms or traits.has_plain_head_norm
        return self.qk_norm and not differ

    @property
    def is_trainable(self) -> bool:
        """Whether lakh can train and serve it."""
        try:
            self.require_trainable()
        except InfeasiblePlan:
            return False
        return True

    def require_trainable(self) -> None:
        """Refuse a model that lakh plans but does not compute."""
        require_trainable(self)

    # --- optional parts as plain numbers: 0 where the model does not have the part ---

    num_experts = _PartNumber[int]("experts", "count")
    top_k = _PartNumber[int]("experts", "top_k")
    expert_ffn = _PartNumber[int]("experts", "ffn")
    shared_experts = _PartNumber[int]("experts", "shared")
    expert_bias = _PartNumber[bool]("experts", "bias")
    most_nodes = _PartNumber[int]("experts", "most_nodes")
    q_rank = _PartNumber[int]("latent", "q_rank")
    kv_rank = _PartNumber[int]("latent", "kv_rank")
    rope_dim = _PartNumber[int]("latent", "rope_dim")
    window_tokens = _PartNumber[int]("sliding_window", "tokens")

    @property
    def window_share(self) -> float:
        """Share of all layers with a window."""
        window = self.sliding_window
        return 0.0 if window is None else window.share * (1 - (window.first_layer or 0) / self.layers)

    @property
    def mixture_layers(self) -> int:
        """Layers with experts."""
        return 0 if self.experts is None else self.experts.num_layers(self.layers)

    @property
    def has_router_bias(self) -> bool:
        """Whether routers add a bias to the scores that choose experts."""
        return self.experts is not None and (self.traits.has_sigmoid_router or self.experts.balance_bias > 0)

    @property
    def is_latent(self) -> bool:
        return self.latent is not None

    # --- parameters ---

    @property
    def attention_weights(self) -> int:
        """Matrix weights of one block's attention: query, key, value, output."""
        heads = self.heads * self.head_dim
        if not self.latent:
            return 2 * self.width * heads + 2 * self.width * self.kv_heads * self.head_dim
        query_heads = self.heads * (self.head_dim + self.rope_dim)
        query = (self.width + query_heads) * self.q_rank if self.q_rank else self.width * query_heads
        key_value = self.width * (self.kv_rank + self.rope_dim) + self.kv_rank * 2 * heads
        return query + key_value + heads * self.width

    @property
    def ffn_matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def ffn_weights(self) -> int:
        """Matrix weights of one block's dense feed-forward."""
        return self.ffn_matrices * self.width * self.ffn

    @property
    def expert_weights(self) -> int:
        """Matrix weights of one expert."""
        return self.ffn_matrices * self.width * self.expert_ffn

    @property
    def routed_expert_weights(self) -> int:
        """Matrix weights of all routed experts of all layers."""
        return self.mixture_layers * self.num_experts * self.expert_weights

    @property
    def body_weights(self) -> int:
        """Matrix weights of all blocks, without norms, embedding and head."""
        return self._weights(self.num_experts)

    @property
    def active_weights(self) -> int:
        """Matrix weights of all blocks that one token uses."""
        return self._weights(self.top_k)

    def _weights(self, routed: int) -> int:
        dense = (self.layers - self.mixture_layers) * self.ffn_weights
        router = self.num_experts * self.width
        mixture = self.mixture_layers * ((routed + self.shared_experts) * self.expert_weights + router)
        return self.layers * self.attention_weights + dense + mixture

    @property
    def table_weights(self) -> int:
        """Embedding and output head."""
        return (1 if self.tied else 2) * self.vocab * self.width

    @property
    def parameters(self) -> int:
        traits = self.traits
        norms = (
            (self.layers * (traits.norms - self.parallel_residual) + 1)
            * self.width
            * (2 if traits.has_norm_bias else 1)
        )
        vectors = self.layers * (self.q_rank + self.kv_rank)
        if self.has_router_bias:
            vectors += self.mixture_layers * self.num_experts
        if traits.has_shared_gate:
            vectors += self.mixture_layers * self.width
        if traits.has_joint_head_norm or (self.qk_norm and traits.has_separate_head_norms):
            vectors += self.layers * (self.heads + self.kv_heads) * self.head_dim
        elif self.has_head_norms:
            vectors += 2 * self.layers * self.head_dim
        if self.has_qkv_bias:
            vectors += self.layers * (self.heads + 2 * self.kv_heads) * self.head_dim
        if self.has_output_bias:
            vectors += self.layers * self.width
        if self.has_ffn_bias:
            vectors += (self.layers - self.mixture_layers) * (self.width + (self.ffn_matrices - 1) * self.ffn)
        if traits.has_sinks:
            vectors += self.layers * self.heads
            vectors += self.mixture_layers * self.num_experts * (1 + 2 * self.expert_ffn + self.width)
        positions = self.context * self.width if traits.has_learned_positions else 0
        return self.body_weights + norms + vectors + self.table_weights + positions

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses."""
        return self.parameters - self.body_weights + self.active_weights

    # --- FLOPs ---

    @property
    def score_dim(self) -> float:
        """Mean width of the query-key and the score-value product over all heads. The rotary part of a latent head is
        in the scores and not in the values: it counts half."""
        return self.heads * (self.head_dim + self.rope_dim / 2)

    def attended_tokens(self, sequence: Any) -> Any:
        """Width of the score matrix, averaged over full and sliding-window layers. The causal mask halves the triangle
        of a full layer and of a chunk but not the band of a window, which therefore counts twice."""
        window = (2 - self.traits.has_chunks) * self.window_tokens  # the planner has arrays of models
        narrow = (window + sequence - abs(window - sequence)) / 2  # the smaller one, also of numpy arrays
        return (1 - self.window_share) * sequence + self.window_share * narrow

    def flops_per_token(self, sequence: float, *, causal: bool = True, frozen: bool = False) -> float:
        """Training FLOPs (forward and backward, no recomputation) of one token in a sequence of this length.

        6 FLOPs per matrix weight, logits included (4 when weights are frozen and need no gradient), plus
        12 L H d T for attention over T keys, half of that when causal.
        """
        attention = 12 * self.layers * self.score_dim * self.attended_tokens(sequence)
        weights = self.active_weights + self.vocab * self.width
        return float((6.0 - 2.0 * frozen) * weights + (attention / 2 if causal else attention))

    # --- bytes ---

    def state_bytes(self, *, param_bytes: int = 4, grad_bytes: int = 4, optimizer_bytes: int = 8) -> int:
        """Bytes of weights, gradients and optimizer state before sharding.

        The defaults are float32 AdamW (16 per parameter); bf16 weights with a float32 master copy have
        param_bytes = 2, grad_bytes = 2 or 4, optimizer_bytes = 12.
        """
        return self.parameters * (param_bytes + grad_bytes + optimizer_bytes)

    def activation_bytes(self, tokens: int, *, dtype_bytes: int = 2, recompute: bool = False) -> int:
        """Bytes kept from forward to backward for `tokens` tokens on one rank, with fused attention.

        Per block and token: four tensors of `width` (two norm inputs, two matmul inputs), query and attention
        output, key and value, gate, up and their product, and one float32 log-sum per head. With full
        recomputation only a block's input is kept, plus one block in progress. Logits count twice in float32.
        """
        block = 4 * self.width + 2 * self.heads * self.head_dim + 2 * self.kv_heads * self.head_dim
        dense, expert = self.ffn_matrices * self.ffn, self.ffn_matrices * self.expert_ffn
        if self.experts:  # a mixture keeps a copy of its input for each expert that receives the token
            routed = self.top_k * (self.width + expert) + self.shared_experts * expert
            block += max(dense if self.mixture_layers < self.layers else 0, routed)
        else:
            block += dense
        block += self.q_rank + self.kv_rank + 2 * self.heads * self.rope_dim
        block_bytes = block * dtype_bytes + 4 * self.heads
        kept = self.layers * self.width * dtype_bytes + block_bytes if recompute else self.layers * block_bytes
        return tokens * (kept + 2 * 4 * self.vocab)

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        if self.latent:
            return self.layers * (self.kv_rank + self.rope_dim) * dtype_bytes
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes


def _divisors(number: int) -> str:
    divisors = (str(i) for i in range(1, min(number, 1_000_000) + 1) if number % i == 0)
    found = list(itertools.islice(divisors, 13))
    return ", ".join(found if len(found) <= 12 else [*found[:11], "..."])
