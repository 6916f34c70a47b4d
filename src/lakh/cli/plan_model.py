"""The model of `--model` in `lakh plan`: of the catalogue, a .toml file, a Hugging Face directory or a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

from lakh.errors import CorruptCheckpoint
from lakh.planner.catalogue import load_model
from lakh.spec.model import Model

__all__ = ["planned_model"]


def planned_model(name: str) -> Model:
    """Only a directory or a GGUF file needs torch, and only its description is read."""
    path = Path(name)
    config = path / "config.json"
    if config.is_file():
        from lakh.workloads.code.formats.hf.config import spec_of

        try:
            fields = json.loads(config.read_bytes())
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise CorruptCheckpoint(str(config), "is not a JSON object", "download the file again")
        return spec_of(str(config), fields)
    if path.suffix == ".gguf":
        from lakh.workloads.code.formats import gguf

        return gguf.load(path).spec
    return load_model(name)
