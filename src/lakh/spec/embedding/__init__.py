"""Recommendation models: embedding tables, plans of their sharding, and the dense network."""

from lakh.spec.embedding.memory import CachePolicy, TableMemory
from lakh.spec.embedding.network import ClickNetwork
from lakh.spec.embedding.plan import EmbeddingPlan, EmbeddingShard, MemoryTier, ShardingKind, check_plan
from lakh.spec.embedding.recommender import SYNTHETIC, CommDtype, Recommender
from lakh.spec.embedding.slice import TableSlice
from lakh.spec.embedding.table import DTYPE_BYTES, EmbeddingTable, check_tables

__all__ = [
    "DTYPE_BYTES",
    "SYNTHETIC",
    "CachePolicy",
    "ClickNetwork",
    "CommDtype",
    "EmbeddingPlan",
    "EmbeddingShard",
    "EmbeddingTable",
    "MemoryTier",
    "Recommender",
    "ShardingKind",
    "TableMemory",
    "TableSlice",
    "check_plan",
    "check_tables",
]
