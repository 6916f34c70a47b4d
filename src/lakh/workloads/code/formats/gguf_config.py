"""Convert between spec.Model and the keys of a GGUF file, those that begin with the name of its architecture.

The names are the same in all architectures, but for those that an architecture's table (architectures/) changes. A key
that is not known may change what a model computes: it is a UserError that names it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from lakh.errors import ConfigError, CorruptCheckpoint, LakhError, UserError
from lakh.spec.model import FAMILIES, OPTIONAL_PARTS, Experts, Latent, Model, ModelFamily, SlidingWindow
from lakh.workloads.code.architectures import ModelArchitecture, architecture_of, architectures
from lakh.workloads.code.formats import gguf_rope
from lakh.workloads.code.formats.hf.config import DEFAULT_FAMILIES, FLOATS

__all__ = ["FURTHER_LAYERS", "keys_of", "known_architectures", "spec_of"]

HF = "export it with --format hf"
_FIELDS = {
    "layers": "block_count",
    "context": "context_length",
    "width": "embedding_length",
    "ffn": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_base": "rope.freq_base",
}
"""Numbers of spec.Model."""
_EXPERTS = {"count": "expert_count", "top_k": "expert_used_count", "ffn": "expert_feed_forward_length"}
_ROUTED = {"shared": "expert_shared_count", "dense_layers": "leading_dense_block_count"}
_SHARED_FFN = "expert_shared_feed_forward_length"
"""Of experts that process every token, together, in a family whose shared experts have a gate."""
_INTERVAL = "interleave_moe_layer_step"
_NORMALIZED = "expert_weights_norm"
_SIGMOID_ROUTER = {
    "normalize": _NORMALIZED,
    "weight_scale": "expert_weights_scale",
    "groups": "expert_group_count",
    "top_groups": "expert_group_used_count",
}
_GATING = "expert_gating_func"
FURTHER_LAYERS = "nextn_predict_layers"
"""Layers behind the last one that predict further tokens, which block_count counts and lakh leaves out."""
SOFTMAX, SIGMOID = 1, 2
"""Of a router."""
_LATENT = {"kv_rank": "attention.kv_lora_rank", "q_rank": "attention.q_lora_rank", "rope_dim": "rope.dimension_count"}
_SIZES = ("attention.key_length", "attention.value_length")
_LATENT_SIZES = ("attention.key_length_mla", "attention.value_length_mla")
_GROWTH = "query_growth"
_TENSORS = {
    "qk_norm": "blk.0.attn_q_norm.weight",
    "attention_bias": "blk.0.attn_q.bias",
    "mlp_bias": "blk.0.ffn_gate.bias",
}
"""Settings of spec.Model that a file has no key for: it has such a tensor or not."""
_SECOND_NORM = "blk.0.ffn_norm.weight"
"""A block that has it does not add attention and feed-forward of one norm together."""
_PARALLEL = "use_parallel_residual"
"""What a block adds together follows from its tensors: this key of StableLM's files says nothing more."""
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_WHOLE = (
    *(*_EXPERTS.values(), *_ROUTED.values(), *_LATENT.values(), *_SIZES, *_LATENT_SIZES),
    *("expert_group_count", "expert_group_used_count", FURTHER_LAYERS, _WINDOW, _INTERVAL, _SHARED_FFN),
)
"""Settings that are whole numbers, of which a file has some."""
MOST = 1 << 31
_NO_NUMBERS = (_NORMALIZED, _PARALLEL, "rope.scaling.type", "rope.scaling.finetuned")
_FIXED = {
    "attention.causal": (True,),
    "expert_weights_scale": (0.0, 1.0),
    _NORMALIZED: (False,),
    _GATING: (0, SOFTMAX),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    _SHARED_FFN: (0,),
    _PATTERN: (2,),
    "tensor_data_layout": ("Meta AI original pth",),
    "pooling_type": (0,),
}
"""Keys with the only values that lakh computes."""
GEMMA2_DEFAULTS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, _WINDOW: 4096}
"""What llama.cpp takes for missing keys of Gemma 2."""
GEMMA3_DEFAULTS = {"rope.freq_base_swa": 10_000.0}
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
UNROTATED_INTERVAL = 4
LLAMA4_CHUNK = 8192
LLAMA4_GROWTH = (0.1, 8192)
DEEPSEEK_EPS = 1e-6  # of the norms of latents in lakh; llama.cpp has that of all norms


