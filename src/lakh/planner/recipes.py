"""What NVIDIA's published recipes say and its tables of results do not: read once, here.

Megatron-Bridge, releases 0.2 to 0.5 (containers 25.11 to 26.06), scripts/performance/configs. Experts are never cut up;
most dropless runs use a dispatcher that sends a token once per node; from container 26.06 on, mxfp8 runs exchange
tokens behind the computation and record the whole step as one graph (stated for most models, assumed for the others).
Before that, graphs of a layer's attention and router are replayed on machines with a Grace host, and on others for the
smallest mixture only; GPT-OSS has them on B300 and GB300.

DGX Cloud's runs on GB200 (NeMo 2.3, scripts/performance/llm) do not hide tensor-parallel traffic: stated for Llama 3.1
405B beyond 128 GPUs, assumed for the others, whose tensor groups leave a tray of four GPUs, too.

Knows rows of a CSV by their columns, and nothing of time. A row of another source gets the plain answer.
"""

from __future__ import annotations

import re

__all__ = ["exposes_tensor_traffic", "graphs", "overlaps_experts", "sends_once_per_node"]

Row = dict[str, str]
OVERLAP_MONTHS = 9.0
GRAPHED = re.compile(r"^GB\d00 .*model=(?!gpt-oss)|^G?B300 .*model=gpt-oss|^B\d00 .*model=qwen3-30b")


def _months(name: str, note: str) -> float:
    """Of a release since September 2025: NVIDIA names containers by year and month, 26.04 is seven after 25.09."""
    found = re.search(r"container (\d\d)\.(\d\d)", note) or re.match(r"dgxc-(\d\d)\.(\d\d)", name)
    return (int(found[1]) - 25) * 12.0 + int(found[2]) - 9 if found else 0.0


def sends_once_per_node(row: Row) -> bool:
    drops = "tokendrop" in row["note"]  # a capacity per expert needs the plain exchange
    return _is_bridge(row) and not drops and "alltoall" not in row["note"]


def overlaps_experts(row: Row) -> bool:
    late = _months(row["id"], row["note"]) >= OVERLAP_MONTHS and row["precision"] == "mxfp8"
    return "EP overlap on" in row["note"] or (_is_bridge(row) and late)


def exposes_tensor_traffic(row: Row) -> bool:
    return row["source"].startswith("DGX") and row["gpu"].startswith("GB")


def graphs(row: Row) -> int:
    """What is recorded and replayed: 0 nothing, 1 layers, 2 the whole step."""
    if not _is_bridge(row) or not GRAPHED.search(f"{row['gpu']} {row['note']}"):
        return 0
    return 2 if overlaps_experts(row) else 1


def _is_bridge(row: Row) -> bool:
    return row["source"].startswith("Megatron-Bridge")
