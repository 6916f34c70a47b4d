"""Token shards on an object store: the same stream as from disk, by range reads, with a local cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lakh.errors import CorruptShard, PeerLost
from lakh.spec import Data
from lakh.tokens.dataset import shards
from lakh.tokens.dataset.packing import pack
from lakh.tokens.loading.stream import TokenSet, TokenStream
from lakh.tokens.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def local(corpus: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    pack(corpus, tokenizer, folder, heldout_fraction=0.1, shard_tokens=2000)
    return folder


def data_of(tokens: str, cache: Path | str) -> Data:
    return Data(tokens=tokens, sequence=32, batch=4, micro_batch=1, cache=str(cache))


@pytest.mark.slow
def test_s3_gives_the_same_stream_as_the_disk(
    s3, corpus: Path, tokenizer: Tokenizer, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "BLOCK_BYTES", 1024)  # several pieces in each shard, and rows across their edges
    made = pack(corpus, tokenizer, "s3://bucket/tokens", heldout_fraction=0.1, shard_tokens=2000)
    assert made.manifest["fingerprint"] == TokenSet.open(local, "train").fingerprint
    assert pack(corpus, tokenizer, "s3://bucket/tokens", heldout_fraction=0.1, shard_tokens=2000).reused
    want = TokenStream(data_of(str(local), ""), 3)
    count = sum(loader.num_sequences for loader in want._loaders)
    first = TokenStream(data_of("s3://bucket/tokens", tmp_path), 3)
    assert np.array_equal(first.read_range(0, count).tokens, want.read_range(0, count).tokens)
    assert sum(array.fetched_bytes for array in first.sources[0].tokens) > 0
    # Another process finds the pieces on the disk and asks the store for nothing but the manifest.
    again = TokenStream(data_of("s3://bucket/tokens", tmp_path), 3)
    assert np.array_equal(again.read_range(0, count).tokens, want.read_range(0, count).tokens)
    assert sum(array.fetched_bytes for array in again.sources[0].tokens) == 0
    assert TokenSet.open("s3://bucket/tokens", "train").verify() == 2 * len(first.sources[0].shards)


def test_a_missing_or_short_object_is_an_error(s3, local: Path, tmp_path: Path) -> None:
    s3.put(str(local), "bucket/damaged", recursive=True)
    s3.pipe_file("bucket/damaged/train/tokens-00001.bin", b"short")
    s3.rm("bucket/damaged/train/tokens-00002.bin")
    stream = TokenStream(data_of("s3://bucket/damaged", tmp_path), 3)
    for shard, words in ((1, "its manifest says"), (2, "is missing")):
        with pytest.raises(CorruptShard, match=words):
            stream.sources[0].tokens[shard][0:5]


def test_a_flipped_bit_in_the_store_is_an_error_and_in_the_cache_is_fetched_again(local: Path, tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(local), "/flipped", recursive=True)
    whole = np.fromfile(local / "train" / "tokens-00000.bin", "<u2")
    TokenSet.open("memory://flipped", "train", cache=str(tmp_path)).tokens[0][:]
    (cached,) = (path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size == whole.nbytes)
    cached.write_bytes(b"\xff" + cached.read_bytes()[1:])
    again = TokenSet.open("memory://flipped", "train", cache=str(tmp_path)).tokens[0]
    assert np.array_equal(again[:], whole)
    assert again.fetched_bytes == whole.nbytes
    for name in ("train/tokens-00000.bin", "train/starts-00000.bin"):
        content = bytearray(memory.cat_file(f"/flipped/{name}"))
        content[3] ^= 1
        memory.pipe_file(f"/flipped/{name}", bytes(content))
        with pytest.raises(CorruptShard, match=f"{name}: bytes 0 to .* do not match its manifest"):
            TokenSet.open("memory://flipped", "train").tokens[0][0:3]


def test_a_failing_store_is_retried_and_then_raises(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    from lakh import storage

    fsspec.filesystem("memory").put(str(local), "/flaky", recursive=True)
    array = TokenSet.open("memory://flaky", "train").tokens[0]
    real, failures = storage.open_read, [2]

    def failing(url: str):
        if failures[0] > 0:
            failures[0] -= 1
            raise ConnectionResetError("cut")
        return real(url)

    monkeypatch.setattr("lakh.storage.RETRY_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr("lakh.tokens.dataset.remote.storage.open_read", failing)
    whole = np.fromfile(local / "train" / "tokens-00000.bin", "<u2")
    assert np.array_equal(array[:], whole)
    failures[0] = 10**6
    with pytest.raises(PeerLost, match="try again later"):
        TokenSet.open("memory://flaky", "train").tokens[0][0:3]


def test_reading_continues_without_a_writable_cache(local: Path, tmp_path: Path) -> None:
    import fsspec

    fsspec.filesystem("memory").put(str(local), "/plain", recursive=True)
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    tokens = TokenSet.open("memory://plain", "train", cache=str(blocked))
    assert np.array_equal(tokens.tokens[0][:], np.fromfile(local / "train" / "tokens-00000.bin", "<u2"))
