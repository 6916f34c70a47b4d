"""Read the plans that `lakh dlrm plan --out` writes."""

from __future__ import annotations

import json
from pathlib import Path

from lakh.errors import UserError
from lakh.spec.embedding import EmbeddingPlan, EmbeddingShard

__all__ = ["read_plan"]


def read_plan(path: str | Path) -> EmbeddingPlan:
    """The plan that `lakh dlrm plan --out PATH` wrote."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        shards = [
            EmbeddingShard(**{**shard, "rows": tuple(shard["rows"]), "columns": tuple(shard["columns"])})
            for shard in data["shards"]
        ]
        return EmbeddingPlan(len(data["ranks"]), int(data["node_size"]), tuple(shards))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(str(path), f"is not a plan ({error})", "write one with lakh dlrm plan --out") from None
