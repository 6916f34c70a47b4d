"""A small checkpoint, and manifests that were edited."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lakh import checkpoint, config, storage
from lakh.spec import Run


def small_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"model.a": torch.randn(3, 2), "model.b": torch.randn(3), "optim.a.step": torch.tensor(7.0)}


@pytest.fixture
def save_small(tmp_path: Path) -> Callable[[int], Path]:
    """Save the small state as a step of the run in tmp_path."""

    def save(step: int) -> Path:
        run = Run(name="x")
        folder = tmp_path / "checkpoints" / checkpoint.folder_name(step)
        checkpoint.save(
            str(folder),
            small_state(),
            step=step,
            sequence_index=step * 8,
            run_sha256=config.fingerprint(run),
            data_sha256="d",
            attachments={"run.toml": config.to_toml(run).encode()},
        )
        return folder

    return save


@pytest.fixture
def edit_manifest() -> Callable[..., None]:
    """Change a manifest and hash it again, as a careful editor would; or write it in format 1, without a hash."""

    def edit(folder: Path, change: Callable[[dict[str, Any]], None], *, old_format: bool = False) -> None:
        data = json.loads((folder / "manifest.json").read_text())
        del data[storage.MANIFEST_HASH]
        if old_format:
            data["format"] = "lakh-checkpoint/1"
            for name, entry in data["files"].items():
                data["files"][name] = {"bytes": entry["bytes"], "sha256": entry["sha256"][0]}
        change(data)
        storage.commit(folder, data, hashed=not old_format)

    return edit