def known_architectures() -> str:
    """What to tell the owner of a file of another one."""
    names = dict.fromkeys(known.gguf for known in architectures() if known.gguf is not None)
    return f"lakh loads {', '.join(names)}"


# --- writing ------------------------------------------------------------------------------------------------


def keys_of(spec: Model) -> dict[str, Any]:
    """The keys of a model, without the name of its architecture. A UserError for one that llama.cpp computes with other
    numbers."""
    architecture = architecture_of(spec)
    if architecture.name == "llama4":
        spec = _first_chunk(spec)
    _refuse_others(spec, architecture)
    assert architecture.gguf is not None
    keys = {key: getattr(spec, field) for field, key in {**_FIELDS, **architecture.gguf_names}.items()}
    keys |= {"vocab_size": spec.vocab, "rope.dimension_count": spec.rotated_dim}
    if spec.traits.has_learned_positions:
        del keys["rope.freq_base"], keys["rope.dimension_count"]
    if spec.latent is None:
        keys |= dict.fromkeys(_SIZES, spec.head_dim)
    else:  # llama.cpp computes with one key head, as lakh's server does
        keys |= {"attention.head_count_kv": 1, **{key: getattr(spec, field) for field, key in _LATENT.items()}}
        keys |= dict(zip(_SIZES, (spec.kv_rank + spec.rope_dim, spec.kv_rank), strict=True))
        keys |= dict(zip(_LATENT_SIZES, (spec.head_dim + spec.rope_dim, spec.head_dim), strict=True))
    if spec.experts is not None:
        keys |= {key: getattr(spec.experts, field) for field, key in _expert_keys(spec.traits).items()}
        if architecture.gguf == "llama":
            keys["feed_forward_length"] = spec.experts.ffn
        if architecture.gguf == "llama4":
            keys[_INTERVAL] = spec.experts.interval
            if spec.unrotated_interval is None:
                keys[_WINDOW] = 0  # llama.cpp then rotates in all layers
        if spec.traits.has_shared_gate:
            keys[_SHARED_FFN] = spec.experts.shared * spec.experts.ffn
    if spec.traits.has_sigmoid_router:
        keys[_GATING] = SIGMOID
    elif spec.latent is not None:
        keys |= {"expert_weights_scale": 1.0, _GATING: SOFTMAX}
    if spec.sliding_window is not None:
        keys[_WINDOW] = spec.sliding_window.tokens
    for field, key in {**_FIELDS, **architecture.gguf_names}.items():
        if field in FLOATS and keys.get(key) is not None:
            keys[key] = float(keys[key])
    keys = {key: value for key, value in keys.items() if value is not None}
    return keys | gguf_rope.keys_of(spec, architecture.gguf)


def _first_chunk(spec: Model) -> Model:
    """Llama 4 with the context of its first chunk: llama.cpp knows the chunks and the growth of released models without
    keys, and computes other numbers where a chunk ends."""
    window = spec.sliding_window
    if window is None:
        is_released = spec.context <= LLAMA4_CHUNK
    else:
        chunked = [spec.window(layer) is not None for layer in range(spec.layers)]
        is_released = window.tokens == LLAMA4_CHUNK and chunked == list(map(spec.rotates, range(spec.layers)))
    if not is_released or (spec.query_growth, spec.growth_interval) != LLAMA4_GROWTH:
        return spec
    context = min(spec.context, LLAMA4_CHUNK - 1)
    return replace(spec, context=context, sliding_window=None, query_growth=None, growth_interval=None)


def _expert_keys(family: ModelFamily) -> dict[str, str]:
    """Fields of spec.Experts, and their keys in files of such a family."""
    if family.has_sigmoid_router and "groups" in family.expert_options:
        return {**_EXPERTS, **_ROUTED, **_SIGMOID_ROUTER}
    return {**_EXPERTS, **_ROUTED} if "latent" in family.needs else _EXPERTS


def _normalizes(family: ModelFamily) -> bool:
    """Whether the weights of a token's experts sum to 1 in llama.cpp, where a file has no key for it."""
    return "latent" not in family.needs and not (family.has_shared_gate or family.scales_expert_inputs)


