"""Training speed of lakh's model beside transformers' LlamaForCausalLM of the same shape, in the same run.

Both do the same work on the same random tokens: forward, backward, clip, fused AdamW, float32 on a CPU and bf16
autocast on a GPU. They alternate, so that a busy moment of the machine hits both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lakh.spec import Data, Model, Run, Training
from lakh.trainer.optim import build_optimizer
from lakh.trainer.step import update
from lakh.workloads.code.model import CodeModel, init_weights

__all__ = ["SHAPES", "Row", "bench_train"]

# name -> (model, sequence, micro_batch)
SHAPES = {
    "demo": (Model(layers=4, width=192, heads=6, kv_heads=2, ffn=512, vocab=4096, context=512), 256, 8),
    "162m-2k": (
        Model(layers=16, width=768, heads=12, kv_heads=12, ffn=2048, vocab=32064, tied=False, context=2048),
        2048,
        32,
    ),
}


@dataclass(frozen=True)
class Row:
    system: str
    shape: str
    params: int
    seq: int
    micro_batch: int
    step_s: float
    tok_per_s: float
    ratio: float  # of tokens/s to the peer's; 1 for the peer itself


def bench_train(shape: str, *, repeats: int = 7, warmup: int = 2) -> list[Row]:
    """Median step time of both systems over `repeats` alternated steps."""
    spec, sequence, micro_batch = SHAPES[shape]
    run = Run(
        name="bench",
        model=spec,
        data=Data(sequence=sequence, batch=micro_batch, micro_batch=micro_batch),
        train=Training(steps=10_000),
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, spec.vocab, (micro_batch, sequence + 1), generator=generator).to(device)
    batch = [(rows[:, :-1], rows[:, 1:])]
    steps = {
        "transformers": _stepper(run, _PeerModel(spec).to(device), batch),
        "lakh": _stepper(run, _lakh_model(spec).to(device), batch),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(warmup + repeats):
        for name, step in steps.items():
            times[name].append(_timed(step, device))
    medians = {name: statistics.median(values[warmup:]) for name, values in times.items()}
    return [
        Row(
            name,
            shape,
            spec.parameters,
            sequence,
            micro_batch,
            step_s,
            micro_batch * sequence / step_s,
            medians["transformers"] / step_s,
        )
        for name, step_s in medians.items()
    ]


def _lakh_model(spec: Model) -> CodeModel:
    model = CodeModel(spec)
    init_weights(model, seed=0)
    return model


class _PeerModel(nn.Module):
    """transformers' Llama of the same shape, called like ours."""

    def __init__(self, spec: Model) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.inner = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=spec.vocab,
                hidden_size=spec.width,
                intermediate_size=spec.ffn,
                num_hidden_layers=spec.layers,
                num_attention_heads=spec.heads,
                num_key_value_heads=spec.kv_heads,
                max_position_embeddings=spec.context,
                tie_word_embeddings=spec.tied,
                attn_implementation="sdpa",  # type: ignore[call-arg]
            )
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens, use_cache=False).logits


def _stepper(run: Run, model: nn.Module, batch: list[tuple[Tensor, Tensor]]) -> Callable[[], object]:
    optimizer = build_optimizer(model, run.optim)
    return lambda: update(run, model, optimizer, batch, step=100)


def _timed(step: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
