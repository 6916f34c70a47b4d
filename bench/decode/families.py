"""The CPU time of a decode step of every architecture: random weights of about 100M parameters, of the same width,
depth, heads and active feed-forward, so that what differs is the block.

`ns_per_param` is the CPU time of a token over the weights that it reads: those of a mixture are the chosen experts'.
`ratio` is that figure over the first family's in the same run (llama of `all`).
"""

from __future__ import annotations

import functools
import gc
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.decode.speed import Started, Times, measure, per_token, start_engine, tokenizer_json
from bench.harness import BenchRow, alternate, best
from lakh.server.gc_control import full_collections_disabled
from lakh.server.model.inference import Precision
from lakh.spec.model import Experts, Latent, Model, RopeScaling, SlidingWindow
from lakh.tokens.tokenizer import Tokenizer
from lakh.workloads.code.architectures import parameters

__all__ = ["FAMILY_MODELS", "bench_families", "family_model"]

_SIZES: dict[str, Any] = {
    "layers": 12,
    "width": 768,
    "heads": 12,
    "kv_heads": 4,
    "ffn": 2048,
    "vocab": 32_000,
    "context": 2048,
    "tied": True,
}
_EXPERTS = Experts(count=8, top_k=2, ffn=512)
FAMILY_MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": SlidingWindow(tokens=1024)},
    "ministral3": {
        "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_context=512, attention_factor=1.0),
        "query_growth": 0.1,
    },
    "qwen2": {},
    "qwen3": {"qk_norm": True},
    "starcoder2": {"gated": False, "ffn": 3072},
    "gpt_bigcode": {"gated": False, "ffn": 3072, "kv_heads": 1},
    "stablelm": {"rotary_size": 16},
    "smollm3": {"unrotated_interval": 4},
    "glm4": {"rotary_size": 32, "attention_bias": True},
    "granite": {"embedding_scale": 12.0, "score_scale": 0.015625, "residual_scale": 0.22, "logit_divisor": 8.0},
    "olmo2": {"qk_norm": True},
    "olmo3": {"qk_norm": True, "local_rope_base": 10_000.0, "sliding_window": SlidingWindow(tokens=1024, share=0.75)},
    "gemma": {},
    "gemma2": {
        "attention_softcap": 50.0,
        "logit_softcap": 30.0,
        "query_scale": 64,
        "sliding_window": SlidingWindow(tokens=1024, share=0.5),
    },
    "gemma3": {
        "qk_norm": True,
        "local_rope_base": 10_000.0,
        "sliding_window": SlidingWindow(tokens=512, share=5 / 6),
    },
    "mixtral": {"experts": _EXPERTS},
    "qwen2_moe": {"experts": Experts(count=16, top_k=4, ffn=256, shared=4, normalize=False)},
    "qwen3_moe": {"experts": Experts(count=16, top_k=4, ffn=256), "qk_norm": True},
    "minimax_m2": {"qk_norm": True, "rotary_size": 32, "experts": Experts(count=16, top_k=4, ffn=256)},
    "gpt_oss": {
        "experts": Experts(count=8, top_k=2, ffn=512, bias=True),
        "sliding_window": SlidingWindow(tokens=128, share=0.5),
    },
    "deepseek_v2": {
        "kv_heads": 12,
        "latent": Latent(kv_rank=256, rope_dim=32),
        "experts": Experts(count=8, top_k=2, ffn=512, shared=1, dense_layers=1, normalize=False),
    },
    "deepseek_v3": {
        "kv_heads": 12,
        "latent": Latent(kv_rank=256, rope_dim=32),
        "experts": Experts(
            count=8, top_k=2, ffn=512, shared=1, dense_layers=1, groups=4, top_groups=2, weight_scale=2.5
        ),
    },
    "llama4": {
        "qk_norm": True,
        "unrotated_interval": 4,
        "experts": Experts(count=8, top_k=1, ffn=1024, shared=1, normalize=False),
    },
    "glm4_moe": {
        "qk_norm": True,
        "rotary_size": 32,
        "experts": Experts(count=8, top_k=2, ffn=512, shared=1, dense_layers=1, weight_scale=2.5),
    },
}
"""By the name of the family: what its model has beyond `_SIZES`. A family that is not here has those only."""


def family_model(name: str) -> Model:
    """Raises InfeasiblePlan for a family that needs an entry in FAMILY_MODELS."""
    spec = Model(family=name, **{**_SIZES, **FAMILY_MODELS.get(name, {})})
    spec.require_trainable()
    return spec


def bench_families(
    *,
    families: Sequence[str],
    precision: Precision = "int8",
    prompt: int = 64,
    new: int = 48,
    repeats: int = 3,
    progress: Callable[[str], object] = lambda what: None,
) -> list[BenchRow]:
    """A row for each family, measured in alternating rounds on the CPU, batch 1."""
    started: dict[str, Started] = {}
    specs = {name: family_model(name) for name in families}
    with tempfile.TemporaryDirectory(prefix="lakh-bench-") as scratch:
        path = Path(scratch) / "tokenizer.json"
        path.write_bytes(tokenizer_json(_SIZES["vocab"]))
        tokenizer = Tokenizer.load(path)
    prompts = torch.randint(20, _SIZES["vocab"], (1, prompt), generator=torch.Generator().manual_seed(1)).tolist()
    for name, spec in specs.items():
        progress(f"{name}: making weights")
        started[name] = start_engine(name, spec, _random_weights(spec), tokenizer, prompts, precision)
        started[name].generate(new)
        gc.collect()
    measures = {name: functools.partial(measure, one.generate, new) for name, one in started.items()}
    with full_collections_disabled():
        found = alternate(measures, repeats, progress=progress)
    rows: list[BenchRow] = []
    for name, spec in specs.items():
        row: BenchRow = {"family": name, "params": spec.parameters, "active": _read_weights(spec), "dtype": precision}
        row |= {"prompt": prompt, "new": new, "cpu_ms_per_token": None, "prompt_cpu_ms": None, "ns_per_param": None}
        if found[name].failed:
            rows.append(row | {"failed": found[name].failed})
            continue
        times = Times(*best(found[name].measured))
        cpu_s = per_token(times.first_cpu_s, times.all_cpu_s, new)
        row |= {"prompt_cpu_ms": times.first_cpu_s * 1e3}
        if cpu_s:
            row |= {"cpu_ms_per_token": cpu_s * 1e3, "ns_per_param": cpu_s * 1e9 / _read_weights(spec)}
        rows.append(row)
    reference = rows[0].get("ns_per_param")
    for row in rows:
        own = row.get("ns_per_param")
        row["ratio"] = own / reference if own and reference else None
    return rows


def _read_weights(spec: Model) -> int:
    """The weights that a step of one token reads: the embedding, where it is not also the head, is one row."""
    return spec.active_parameters - (0 if spec.tied else spec.vocab * spec.width)


def _random_weights(spec: Model) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.full(info.shape, info.initial)
        if len(info.shape) == 1 or info.shape[-1] == 1
        else torch.empty(info.shape).normal_(0.0, 0.02, generator=generator)
        for name, info in parameters(spec).items()
    }