def _refuse_others(spec: Model, architecture: ModelArchitecture) -> None:
    """What files of this architecture cannot say, or llama.cpp computes in another way."""

    def refuse(field: str, found: str) -> UserError:
        return UserError(f"model.{field}", f"{found} ({architecture.gguf})", HF)

    if architecture.gguf is None:
        raise UserError("--format gguf", f"lakh writes no GGUF of {architecture.name}", HF)
    is_square = spec.heads * spec.head_dim == spec.width
    if architecture.gguf in ("qwen2", "starcoder2") and not is_square:
        raise refuse("head_size", f"is {spec.head_dim}; llama.cpp needs width / heads")
    window = spec.sliding_window
    if architecture.name == "llama4" and (window or spec.query_growth) is not None:
        found = f"has chunks of {None if window is None else window.tokens}, query_growth {spec.query_growth}"
        raise refuse("sliding_window", f"{found}; llama.cpp computes {LLAMA4_CHUNK} and {LLAMA4_GROWTH[0]}")
    if window is not None and (window.share, window.first_layer or 0) != (architecture.gguf_windows, 0):
        raise refuse("sliding_window", "is in other layers than those of a GGUF file")
    if experts := spec.experts:
        known = {**_expert_keys(spec.traits), **({"shared": _SHARED_FFN} if spec.traits.has_shared_gate else {})}
        if experts.interval != 1 and architecture.gguf != "llama4":
            raise refuse("experts.interval", f"is {experts.interval}; llama.cpp has experts in all blocks")
        if experts.dense_blocks:
            raise refuse("experts.dense_blocks", "is set; llama.cpp has experts in all blocks")
        for field in _ROUTED.keys() - known.keys() - spec.traits.fixed_experts.keys():
            if getattr(experts, field):
                raise refuse(f"experts.{field}", "is set; llama.cpp does not compute it")
        if experts.balance_bias and not spec.traits.has_sigmoid_router:
            raise refuse("experts.balance_bias", "is set; llama.cpp does not compute it")
        if "normalize" not in known and experts.normalize != _normalizes(spec.traits):
            raise refuse("experts.normalize", f"is {experts.normalize}; llama.cpp computes the opposite")
    if spec.exact_gelu:
        raise refuse("exact_gelu", "is true; llama.cpp computes GELU by tanh")
    if spec.latent is not None and spec.norm_eps != DEEPSEEK_EPS:
        raise refuse("norm_eps", f"is {spec.norm_eps:g}; llama.cpp normalizes latents with it, lakh with 1e-6")
    if architecture.name in LAYERS_OF_27B and (spec.query_scale or spec.head_dim) != _gemma_scale(spec):
        raise refuse("query_scale", f"is {spec.query_scale}; llama.cpp computes {_gemma_scale(spec)}")
    if architecture.name == "gemma3" and spec.attention_softcap is not None:
        raise refuse("attention_softcap", "is set; llama.cpp does not compute it")
    if architecture.name == "gemma3" and (spec.local_rope_base is None or window is None):
        raise refuse("sliding_window, local_rope_base", "is missing; llama.cpp needs it")
    if architecture.name == "gemma2":
        for field in ("attention_softcap", "logit_softcap", "sliding_window"):
            if getattr(spec, field) is None:
                raise refuse(field, "is missing; llama.cpp needs it")
    intervals = {"smollm3": (_unrotated_interval(spec),), "llama4": (_unrotated_interval(spec), None)}
    if spec.unrotated_interval not in intervals.get(architecture.name, (spec.unrotated_interval,)):
        found = f"is {spec.unrotated_interval}; llama.cpp computes {_unrotated_interval(spec)}"
        raise refuse("unrotated_interval", found)
    if architecture.name == "llama4" and spec.qk_norm != _has_llama4_norms(spec.num_experts):
        raise refuse("qk_norm", f"is {spec.qk_norm}; llama.cpp decides by the number of experts, {spec.num_experts}")
    if architecture.name == "llama4" and spec.context >= LLAMA4_CHUNK and spec.unrotated_interval is not None:
        raise refuse("context", f"is {spec.context}; llama.cpp attends to chunks of {LLAMA4_CHUNK} tokens")
    if architecture.name == "ministral3" and window is not None:
        raise refuse("sliding_window", "is set; llama.cpp does not compute it")
    if not spec.tied and architecture.name in ("gemma", "gemma2"):
        raise refuse("tied", "is false; llama.cpp takes the embedding as the head")
    if architecture.name == "olmo3" and (window is None or spec.local_rope_base != spec.rope_base):
        raise refuse("sliding_window, local_rope_base", "is missing or of another base; llama.cpp needs that of all")
    if spec.tied and architecture.name in ("gpt_oss", "olmo2", "olmo3"):
        raise refuse("tied", "is true; llama.cpp needs a head")


