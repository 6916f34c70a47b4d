"""Published models by name, and model files in the same format.

A model file is TOML with the settings of a run's [model] section (`tied` defaults to false here) and `source`. The flat
keys of earlier versions (experts = 8, top_k, expert_ffn, head_dim, q_rank, window, ...) are still read.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from lakh import config
from lakh.errors import UserError
from lakh.spec.model import Model

__all__ = ["DATA", "load_model", "named_table"]

DATA = Path(__file__).parent / "data"

# Old flat key -> (table, key in it).
_OLD_KEYS = {
    "top_k": ("experts", "top_k"),
    "expert_ffn": ("experts", "ffn"),
    "shared_experts": ("experts", "shared"),
    "dense_layers": ("experts", "dense_layers"),
    "routed_nodes": ("experts", "most_nodes"),
    "expert_bias": ("experts", "bias"),
    "q_rank": ("latent", "q_rank"),
    "kv_rank": ("latent", "kv_rank"),
    "rope_dim": ("latent", "rope_dim"),
    "window": ("sliding_window", "tokens"),
    "windowed": ("sliding_window", "share"),
}


def load_model(name: str) -> Model:
    """A model of the catalogue, or of a TOML file."""
    if name.endswith(".toml"):
        return _model(config.read_toml(name), origin=Path(name).name)
    return _model(named_table("models.toml", name, "--model"), origin=f"models.toml [{name}]")


def named_table(file: str, name: str, option: str) -> dict[str, Any]:
    """Table `name` of a data file of the planner; `option` selects it on the command line."""
    tables = config.read_toml(DATA / file)
    if name not in tables:
        near = difflib.get_close_matches(name, tables, n=1)
        todo = f"did you mean {near[0]}?" if near else f"give a .toml file, or one of: {', '.join(tables)}"
        raise UserError(f"{option} {name}", f"is not in {file}", todo)
    return dict(tables[name])


def _model(data: dict[str, Any], origin: str) -> Model:
    settings: dict[str, Any] = {"tied": False}
    tables: dict[str, dict[str, Any]] = {}
    for key, value in data.items():
        if key in _OLD_KEYS:
            table, name = _OLD_KEYS[key]
            tables.setdefault(table, {})[name] = value
        elif key == "experts" and isinstance(value, int):
            tables.setdefault("experts", {})["count"] = value
        elif key == "head_dim":
            settings["head_size"] = value
        elif key != "source":
            settings[key] = value
    settings |= {name: table for name, table in tables.items() if any(table.values())}
    return config.from_dict(Model, settings, origin=origin)
