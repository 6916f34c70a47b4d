"""A Llama-style decoder as numbers: what it is, how many parameters, FLOPs and bytes.

Conventions, after published tables: FLOPs count a multiply-add as two; training is three times the forward pass;
the embedding look-up is free; *causal-exact* attention counts the half of the score matrix that is computed,
*PaLM-style* counts all of it (arXiv 2204.02311, appendix B), which is what most public MFU figures use.
"""

from __future__ import annotations

from dataclasses import dataclass

from lakh.config import require_positive
from lakh.errors import ConfigError

__all__ = ["DTYPE_BYTES", "Model"]

DTYPE_BYTES = {"f32": 4, "bf16": 2}


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

    def __post_init__(self) -> None:
        require_positive(self, "layers", "width", "heads", "kv_heads", "ffn", "vocab", "context")
        if self.width % self.heads:
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
        if self.rope_base <= 1 or self.norm_eps <= 0:
            raise ConfigError("rope_base", "rope_base must be above 1 and norm_eps above 0", "use 10000 and 1e-5")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    # --- parameters ---

    @property
    def attention_weights(self) -> int:
        """Matrix weights of one block's attention: query, key, value, output."""
        return 2 * self.width * self.heads * self.head_dim + 2 * self.width * self.kv_heads * self.head_dim

    @property
    def ffn_weights(self) -> int:
        """Matrix weights of one block's feed-forward: gate, up, down."""
        return 3 * self.width * self.ffn

    @property
    def body_weights(self) -> int:
        """Matrix weights of all blocks, without norms, embedding and head."""
        return self.layers * (self.attention_weights + self.ffn_weights)

    @property
    def parameters(self) -> int:
        norms = (2 * self.layers + 1) * self.width + (2 * self.layers * self.head_dim if self.qk_norm else 0)
        tables = (1 if self.tied else 2) * self.vocab * self.width
        return self.body_weights + norms + tables

    # --- FLOPs ---

    def flops_per_token(self, sequence: int, *, causal: bool = True) -> float:
        """Training FLOPs (forward and backward) of one token in a sequence of this length.

        6 FLOPs per matrix weight, plus 12 L H d T for attention over T keys, half of that when causal.
        """
        attention = 12 * self.layers * self.heads * self.head_dim * sequence
        head = self.vocab * self.width
        return 6.0 * (self.body_weights + head) + (attention / 2 if causal else attention)

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
        block = 4 * self.width + 2 * self.heads * self.head_dim + 2 * self.kv_heads * self.head_dim + 3 * self.ffn
        block_bytes = block * dtype_bytes + 4 * self.heads
        kept = self.layers * self.width * dtype_bytes + block_bytes if recompute else self.layers * block_bytes
        return tokens * (kept + 2 * 4 * self.vocab)

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes


def _divisors(number: int) -> str:
    found = [str(i) for i in range(1, number + 1) if number % i == 0]
    return ", ".join(found if len(found) <= 12 else [*found[:11], "..."])
