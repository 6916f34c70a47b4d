"""A Llama-style decoder as numbers: what it is, how many parameters, FLOPs and bytes.

Conventions, after published tables: FLOPs count a multiply-add as two; training is three times the forward pass;
the embedding look-up is free; *causal-exact* attention counts the half of the score matrix that is computed,
*PaLM-style* counts all of it (arXiv 2204.02311, appendix B), which is what most public MFU figures use.

A model may have experts (`Experts`), latent attention (`Latent`) or heads of a size of their own: such a model is
counted and planned, and refused by `require_plain` where it would be trained.
"""

from __future__ import annotations

from dataclasses import dataclass

from lakh.config import require_positive
from lakh.errors import ConfigError, InfeasiblePlan

__all__ = ["DTYPE_BYTES", "Experts", "Latent", "Model"]

DTYPE_BYTES = {"f32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The mixture layers of a model: a router sends each token to a few of many small feed-forwards."""

    count: int
    """Routed experts of a layer."""
    top_k: int
    """Experts that one token goes to."""
    ffn: int
    """Inner size of one expert."""
    shared: int = 0
    """Experts that every token goes to besides."""
    dense_layers: int = 0
    """Leading blocks that keep the dense feed-forward of `model.ffn`."""
    most_nodes: int = 0
    """Most nodes that the router sends a token to; 0 is no limit."""

    def __post_init__(self) -> None:
        require_positive(self, "count", "top_k", "ffn")
        if self.top_k > self.count:
            raise ConfigError("top_k", f"{self.top_k} of {self.count} experts", "choose at most all of them")
        for name in ("shared", "dense_layers", "most_nodes"):
            if getattr(self, name) < 0:
                raise ConfigError(name, f"{getattr(self, name)} is negative", "use 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Multi-head latent attention: queries, keys and values pass through narrow products (arXiv 2405.04434)."""

    kv_rank: int
    """Width of the compressed keys and values."""
    rope_dim: int
    """Extra size of each query and key head that carries the position."""
    q_rank: int = 0
    """Width of the compressed queries; 0 compresses none."""

    def __post_init__(self) -> None:
        require_positive(self, "kv_rank", "rope_dim")
        if self.q_rank < 0:
            raise ConfigError("q_rank", f"{self.q_rank} is negative", "use 0 or more")


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
    """Use the embedding table as output head too."""
    rope_base: float = 10_000.0
    """Base of the rotary position frequencies."""
    context: int = 512
    """Longest sequence that the model is made for."""
    norm_eps: float = 1e-5
    """Added inside RMSNorm's square root."""
    qk_norm: bool = False
    """Norm each query and key head before the rotary positions: steadier at high learning rates."""
    head_size: int | None = None
    """Size of one head, where it is not width / heads."""
    experts: Experts | None = None
    """A mixture of experts instead of the dense feed-forward: planned, not trained."""
    latent: Latent | None = None
    """Latent attention instead of plain heads: planned, not trained."""

    def __post_init__(self) -> None:
        require_positive(self, "layers", "width", "heads", "kv_heads", "ffn", "vocab", "context")
        if self.head_size is not None:
            require_positive(self, "head_size")
        elif self.width % self.heads:
            raise ConfigError(
                "heads", f"{self.heads} does not divide width {self.width}", f"choose one of {_divisors(self.width)}"
            )
        if self.head_dim % 2:
            raise ConfigError("heads", f"gives heads of odd size {self.head_dim}", "rotary positions need an even size")
        if self.heads % self.kv_heads:
            raise ConfigError(
                "kv_heads",
                f"{self.kv_heads} does not divide heads {self.heads}",
                f"choose one of {_divisors(self.heads)}",
            )
        if not 1 < self.rope_base < float("inf") or not 0 < self.norm_eps < 1:
            raise ConfigError(
                "rope_base", "rope_base must be above 1, and norm_eps between 0 and 1", "use 10000 and 1e-5"
            )
        if self.experts and self.experts.dense_layers > self.layers:
            raise ConfigError(
                "experts.dense_layers", f"{self.experts.dense_layers} of {self.layers} layers", "choose fewer"
            )

    @property
    def head_dim(self) -> int:
        return self.head_size or self.width // self.heads

    @property
    def is_plain(self) -> bool:
        """Whether lakh trains it."""
        return self.experts is None and self.latent is None and self.head_dim * self.heads == self.width

    def require_plain(self) -> None:
        """Refuse what lakh plans and does not train."""
        for name, what in (("experts", "a mixture of experts"), ("latent", "latent attention")):
            if getattr(self, name) is not None:
                found = f"is set: {what} is planned (lakh plan estimate) and not trained"
                raise InfeasiblePlan(f"model.{name}", found, f"leave [model.{name}] away")
        if not self.is_plain:
            found = f"{self.head_dim} x {self.heads} heads is not width {self.width}: planned and not trained"
            raise InfeasiblePlan("model.head_size", found, "leave it away")

    # --- parameters ---

    @property
    def attention_weights(self) -> int:
        """Matrix weights of one block's attention: query, key, value, output."""
        if self.latent:
            size, rope, q_rank, kv_rank = self.head_dim, self.latent.rope_dim, self.latent.q_rank, self.latent.kv_rank
            into = self.width * q_rank + q_rank * self.heads * (size + rope) if q_rank else 0
            query = into or self.width * self.heads * (size + rope)
            key_value = self.width * (kv_rank + rope) + kv_rank * self.heads * 2 * size
            return query + key_value + self.heads * size * self.width
        return 2 * self.width * self.heads * self.head_dim + 2 * self.width * self.kv_heads * self.head_dim

    @property
    def ffn_weights(self) -> int:
        """Matrix weights of one block's dense feed-forward: gate, up, down."""
        return 3 * self.width * self.ffn

    @property
    def mixture_layers(self) -> int:
        return self.layers - self.experts.dense_layers if self.experts else 0

    def mixture_weights(self, routed: int) -> int:
        """Matrix weights of one block's mixture with so many of its routed experts, and of its router."""
        assert self.experts is not None
        one = 3 * self.width * self.experts.ffn
        return (routed + self.experts.shared) * one + self.experts.count * self.width

    @property
    def body_weights(self) -> int:
        """Matrix weights of all blocks, without norms, embedding and head."""
        return self._weights(self.experts.count if self.experts else 0)

    @property
    def active_weights(self) -> int:
        """Of these, the ones that a token passes through."""
        return self._weights(self.experts.top_k if self.experts else 0)

    def _weights(self, routed: int) -> int:
        dense = (self.layers - self.mixture_layers) * self.ffn_weights
        mixed = self.mixture_layers * self.mixture_weights(routed) if self.experts else 0
        return self.layers * self.attention_weights + dense + mixed

    @property
    def parameters(self) -> int:
        norms = (2 * self.layers + 1) * self.width + (2 * self.layers * self.head_dim if self.qk_norm else 0)
        if self.latent:
            norms += self.layers * (self.latent.q_rank + self.latent.kv_rank)
        tables = (1 if self.tied else 2) * self.vocab * self.width
        return self.body_weights + norms + tables

    # --- FLOPs ---

    def flops_per_token(self, sequence: int, *, causal: bool = True) -> float:
        """Training FLOPs (forward and backward) of one token in a sequence of this length.

        6 FLOPs per matrix weight, plus 12 L H d T for attention over T keys, half of that when causal. The position's
        part of a latent head is in the scores and not in the values: it counts half.
        """
        size = self.head_dim + (self.latent.rope_dim / 2 if self.latent else 0)
        attention = 12 * self.layers * self.heads * size * sequence
        head = self.vocab * self.width
        return 6.0 * (self.active_weights + head) + (attention / 2 if causal else attention)

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
        recomputation only a block's input is kept, plus one block at work. Logits are counted twice in float32.
        """
        block = 4 * self.width + 2 * self.heads * self.head_dim + 2 * self.kv_heads * self.head_dim
        if self.experts:  # a mixture keeps a copy of its input for each expert that the token goes to
            inner = (
                self.experts.top_k * (self.width + 3 * self.experts.ffn) + self.experts.shared * 3 * self.experts.ffn
            )
            block += max(3 * self.ffn if self.experts.dense_layers else 0, inner)
        else:
            block += 3 * self.ffn
        if self.latent:
            block += self.latent.q_rank + self.latent.kv_rank + 2 * self.heads * self.latent.rope_dim
        block_bytes = block * dtype_bytes + 4 * self.heads
        kept = self.layers * self.width * dtype_bytes + block_bytes if recompute else self.layers * block_bytes
        return tokens * (kept + 2 * 4 * self.vocab)

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        if self.latent:
            return self.layers * (self.latent.kv_rank + self.latent.rope_dim) * dtype_bytes
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes


def _divisors(number: int) -> str:
    found = [str(i) for i in range(1, number + 1) if number % i == 0]
    return ", ".join(found if len(found) <= 12 else [*found[:11], "..."])
