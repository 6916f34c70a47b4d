from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lakh.corpus import read_documents
from lakh.errors import CorruptShard, DataError, DiskFull, UserError
from lakh.tokens.dataset.packing import is_heldout, pack, sort_key
from lakh.tokens.loading.stream import TokenSet
from lakh.tokens.tokenizer import Tokenizer


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def documents_of(tokens: TokenSet, tokenizer: Tokenizer) -> list[str]:
    """Every document of a split, cut at the end marks."""
    flat = np.concatenate([np.fromfile(Path(tokens.url) / shard["file"], "<u2") for shard in tokens.shards])
    ends = np.flatnonzero(flat == tokenizer.eot)
    return [tokenizer.decode(part[part != tokenizer.eot].tolist()) for part in np.split(flat, ends[:-1] + 1)]


def test_every_document_is_in_one_split_in_the_packed_order(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    pack(corpus, tokenizer, tmp_path, heldout_fraction=0.2, shard_tokens=500)
    rows = [row for batch in read_documents(str(corpus)) for row in batch.to_pylist()]
    rows.sort(key=lambda row: sort_key(row["id"]))
    for split in ("train", "heldout"):
        tokens = TokenSet.open(tmp_path, split)
        expected = [row["text"] for row in rows if is_heldout(row["sha256"], 0.2) == (split == "heldout")]
        assert documents_of(tokens, tokenizer) == expected
        assert tokens.num_documents == len(expected)
        assert tokens.verify() == 2 * len(tokens.shards)
    assert len(TokenSet.open(tmp_path, "train").shards) > 1


def test_text_that_contains_endoftext_does_not_end_a_document(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    pack(corpus, tokenizer, tmp_path, heldout_fraction=0)
    documents = documents_of(TokenSet.open(tmp_path, "train"), tokenizer)
    assert sum("<|endoftext|>" in document and "<|reserved_3|>" in document for document in documents) == 1


def test_packed_bytes_are_the_same_on_every_run_and_for_any_number_of_buckets(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pack(corpus, tokenizer, tmp_path / "a", heldout_fraction=0.1)
    monkeypatch.setattr("lakh.tokens.dataset.packing.BUCKET_BYTES", 1000)
    monkeypatch.setattr("lakh.tokens.dataset.packing.BATCH_TEXT_BYTES", 300)
    second = pack(corpus, tokenizer, tmp_path / "b", heldout_fraction=0.1)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert first.manifest["fingerprint"] == second.manifest["fingerprint"]
    other = pack(corpus, tokenizer, tmp_path / "c", heldout_fraction=0.2)
    assert other.manifest["fingerprint"] != first.manifest["fingerprint"]


def test_heldout_documents_stay_heldout_when_the_fraction_grows() -> None:
    hashes = [f"{i * 0x9E3779B97F4A7C15 % 2**64:016x}" for i in range(2000)]
    small, large = ({h for h in hashes if is_heldout(h, share)} for share in (0.02, 0.1))
    assert small < large
    assert 150 < len(large) < 250
    assert not is_heldout("0" * 64, 0)


def test_starts_point_at_the_first_token_of_each_document(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    pack(corpus, tokenizer, tmp_path, heldout_fraction=0.1, shard_tokens=700)
    for shard in TokenSet.open(tmp_path, "train").shards:
        flat = np.fromfile(tmp_path / shard["file"], "<u2")
        starts = np.fromfile(tmp_path / shard["starts"], "<u8")
        ends = np.flatnonzero(flat == tokenizer.eot)
        assert starts.tolist() == [0, *(ends[:-1] + 1).tolist()]
        assert flat[-1] == tokenizer.eot  # no document spans two shards


def test_a_complete_set_is_reused_until_the_settings_change(
    corpus: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    pack(corpus, tokenizer_folder, tmp_path, heldout_fraction=0.1)
    assert pack(corpus, tokenizer_folder, tmp_path, heldout_fraction=0.1).reused
    with pytest.raises(UserError, match=r"--heldout fraction.*--force"):
        pack(corpus, tokenizer_folder, tmp_path, heldout_fraction=0.2)
    assert not pack(corpus, tokenizer_folder, tmp_path, heldout_fraction=0.2, force=True).reused


def test_force_does_not_delete_a_corpus(corpus: Path, tokenizer: Tokenizer) -> None:
    before = files_of(corpus)
    with pytest.raises(UserError, match="something else"):
        pack(corpus, tokenizer, corpus, force=True)
    assert files_of(corpus) == before


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_an_invalid_heldout_fraction_is_rejected(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, fraction: float
) -> None:
    with pytest.raises(UserError, match=r"is not in \[0, 1\)"):
        pack(corpus, tokenizer, tmp_path, heldout_fraction=fraction)


def test_an_empty_split_is_an_error(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="heldout: no document"):
        pack(corpus, tokenizer, tmp_path, heldout_fraction=1e-9)
    assert not (tmp_path / "manifest.json").exists()


def test_errors_for_missing_inputs_name_the_command_that_makes_them(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="lakh corpus build"):
        pack(tmp_path / "nowhere", tokenizer, tmp_path / "out")
    with pytest.raises(UserError, match="lakh tokens train"):
        pack(corpus, tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(UserError, match="lakh tokens pack"):
        TokenSet.open(tmp_path / "nowhere", "train")
    with pytest.raises(UserError, match="is not a token set"):
        TokenSet.open(corpus, "train")


def test_a_damaged_corpus_is_not_packed(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    broken = tmp_path / "corpus"
    broken.mkdir()
    for name, raw in files_of(corpus).items():
        (broken / name).write_bytes(raw[:-1] if name.startswith("docs") else raw)
    with pytest.raises(CorruptShard, match="lakh corpus build"):
        pack(broken, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("calls_before", [0, 3, 100])
def test_a_full_disk_leaves_no_manifest_and_no_partial_files(
    corpus: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fill_disk_after: Callable[[int], None],
    calls_before: int,
) -> None:
    fill_disk_after(calls_before)
    with pytest.raises(DiskFull):
        pack(corpus, tokenizer, tmp_path / "out", heldout_fraction=0.1)
    assert set(files_of(tmp_path / "out")) == {"tokenizer.json"}
    monkeypatch.undo()
    assert pack(corpus, tokenizer, tmp_path / "out", heldout_fraction=0.1).manifest["splits"]["train"]["tokens"]


def test_a_disk_that_fills_up_at_the_end_leaves_no_manifest(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        if Path(target).name == "manifest.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(DiskFull):
        pack(corpus, tokenizer, tmp_path, heldout_fraction=0.1)
    with pytest.raises(UserError, match=r"not complete.*lakh tokens pack"):
        TokenSet.open(tmp_path, "train")


def test_damage_is_found_on_opening_or_by_verify(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    pack(corpus, tokenizer, tmp_path, heldout_fraction=0.1)
    for name in ("tokens-00000.bin", "starts-00000.bin"):
        file = tmp_path / "train" / name
        good = file.read_bytes()
        file.write_bytes(good[:-8])
        with pytest.raises(CorruptShard, match=rf"{name}.*manifest says.*--force"):
            TokenSet.open(tmp_path, "train")
        with pytest.raises(CorruptShard):  # and a damaged set is not reused
            pack(corpus, tokenizer, tmp_path, heldout_fraction=0.1)
        file.write_bytes(bytes([good[0] ^ 1]) + good[1:])
        with pytest.raises(CorruptShard, match=rf"{name}.*do not match its manifest"):
            TokenSet.open(tmp_path, "train")
        file.unlink()
        with pytest.raises(CorruptShard, match="is missing"):
            TokenSet.open(tmp_path, "train")
        file.write_bytes(good)
    assert TokenSet.open(tmp_path, "train").verify() == 2


def test_an_edited_manifest_is_rejected(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    pack(corpus, tokenizer, tmp_path, heldout_fraction=0.1)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["dtype"] = "uint32"
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="does not match its own hash"):
        TokenSet.open(tmp_path, "train")
    del manifest["manifest_sha256"]  # as earlier versions wrote it
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="fingerprint does not match"):
        TokenSet.open(tmp_path, "train")