def _gemma_scale(spec: Model) -> int:
    """llama.cpp has no key for it: it knows the 27B models by their number of layers."""
    return spec.width // spec.heads if spec.layers == LAYERS_OF_27B[spec.family_name] else spec.head_dim


def _unrotated_interval(spec: Model) -> int | None:
    """llama.cpp has no key for it."""
    return UNROTATED_INTERVAL if spec.layers >= UNROTATED_INTERVAL else None


def _has_llama4_norms(num_experts: int) -> bool:
    """llama.cpp has no key for it: it knows Maverick, which has none, by its 128 experts."""
    return num_experts != 128


# --- reading ------------------------------------------------------------------------------------------------


def spec_of(
    where: str,
    settings: Mapping[str, Any],
    *,
    tensors: Container[str],
    rope_factors: np.ndarray | None,
    longrope: tuple[np.ndarray | None, np.ndarray | None] | None = None,
) -> Model:
    """The model that the keys of a file, and the names of its tensors, describe; `where` is its path, for errors.
    `longrope`: its short and long divisors of frequencies."""
    kind = settings.get("general.architecture")
    known = [one for one in architectures() if one.gguf is not None and one.gguf == kind]
    if not known:
        raise UserError(f"general.architecture ({where})", f"is {kind!r}", known_architectures())
    prefix = f"{kind}."
    keys = {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}
    if kind == "gemma2":
        keys = GEMMA2_DEFAULTS | keys
    if kind == "gemma3":
        keys = GEMMA3_DEFAULTS | keys
    architecture = _choose(known, keys)
    _require_known(where, architecture, keys)
    try:
        spec = _model(where, architecture, keys, settings, tensors)
        if longrope is not None:
            spec = gguf_rope.longrope_of(where, spec, _decimals(keys), *longrope)
        else:
            scaling = gguf_rope.scaling_of(where, spec, _decimals(keys), rope_factors)
            growth = _decimals(keys).get(architecture.gguf_names.get(_GROWTH, "")) or None  # llama.cpp takes 0 as none
            spec = replace(spec, rope_scaling=scaling, query_growth=growth or spec.query_growth)
        spec.require_trainable()
        return spec
    except ConfigError as error:
        raise UserError(f"{error.where} ({where})", error.found, error.todo) from None
    except UserError:
        raise
    except LakhError as error:
        if isinstance(error, CorruptCheckpoint):
            raise
        raise UserError(f"{error.where} ({where})", error.found, error.todo) from None


def _choose(known: list[ModelArchitecture], keys: Mapping[str, Any]) -> ModelArchitecture:
    """Of those that share a name (llama, deepseek2): the one with experts, a window or such a router, if the file has
    them."""
    is_sigmoid = keys.get(_GATING) == SIGMOID
    known = [one for one in known if FAMILIES[one.name].has_sigmoid_router == is_sigmoid] or known
    for part, key in (("experts", "expert_count"), ("sliding_window", _WINDOW)):
        if keys.get(key):
            having = [one for one in known if part in FAMILIES[one.name].allows]
            known = having or known
        else:
            known = [one for one in known if part not in FAMILIES[one.name].needs] or known
    return known[0]


