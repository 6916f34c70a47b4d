"""Token shards that are stored in the repository: building some needs packages that a GPU machine may lack."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tokens_dir() -> Path:
    return Path(__file__).resolve().parents[1] / "golden/tokens-1"
