"""Reads the tables of a model: lakh's TOML or JSON, EmbeddingBagCollection configs, or a model that ships with lakh.

    [[tables]]            # or JSON: {"tables": [...]}, or a list
    name = "item"
    rows = 40_000_000
    width = 128
    pooling = 12.0

Configs of TorchRec's EmbeddingBagCollection have num_embeddings, embedding_dim and feature_names instead.
`tables_of_configs` takes the objects themselves, without importing TorchRec.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lakh import config
from lakh.errors import ConfigError, UserError
from lakh.planner.catalogue import DATA
from lakh.spec.embedding import EmbeddingTable, check_tables

__all__ = ["TABLE_SETS", "parse_tables", "read_text", "tables_of_configs"]

TABLE_SETS = DATA / "tables"
"""Published table sets, by name."""

TORCHREC_DTYPES = {"FP32": "f32", "FP16": "f16", "BF16": "bf16"}


def read_text(name: str) -> tuple[str, str]:
    """The text of a table file, or of a set that ships with lakh; and what to call it in messages."""
    path = Path(name)
    if not path.exists() and path.name == name and (TABLE_SETS / f"{name}.toml").exists():
        path = TABLE_SETS / f"{name}.toml"
    try:
        return path.read_text(encoding="utf-8"), path.name
    except FileNotFoundError:
        known = ", ".join(sorted(file.stem for file in TABLE_SETS.glob("*.toml")))
        raise UserError(name, "no such file", f"give a file of tables, or one of: {known}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(name, f"cannot be read ({error})", "give a TOML, JSON or text file") from None


def parse_tables(text: str, origin: str) -> list[EmbeddingTable]:
    data = _parse(text, origin)
    if isinstance(data, Mapping):
        unknown = set(data) - {"tables", "source"}
        if "tables" not in data or unknown:
            found = f"has the key {sorted(unknown)[0]!r}" if unknown else "has no tables"
            raise ConfigError(origin, found, "list tables under [[tables]]")
        data = data["tables"]
    if not isinstance(data, list) or not all(isinstance(entry, Mapping) for entry in data):
        raise ConfigError(origin, "is not a list of tables", "list tables under [[tables]]")
    tables = [_table(entry, f"{origin}, tables[{index}]") for index, entry in enumerate(data)]
    check_tables(tables, origin)
    return tables


def tables_of_configs(configs: Iterable[Any], *, pooling: Mapping[str, float] | None = None) -> list[EmbeddingTable]:
    """Tables of EmbeddingBagConfig objects; `pooling` gives the mean ids per bag of a table (default 1)."""
    names = ("name", "num_embeddings", "embedding_dim", "feature_names", "data_type")
    tables = []
    for index, entry in enumerate(configs):
        plain = {name: getattr(entry, name) for name in names if hasattr(entry, name)}
        plain["data_type"] = getattr(plain.get("data_type"), "value", "FP32")
        if pooling and plain.get("name") in pooling:
            plain["pooling"] = pooling[plain["name"]]
        tables.append(_table(plain, f"configs[{index}]"))
    check_tables(tables, "configs")
    return tables


def _parse(text: str, origin: str) -> Any:
    if origin.endswith(".json") or text.lstrip()[:1] in ("{",) or text.lstrip().startswith("[{"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(origin, f"is not JSON ({error})", "fix that line") from None
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(origin, f"is not TOML ({error})", "fix that line") from None


def _table(entry: Mapping[str, Any], origin: str) -> EmbeddingTable:
    if "num_embeddings" not in entry:
        return config.from_dict(EmbeddingTable, entry, origin=origin)
    dtype = str(entry.get("data_type", "FP32"))
    if dtype not in TORCHREC_DTYPES:
        raise ConfigError(f"{origin}, data_type", f"{dtype} is not supported", f"use {', '.join(TORCHREC_DTYPES)}")
    settings = {
        "name": entry.get("name", ""),
        "rows": entry["num_embeddings"],
        "width": entry.get("embedding_dim", 0),
        "features": max(1, len(entry.get("feature_names", ()))),
        "dtype": TORCHREC_DTYPES[dtype],
        "pooling": float(entry.get("pooling", 1.0)),
    }
    return config.from_dict(EmbeddingTable, settings, origin=origin)