def _require_known(where: str, architecture: ModelArchitecture, keys: Mapping[str, Any]) -> None:
    family = FAMILIES[architecture.name]
    names = {*_FIELDS.values(), *architecture.gguf_names.values(), *_SIZES, *gguf_rope.KEYS}
    names |= {
        "vocab_size",
        "rope.dimension_count",
        FURTHER_LAYERS,
        _WINDOW,
        *_EXPERTS.values(),
        *_expert_keys(family).values(),
    }
    if "latent" in family.needs:
        names |= {*_LATENT.values(), *_LATENT_SIZES}
    if family.has_shared_gate:
        names.add(_SHARED_FFN)
    if "parallel_residual" in family.allows:
        names.add(_PARALLEL)
    if architecture.gguf == "llama4":
        names.add(_INTERVAL)
    fixed = {**_FIXED, _GATING: (SIGMOID,), _NORMALIZED: (True,)} if family.has_sigmoid_router else _FIXED
    for key, value in keys.items():
        only: tuple[Any, ...] | None = None if key in names else fixed.get(key)
        if key == _PATTERN and architecture.gguf_windows < 1:
            every = round(1 / (1 - architecture.gguf_windows))
            if isinstance(value, list):  # of each layer, whether it has a window
                only = ([(layer + 1) % every != 0 for layer in range(len(value))],)
            else:
                only = (every,)
        if only is not None and value not in only:
            raise UserError(f"{key} ({where})", f"is {value!r}", f"lakh computes {' or '.join(map(repr, only))} only")
        if only is None and key not in names:
            found = f"is a setting of {architecture.gguf} that lakh does not know"
            raise UserError(f"{key} ({where})", found, "use a file without it; it may change what the model computes")
        if only is None and key not in _NO_NUMBERS:
            _require_number(where, key, value)


def _require_number(where: str, key: str, value: Any) -> None:
    """Of a damaged file a setting is a text, a list, not finite, or a number of parts below 0."""
    if isinstance(value, list):
        raise UserError(f"{key} ({where})", "differs from layer to layer", "use another model")
    kinds = (int,) if key in _WHOLE else (int, float)
    if type(value) not in kinds or not math.isfinite(value) or (key in _WHOLE and not 0 <= value < MOST):
        raise CorruptCheckpoint(where, f"has {key} {value!r:.80}, which is not valid", "download the file again")


def _model(
    where: str,
    architecture: ModelArchitecture,
    keys: Mapping[str, Any],
    settings: Mapping[str, Any],
    tensors: Container[str],
) -> Model:
    def number(key: str) -> float:
        value = keys.get(key)
        if isinstance(value, list):
            raise UserError(f"{key} ({where})", "differs from layer to layer", "use another model")
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CorruptCheckpoint(where, f"has no number {architecture.gguf}.{key}", "download the file again")
        return _decimal(value)

    family = FAMILIES[architecture.name]
    keys = {"attention.head_count_kv": keys.get("attention.head_count"), "rope.freq_base": 10_000.0, **keys}
    names = {**_FIELDS, **architecture.gguf_names}
    names.pop(_GROWTH, None)  # it needs the scaling of positions
    numbers: dict[str, Any] = {
        field: number(key) if field in FLOATS else int(number(key))
        for field, key in names.items()
        if key in keys or field not in OPTIONAL_PARTS
    }
    numbers["layers"] -= int(keys.get(FURTHER_LAYERS) or 0)
    tokens = settings.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list | None):
        raise CorruptCheckpoint(where, "has tokenizer.ggml.tokens, which is not a list", "download the file again")
    numbers["vocab"] = len(tokens) if tokens else int(number("vocab_size"))
    latent = None
    size_keys = _SIZES
    if "latent" in family.needs:
        latent = Latent(**{field: int(keys.get(key) or 0) for field, key in _LATENT.items()})
        numbers["kv_heads"] = numbers["heads"]
        size_keys = _LATENT_SIZES if _LATENT_SIZES[0] in keys else _SIZES  # older files have no *_mla
    default = numbers["width"] // max(numbers["heads"], 1)
    key_size, value_size = (int(keys.get(key, default)) for key in size_keys)
    key_size -= latent.rope_dim if latent else 0
    if key_size != value_size:
        found = f"keys have {key_size} elements without position, values {value_size}"
        raise UserError(f"{size_keys[1]} ({where})", found, "use another model")
    rotated = keys.get("rope.dimension_count", key_size)
    if latent is None and rotated != key_size and "rotary_size" in family.allows:
        numbers["rotary_size"] = int(rotated)
    elif latent is None and rotated != key_size:
        found = f"is {rotated} of heads of {key_size}"
        raise UserError(f"rope.dimension_count ({where})", found, "lakh rotates whole heads")
    if size_keys[0] in keys and key_size * numbers["heads"] != numbers["width"]:
        numbers["head_size"] = key_size
    window = None
    if (tokens_seen := keys.get(_WINDOW)) and "sliding_window" in family.allows:
        window = SlidingWindow(tokens=int(tokens_seen), share=architecture.gguf_windows)
    spec = Model(
        **numbers,
        experts=_experts(architecture, {**keys, "expert_feed_forward_length": _expert_ffn(keys)}),
        latent=latent,
        sliding_window=window,
        tied="output.weight" not in tensors,
        family=None if architecture.name in DEFAULT_FAMILIES else architecture.name,
        **{**family.fixed, **_found_in(tensors, family)},
    )
    if architecture.name in LAYERS_OF_27B:
        spec = replace(spec, query_scale=_gemma_scale(spec))
    if architecture.name == "olmo3":
        spec = replace(spec, local_rope_base=spec.rope_base)
    if architecture.name in ("smollm3", "llama4") and keys.get(_WINDOW) != 0:
        spec = replace(spec, unrotated_interval=_unrotated_interval(spec))
    if architecture.name == "llama4":
        spec = replace(spec, qk_norm=_has_llama4_norms(spec.num_experts))
        if keys.get(_WINDOW) != 0:
            spec = _with_chunks(spec)
    return spec


