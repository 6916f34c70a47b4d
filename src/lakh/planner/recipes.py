"""What NVIDIA's published recipes say and its tables of results do not: read once, here.

Megatron-Bridge, releases 0.2 to 0.5 (containers 25.11 to 26.06), scripts/performance/configs. Experts are never cut up;
most dropless runs use a dispatcher that sends a token once per node; from container 26.06 on, mxfp8 runs exchange
tokens behind the computation and record the whole step as one graph (stated for most models, assumed for the others).
Before that, graphs of a layer's attention and router are replayed on machines with a Grace host, and on others for the
smallest mixture only; GPT-OSS has them on B300 and GB300.

GPT-OSS in bf16 exchanges tokens plainly (moe_token_dispatcher_type "alltoall"), but on B300 from release 0.4 on, and
computes its experts' activation again where memory is short (recompute_modules); DeepSeek-V3 does so with the
up-projections of its attention, but in bf16 on GB300.

DGX Cloud's runs on GB200 (NeMo 2.3, scripts/performance/llm) do not hide tensor-parallel traffic: stated for Llama 3.1
405B beyond 128 GPUs, assumed for the others, whose tensor groups leave a tray of four GPUs, too. Their attention over
heads of 192 (multi-head latent attention) writes its scores: cuDNN before 9.11, younger than their container (25.04),
has no fused backward pass of that size on Blackwell (Transformer Engine, fused_attn.cpp). Their script agrees: it
recomputes attention (core_attn) on GB200 and not on H100, which saves memory only where scores are written.

Knows rows of a CSV by their columns, and nothing of time. A row of another source gets the plain answer.
"""

from __future__ import annotations

import re

__all__ = ["exposes_tensor_traffic", "graphs", "overlaps_experts", "sends_once_per_node", "writes_scores"]

Row = dict[str, str]
OVERLAP_MONTHS = 9.0
GRAPHED = re.compile(r"^GB\d00 .*model=(?!gpt-oss)|^G?B300 .*model=gpt-oss|^B\d00 .*model=qwen3-30b")


def _months(name: str, note: str) -> float:
    """Of a release since September 2025: NVIDIA names containers by year and month, 26.04 is seven after 25.09."""
    found = re.search(r"container (\d\d)\.(\d\d)", note) or re.match(r"dgxc-(\d\d)\.(\d\d)", name)
    return (int(found[1]) - 25) * 12.0 + int(found[2]) - 9 if found else 0.0


def sends_once_per_node(row: Row) -> bool:
    drops = "tokendrop" in row["note"]  # a capacity per expert needs the plain exchange
    plain = _is_gpt_oss(row) and row["precision"] == "bf16" and row["gpu"] != "B300"
    return _is_bridge(row) and not drops and not plain and "alltoall" not in row["note"]


def overlaps_experts(row: Row) -> bool:
    late = _months(row["id"], row["note"]) >= OVERLAP_MONTHS and row["precision"] == "mxfp8"
    return "EP overlap on" in row["note"] or (_is_bridge(row) and late)


def exposes_tensor_traffic(row: Row) -> bool:
    return row["source"].startswith("DGX") and row["gpu"].startswith("GB")


def writes_scores(row: Row) -> bool:
    """Whether attention is not fused although the program has fused kernels for other sizes."""
    return exposes_tensor_traffic(row) and "MLA" in row["note"]


def graphs(row: Row) -> int:
    """What is recorded and replayed: 0 nothing, 1 layers, 2 the whole step."""
    if not _is_bridge(row) or not GRAPHED.search(f"{row['gpu']} {row['note']}"):
        return 0
    return 2 if overlaps_experts(row) else 1


def repeats_activation(row: Row) -> bool:
    """Whether the activation between an expert's products is computed again ("moe_act")."""
    return _is_gpt_oss(row) and row["gpu"] not in ("B300", "GB300")


def repeats_latent(row: Row) -> bool:
    """Whether the up-projections of latent attention are computed again ("mla_up_proj")."""
    stores = row["gpu"] == "GB300" and row["precision"] == "bf16"
    return _is_bridge(row) and "MLA" in row["note"] and not stores


def _is_gpt_oss(row: Row) -> bool:
    return _is_bridge(row) and "gpt-oss" in row["note"]


def _is_bridge(row: Row) -> bool:
    return row["source"].startswith("Megatron-Bridge")
