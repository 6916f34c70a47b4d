"""What a program does that its published tables do not repeat in each row: assumed once, here.

Knows names of sources and nothing of their rows.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CodeBase", "code_base"]


@dataclass(frozen=True)
class CodeBase:
    """What a program does that its published table does not repeat in each row."""

    name: str
    flash: bool = True
    sequence_parallel: bool = True
    eager: bool = False
    native_attention: bool = False
    """Its fused attention was written for the GPU: programs from the second half of 2024 on."""
    overlap: bool = True
    tensor_overlap: bool = False
    zero1: bool = True
    gradient_bytes: float = 4.0
    gated: bool = True
    recompute: str = "none"
    weight_bytes: float = 2.0
    optimizer_bytes: float = 12.0
    interleaves: bool = False
    """Uses interleaved pipeline chunks that the source does not count: the best number is taken."""


_OLD = {"flash": False, "sequence_parallel": False, "overlap": False, "zero1": False, "gradient_bytes": 2.0,
        "gated": False, "recompute": "full"}  # fmt: skip
CODE_BASES = {
    "vTrain": CodeBase("megatron-deepspeed", **_OLD),  # type: ignore[arg-type]
    "Megatron-LM 2020": CodeBase("megatron-2021", **_OLD),  # type: ignore[arg-type]
    "Megatron-LM 2021": CodeBase("megatron-2021", **_OLD),  # type: ignore[arg-type]
    "Korthikanti": CodeBase("megatron-2021", **_OLD),  # type: ignore[arg-type]
    "MT-NLG": CodeBase("mt-nlg", **_OLD),  # type: ignore[arg-type]
    "MegaScale": CodeBase(
        "megascale-baseline", flash=False, overlap=False, gradient_bytes=2.0, gated=False, recompute="selective"
    ),
    "Megatron-Core 0.8": CodeBase(
        "megatron-core", gated=False, recompute="selective", interleaves=True, tensor_overlap=True
    ),
    "Nemotron-4": CodeBase("megatron-core", gated=False, recompute="selective", interleaves=True, tensor_overlap=True),
    "Megatron": CodeBase("nemo", tensor_overlap=True, native_attention=True),
    "DGX": CodeBase("nemo", tensor_overlap=True, native_attention=True),
    "Llama 3": CodeBase("megatron-core", recompute="none", interleaves=True, tensor_overlap=True),
    "llm-foundry": CodeBase(
        "llm-foundry",
        eager=True,
        sequence_parallel=False,
        zero1=False,
        gated=False,
        gradient_bytes=2.0,
    ),
    "torchtitan": CodeBase("torchtitan", eager=True, zero1=False, weight_bytes=4.0, optimizer_bytes=8.0),
    "nanotron": CodeBase("nanotron", gradient_bytes=4.0, eager=True, overlap=False, zero1=False),
    "LLaMA": CodeBase("llama"),
}


def code_base(source: str) -> CodeBase:
    for prefix in sorted(CODE_BASES, key=len, reverse=True):
        if source.startswith(prefix):
            return CODE_BASES[prefix]
    return CodeBase("unknown")