def _with_chunks(spec: Model) -> Model:
    """Llama 4 with what llama.cpp knows of released models without keys, where the context has more than a chunk."""
    if spec.context > LLAMA4_CHUNK:
        share = 1.0 if spec.unrotated_interval is None else 1 - 1 / spec.unrotated_interval
        spec = replace(spec, sliding_window=SlidingWindow(tokens=LLAMA4_CHUNK, share=share))
    if spec.context >= LLAMA4_CHUNK:
        growth, interval = LLAMA4_GROWTH
        spec = replace(spec, query_growth=growth, growth_interval=interval)
    return spec


def _found_in(tensors: Container[str], family: ModelFamily) -> dict[str, bool]:
    """Settings for which a file has no key."""
    found = {field: name in tensors for field, name in _TENSORS.items()}
    found["parallel_residual"] = _SECOND_NORM not in tensors
    return {field: value for field, value in found.items() if field in family.allows}


def _experts(architecture: ModelArchitecture, keys: Mapping[str, Any]) -> Experts | None:
    family = FAMILIES[architecture.name]
    if "experts" not in family.needs:
        return None
    names, own = _expert_keys(family), dict[str, Any]()
    if "normalize" in names:  # llama.cpp's defaults
        own = {"normalize": bool(keys.get(names.pop("normalize"))), "groups": 1, "top_groups": 1}
        own["weight_scale"] = _decimal(float(keys.get(names.pop("weight_scale")) or 1.0))
        own |= {field: int(keys.get(names.pop(field)) or 1) for field in ("groups", "top_groups")}
    else:
        own["normalize"] = _normalizes(family)
    if family.has_shared_gate:
        own["shared"] = _num_shared(keys)
    if architecture.gguf == "llama4":
        own["interval"] = int(keys.get(_INTERVAL) or 1)
    own |= family.fixed_experts
    own |= {field: int(keys.get(key) or 0) for field, key in names.items()}
    return Experts(**own, bias="bias" in family.expert_options)


def _num_shared(keys: Mapping[str, Any]) -> int:
    """llama.cpp takes the size of a dense feed-forward for a missing one."""
    whole, size = (int(keys.get(key) or 0) for key in (_SHARED_FFN, "expert_feed_forward_length"))
    whole = whole or int(keys.get("feed_forward_length") or 0)
    if not size or whole % size:
        raise ConfigError(_SHARED_FFN, f"is {whole}, no multiple of experts of {size}", "use another model")
    return whole // size


def _expert_ffn(keys: Mapping[str, Any]) -> Any:
    return keys.get("expert_feed_forward_length") or keys.get("feed_forward_length")


def _decimal(value: float) -> float:
    """The shortest decimal number that a float32 of the file stands for: 1e-06, not 9.99999997e-07."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _decimals(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _decimal(value) if isinstance(value, float) else value for key, value in keys.items()}
