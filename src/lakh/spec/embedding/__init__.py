"""Embedding tables of a recommendation model, and plans of their sharding."""

from lakh.spec.embedding.plan import EmbeddingPlan, EmbeddingShard, MemoryTier, ShardingKind, check_plan
from lakh.spec.embedding.table import DTYPE_BYTES, EmbeddingTable, check_tables

__all__ = [
    "DTYPE_BYTES",
    "EmbeddingPlan",
    "EmbeddingShard",
    "EmbeddingTable",
    "MemoryTier",
    "ShardingKind",
    "check_plan",
    "check_tables",
]
