"""Where the rows of embedding tables are: in device memory, or in host memory or files with a cache of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lakh import config

__all__ = ["CachePolicy", "TableMemory"]

CachePolicy = Literal["lru", "lfu", "lookahead"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableMemory:
    device_gib: float = 0.0
    """Memory of a rank for whole tables, GiB; 0: 85 % of a GPU of the cluster."""
    host_gib: float = 0.0
    """Host memory of a rank for tables that do not fit there, GiB."""
    file_gib: float = 0.0
    """Disk of a rank for tables that fit into neither, GiB."""
    folder: str = ""
    """Folder on that disk; empty: the system's folder for temporary files."""
    cache_share: float = 0.1
    """Share of the rows of a table in host memory or in a file that is cached; at least the rows of one step."""
    cache_policy: CachePolicy = "lookahead"
    """Which rows leave the cache: "lru" the least recently used, "lfu" the least frequently used, "lookahead" those
    whose next use in the coming steps is farthest away."""

    def __post_init__(self) -> None:
        config.require_not_negative(self, "device_gib", "host_gib", "file_gib")
        config.require(self, "cache_share", lambda share: 0 <= share <= 1, "is not a share", "choose 0 to 1")

    @property
    def is_limited(self) -> bool:
        """Whether the settings give a size, so that tables are assigned to tiers."""
        return bool(self.device_gib or self.host_gib or self.file_gib)
