"""Token shards are verified once per machine; damage, wrong ids and changes while reading are clear errors."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lakh import storage
from lakh.errors import CorruptShard, DataError
from lakh.spec import Data
from lakh.tokens.dataset import shard_check
from lakh.tokens.dataset.packing import pack
from lakh.tokens.dataset.shards import fingerprint_of
from lakh.tokens.loading.stream import TokenSet, TokenStream
from lakh.tokens.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def packed(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> Path:
    pack(corpus, tokenizer, tmp_path / "tokens", heldout_fraction=0.1, shard_tokens=2000)
    return tmp_path / "tokens"


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were read and hashed."""
    names: list[str] = []
    real = shard_check.scan
    monkeypatch.setattr(shard_check, "scan", lambda file, blocks: (names.append(file.url), real(file, blocks))[1])
    return names


def test_a_shard_is_read_once_per_machine(packed: Path, scanned: list[str]) -> None:
    files = 2 * len(TokenSet.open(packed, "train").shards)
    assert len(scanned) == len(set(scanned)) == files
    TokenSet.open(packed, "train")
    assert len(scanned) == files
    shard = packed / "train" / "tokens-00000.bin"
    os.utime(shard, ns=(1, 1))
    TokenSet.open(packed, "train")
    assert scanned[files:] == [str(shard)], "a file whose times changed is read again"


def test_processes_that_start_together_read_a_shard_once(packed: Path, scanned: list[str]) -> None:
    """Threads with their own locks stand for processes: flock belongs to an open file."""
    start = threading.Barrier(4, timeout=30)

    def open_set(_: int) -> int:
        start.wait()
        return TokenSet.open(packed, "train").num_tokens

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(open_set, range(4)))) == 1
    assert len(scanned) == len(set(scanned))


def test_a_cache_that_cannot_be_written_only_costs_time(packed: Path, cache: Path, scanned: list[str]) -> None:
    cache.write_text("in the way")
    TokenSet.open(packed, "train")
    TokenSet.open(packed, "train")
    assert len(scanned) == 2 * len(set(scanned))


def test_a_torn_record_is_written_again(packed: Path, cache: Path, scanned: list[str]) -> None:
    TokenSet.open(packed, "train")
    count = len(scanned)
    for record in (path for path in cache.rglob("*") if path.is_file()):
        record.write_text('{"maxi')
    TokenSet.open(packed, "train")
    TokenSet.open(packed, "train")
    assert len(scanned) == 2 * count


def rewrite(folder: Path, name: str, change: Callable[[np.ndarray], None], dtype: str) -> None:
    """Change a file and its hash in the manifest, as another tool with a bug would have written it."""
    numbers = np.fromfile(folder / name, dtype)
    change(numbers)
    numbers.tofile(folder / name)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest[storage.MANIFEST_HASH]
    key = {"tokens": "sha256", "starts": "starts_sha256"}[Path(name).name[:6]]
    manifest["splits"]["train"]["shards"][0][key] = storage.sha256(folder / name)
    manifest["fingerprint"] = fingerprint_of(manifest["dtype"], manifest["splits"])
    storage.commit(folder, manifest, hashed=True)


def test_ids_beyond_the_vocabulary_are_an_error(packed: Path) -> None:
    rewrite(packed, "train/tokens-00000.bin", lambda ids: ids.__setitem__(7, 999), "<u2")
    with pytest.raises(CorruptShard, match=r"tokens-00000.bin: holds the id 999, and there are 320 ids"):
        TokenSet.open(packed, "train")


@pytest.mark.parametrize(
    ("at", "value", "found"),
    [
        (0, 1, "does not hold ascending"),
        (3, 0, "does not hold ascending"),
        (-1, 2**63, "holds a start 9,223,372,036,854,775,808"),
        (-1, 10**6, "holds a start 1,000,000"),
    ],
)
def test_damaged_starts_are_an_error(packed: Path, at: int, value: int, found: str) -> None:
    rewrite(packed, "train/starts-00000.bin", lambda starts: starts.__setitem__(at, value), "<u8")
    with pytest.raises(CorruptShard, match=rf"starts-00000.bin: {found}"):
        TokenSet.open(packed, "train")


@pytest.mark.parametrize("name", ["tokens-00000.bin", "starts-00000.bin"])
def test_flipped_bits_are_an_error(packed: Path, name: str) -> None:
    file = packed / "train" / name
    data = bytearray(file.read_bytes())
    data[9] ^= 4
    file.write_bytes(bytes(data))
    with pytest.raises(CorruptShard, match=rf"{name}: its bytes do not match its manifest"):
        TokenSet.open(packed, "train")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("vocab",), "320"),
        (("vocab",), -1),
        (("tokenizer",), None),
        (("splits", "train", "tokens"), 7),
        (("splits", "train", "shards", 0, "tokens"), "many"),
        (("splits", "train", "shards", 0, "documents"), -3),
        (("splits", "train", "shards", 0, "file"), "../../x"),
        (("splits", "train", "shards", 0, "block_sha256"), ["one"] * 7),
        (("splits", "train", "shards", 0, "block_bytes"), 3),
    ],
)
def test_fields_of_a_manifest_without_a_hash_are_checked(packed: Path, path: tuple[Any, ...], value: Any) -> None:
    manifest = json.loads((packed / "manifest.json").read_text())
    del manifest[storage.MANIFEST_HASH]
    inner = manifest
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    storage.commit(packed, manifest)
    with pytest.raises(DataError, match=r"manifest\.json: is damaged"):
        TokenSet.open(packed, "train")


def test_a_shard_that_changes_while_it_is_read_is_noticed(packed: Path) -> None:
    stream = TokenStream(Data(tokens=str(packed), sequence=32, batch=4, micro_batch=1, cache=""), 3)
    stream.read_range(0, 8)
    shards = sorted((packed / "train").glob("tokens-*.bin"))
    whole = {path: path.read_bytes() for path in shards}
    for path in shards:
        path.write_bytes(whole[path])
        os.utime(path, ns=(2, 2))
    with pytest.raises(CorruptShard, match="was overwritten while it is in use"):
        stream.read_range(8, 8)
    stream = TokenStream(Data(tokens=str(packed), sequence=32, batch=4, micro_batch=1, cache=""), 3)
    for path in shards:
        path.unlink()
    with pytest.raises(CorruptShard, match="was deleted while it is in use"):
        stream.read_range(8, 8)
