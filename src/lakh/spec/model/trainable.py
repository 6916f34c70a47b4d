"""Which models lakh computes: settings that no family computes together are refused, with what to change."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from lakh.errors import InfeasiblePlan
from lakh.spec.model.experts import Experts
from lakh.spec.model.families import FAMILIES
from lakh.spec.model.rope import ROPE_BASE

if TYPE_CHECKING:
    from lakh.spec.model.model import Model

__all__ = ["OPTIONAL_PARTS", "require_trainable"]

OPTIONAL_PARTS = {
    "experts": "a mixture of experts",
    "latent": "latent attention",
    "sliding_window": "sliding window",
    "attention_softcap": "bound of attention scores",
    "logit_softcap": "bound of the logits",
    "query_scale": "scale of its own for attention scores",
    "query_growth": "factor of queries that grows with the position",
    "growth_interval": "interval of its own for the growth of queries",
    "rotary_size": "positions in a part of a head",
    "unrotated_interval": "layers without rotary positions",
    "local_rope_base": "base of positions of its own for layers with a window",
    "embedding_scale": "factor of embeddings",
    "score_scale": "factor of its own for attention scores",
    "residual_scale": "factor of what a block adds",
    "logit_divisor": "divisor of the logits",
}
"""Settings of a model that only some families compute (ModelFamily.allows), in words."""
_SWITCHES = dict.fromkeys(("qk_norm", "attention_bias", "mlp_bias", "exact_gelu", "parallel_residual"), False)
_SWITCHES["gated"] = True
"""Settings that are on or off, as most families need them."""
EXPERT_OPTIONS = (
    "shared",
    "dense_layers",
    "interval",
    "dense_blocks",
    "bias",
    "balance_bias",
    "groups",
    "weight_scale",
)
"""Settings of experts that only some families compute (ModelFamily.expert_options)."""


def require_trainable(model: Model) -> None:
    """Refuse a model that lakh plans but does not compute."""
    family, traits = model.family_name, model.traits
    for name, value in {**_SWITCHES, **traits.fixed}.items():
        if getattr(model, name) != value and name not in traits.allows:
            found = f"is {_toml(not value)}, and {family} needs {_toml(value)}: planned and not trained"
            raise InfeasiblePlan(f"model.{name}", found, f"set model.{name} = {_toml(value)}, or another model.family")
    for name, what in OPTIONAL_PARTS.items():
        if getattr(model, name) is not None and name not in traits.allows:
            families = [known for known, its in FAMILIES.items() if name in its.allows]
            found = f"is set: {family} has no {what}"
            if not families:
                found = f"is set: {what} is planned (lakh plan estimate) and not trained"
            todo = f"remove it, or choose model.family {' or '.join(families)}" if families else "remove it"
            raise InfeasiblePlan(f"model.{name}", found, todo)
    if model.rope_scaling is not None and model.rope_scaling.kind not in traits.rope_scalings:
        known = " or ".join(traits.rope_scalings) or "unscaled positions"
        raise InfeasiblePlan(
            "model.rope_scaling", f"is {model.rope_scaling.kind}, and {family} has {known}", "remove it"
        )
    if traits.has_equal_heads and model.heads * model.head_dim != model.width:
        found = f"gives heads of {model.head_dim}: {family} has heads of width / heads"
        raise InfeasiblePlan("model.head_size", found, "remove it")
    if traits.has_learned_positions:
        _check_learned_positions(model, family)
    for name in traits.needs:
        if getattr(model, name) is None:
            raise InfeasiblePlan(f"model.{name}", f"is missing: {family} has {OPTIONAL_PARTS[name]}", "set it")
    if model.experts is not None:
        if traits.has_shared_gate and not model.experts.shared:
            raise InfeasiblePlan("model.experts.shared", f"is 0: {family} has shared experts", "set it")
        if "bias" in traits.expert_options and not model.experts.bias:
            raise InfeasiblePlan("model.experts.bias", f"is false: the experts of {family} have biases", "set it")
        for name, value in traits.fixed_experts.items():
            if getattr(model.experts, name) != value:
                found = f"is {getattr(model.experts, name)}, and {family} needs {value}"
                raise InfeasiblePlan(f"model.experts.{name}", found, f"set it to {value}".lower())
        for option in fields(Experts):
            name, value = option.name, getattr(model.experts, option.name)
            if name in traits.fixed_experts:
                continue
            if name in EXPERT_OPTIONS and value != option.default and name not in traits.expert_options:
                found = f"is set: planned (lakh plan estimate) and not trained by {family}"
                raise InfeasiblePlan(f"model.experts.{name}", found, "remove it")


def _check_learned_positions(model: Model, family: str) -> None:
    if model.rope_base != ROPE_BASE:
        found = f"is set: {family} has a learned embedding of each position"
        raise InfeasiblePlan("model.rope_base", found, "remove it")
    if model.kv_heads not in (1, model.heads):
        found = f"is {model.kv_heads}: {family} has one head of keys and values, or as many as of queries"
        raise InfeasiblePlan("model.kv_heads", found, f"choose 1 or {model.heads}")


def _toml(value: bool) -> str:
    return "true" if value else "false"
