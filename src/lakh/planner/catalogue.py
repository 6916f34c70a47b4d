"""Published models by name, and model files in the same format.

A model file is TOML with the settings of a run's [model] section (`tied` defaults to false here) and `source`. The flat
keys of earlier versions (experts = 8, top_k, expert_ffn, head_dim, q_rank, window, ...) are still read.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from lakh import config
from lakh.errors import ConfigError, UserError
from lakh.spec.model import Model

__all__ = ["catalogue_names", "catalogue_source", "load_model"]

CATALOGUE = Path(__file__).parent / "data" / "models.toml"

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
        path = Path(name)
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(name, "no such file", "give a model file, or a name of the catalogue") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(name, f"cannot be read ({error})", "give a model file in TOML") from None
        return _model(data, origin=path.name)
    models = _catalogue()
    if name not in models:
        near = difflib.get_close_matches(name, models, n=1)
        todo = f"did you mean {near[0]}?" if near else f"give a .toml file, or one of: {', '.join(models)}"
        raise UserError(f"--model {name}", "no such model", todo)
    return _model(models[name], origin=f"models.toml [{name}]")


def catalogue_names() -> list[str]:
    return list(_catalogue())


def catalogue_source(name: str) -> str:
    """Where the numbers of a catalogue model come from."""
    return str(_catalogue()[name]["source"])


def _catalogue() -> dict[str, dict[str, Any]]:
    return tomllib.loads(CATALOGUE.read_text(encoding="utf-8"))


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
