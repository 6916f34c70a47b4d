"""A damaged checkpoint is detected and named, whichever byte or field is damaged, and the previous one is used."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lakh import checkpoint
from lakh.checkpoint import chunk_hashes
from lakh.checkpoint.format_check import check_tiling
from lakh.errors import CorruptCheckpoint

Save = Callable[[int], Path]


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    file.write_bytes(bytes(data))


@pytest.mark.slow
def test_a_flipped_bit_in_any_stored_byte_is_detected(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000005"
    facts = {"step": 5, "sequence_index": 40, "run_sha256": "r", "data_sha256": "d"}
    checkpoint.save(str(folder), {"a": torch.ones(3, 2)}, attachments={"run.toml": b"seed = 1"}, **facts)
    rng = random.Random(1)
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        for byte in range(len(whole)):
            flip(file, 8 * byte + rng.randrange(8))
            with pytest.raises(CorruptCheckpoint, match=file.name):
                checkpoint.verify(str(folder))
            file.write_bytes(whole)
    checkpoint.verify(str(folder))


@pytest.mark.parametrize("file", ["manifest.json", "run.toml", "rank-00000.safetensors"])
def test_the_loader_falls_back_to_the_checkpoint_before(tmp_path: Path, save_small: Save, file: str) -> None:
    old, new = save_small(5), save_small(10)
    flip(new / file, 8 * 100 + 3)
    usable, skipped = checkpoint.newest_usable(tmp_path)
    assert usable == str(old)
    assert [error.where for error in skipped] == [str(new / file)]


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """An edit: the last word is the value, the others are the path to it."""
    *keys, last, value = path

    def change(data: dict[str, Any]) -> None:
        for key in keys:
            data = data[key]
        data[last] = value

    return change


RANK_FILE = "rank-00000.safetensors"
SLICE = ("tensors", "model.a", "slices", 0)
EDITS = {
    "step is 20": put("step", 20),
    "step is '10'": put("step", "10"),
    "sequence_index is -8": put("sequence_index", -8),
    "sequence_index is '80'": put("sequence_index", "80"),
    "sequence_index is True": put("sequence_index", True),
    "sequence_index is 80.0": put("sequence_index", 80.0),
    "world is 0": put("world", 0),
    "run_sha256 is 7": put("run_sha256", 7),
    "files is empty": put("files", {}),
    "files is \\[\\]": put("files", []),
    "tensors is 3": put("tensors", 3),
    "which is not in files": put(*SLICE, "file", "../../x"),
    "names '../../x'": put("files", "../../x", {"bytes": 1, "sha256": "0" * 64}),
    "names 'manifest.json'": put("files", "manifest.json", {"bytes": 1, "sha256": "0" * 64}),
    "bytes is -1": put("files", RANK_FILE, "bytes", -1),
    "outside its shape": put(*SLICE, "offset", [1, 0]),
    "offset\\[0\\] is -1": put(*SLICE, "offset", [-1, 0]),
    "offset\\[0\\] is None": put(*SLICE, "offset", [None, 0]),
    "slices of 4 of its 6 values": put(*SLICE, "shape", [2, 2]),
    "outside its shape \\[3, 2\\]": put(*SLICE, "shape", [6]),
    "dtype is 'int128'": put("tensors", "model.a", "dtype", "int128"),
    "slices is 'none'": put("tensors", "model.a", "slices", "none"),
    "unknown key 'surprise'": put("surprise", 1),
    f"shape\\[0\\] is {10**30}": put("tensors", "model.a", "shape", [10**30, 2]),
}


@pytest.mark.parametrize("old_format", [False, True], ids=["hashed", "format 1"])
@pytest.mark.parametrize("found", EDITS)
def test_every_field_of_a_manifest_is_checked(
    tmp_path: Path, save_small: Save, edit_manifest: Callable[..., None], found: str, old_format: bool
) -> None:
    old, new = save_small(5), save_small(10)
    edit_manifest(new, EDITS[found], old_format=old_format)
    with pytest.raises(CorruptCheckpoint, match=found) as raised:
        checkpoint.verify(str(new))
    assert raised.value.where == str(new / "manifest.json")
    usable, skipped = checkpoint.newest_usable(tmp_path)
    assert (usable, len(skipped)) == (str(old), 1)


@pytest.mark.parametrize("missing", ["step", "files", "tensors", "format", "manifest_sha256"])
def test_a_missing_field_is_named(save_small: Save, missing: str) -> None:
    manifest = save_small(5) / "manifest.json"
    data = json.loads(manifest.read_text())
    del data[missing]
    manifest.write_text(json.dumps(data))
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json"):
        checkpoint.verify(str(manifest.parent))


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"format": 1e999}'])
def test_a_manifest_that_is_not_one_is_damaged(save_small: Save, content: bytes) -> None:
    folder = save_small(5)
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(CorruptCheckpoint):
        checkpoint.verify(str(folder))


def test_checkpoints_of_format_1_load_and_verify_says_so(
    save_small: Save, edit_manifest: Callable[..., None], lakh, last_line
) -> None:
    folder = save_small(5)
    _, out, _ = lakh("checkpoint", "verify", str(folder), "--json")
    assert last_line(out)["checkpoints"][0]["found"] == "2 files match"
    edit_manifest(folder, lambda data: None, old_format=True)
    code, out, _ = lakh("checkpoint", "verify", str(folder), "--json")
    assert code == 0
    assert "the manifest has no hash" in last_line(out)["checkpoints"][0]["found"]
    checkpoint.read_model(folder)


def test_gc_never_removes_the_last_good_checkpoint(tmp_path: Path, save_small: Save, lakh, last_line) -> None:
    folders = {step: save_small(step) for step in (5, 10, 15, 20)}
    for step in (15, 20):
        flip(folders[step] / RANK_FILE, 900)
    code, out, _ = lakh("checkpoint", "gc", str(tmp_path), "--keep", "1", "--json")
    assert code == 0
    assert last_line(out) == {
        "removed": [str(folders[5])],
        "kept": [str(folders[10])],
        "damaged": [str(folders[15]), str(folders[20])],
    }
    flip(folders[10] / RANK_FILE, 900)
    assert checkpoint.prune(tmp_path, keep=1).removed == [], "without a good checkpoint nothing is removed"


def test_a_run_counts_only_checkpoints_that_it_wrote_or_verified(tmp_path: Path, save_small: Save) -> None:
    folders = {step: str(save_small(step)) for step in (5, 10, 15)}
    known = {folders[5], folders[10]}  # 15 was damaged when the run resumed from 5
    assert checkpoint.prune(tmp_path, keep=1, known_good=known).removed == [folders[5]]
    assert checkpoint.prune(tmp_path, keep=2, known_good=known).removed == []
    (Path(folders[10]) / RANK_FILE).write_bytes(b"short")
    assert checkpoint.prune(tmp_path, keep=1, known_good=known).kept == [], "a lost file is noticed without reading"


def test_each_rank_verifies_a_share_of_the_chunks(
    tmp_path: Path, save_small: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_hashes, "CHUNK_BYTES", 64)
    folder = str(save_small(5))
    shares: list[list[Any]] = []
    real = chunk_hashes.find_damage
    monkeypatch.setattr("lakh.checkpoint.catalog.find_damage", lambda f, c: (shares.append(list(c)), real(f, c))[1])
    for rank in range(3):
        checkpoint.verify(folder, rank=rank, world=3)
    sizes = [len(share) for share in shares]
    assert sum(sizes) > 6
    assert max(sizes) - min(sizes) <= 1
    read = {(name, at) for share in shares for name, start, size, _ in share for at in range(start, start + size)}
    assert read == {
        (file.name, at) for file in Path(folder).iterdir() if file.name != "manifest.json"
        for at in range(file.stat().st_size)
    }  # fmt: skip


def test_ranks_agree_on_the_checkpoint_that_one_of_them_found_damaged(tmp_path: Path, save_small: Save) -> None:
    """Two ranks as threads, which exchange through queues."""
    old, new = save_small(5), save_small(10)
    flip(new / RANK_FILE, 900)
    barrier, box = threading.Barrier(2, timeout=30), [None, None]

    def run(rank: int) -> tuple[str | None, int]:
        def exchange(value: Any) -> list[Any]:
            box[rank] = value
            barrier.wait()
            values = list(box)
            barrier.wait()
            return values

        def gather(value: Any) -> list[Any] | None:
            values = exchange(value)
            return values if rank == 0 else None

        def broadcast(value: Any) -> Any:
            return exchange(value)[0]

        usable, skipped = checkpoint.newest_usable(tmp_path, rank=rank, world=2, gather=gather, broadcast=broadcast)
        return usable, len(skipped)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, range(2))) == [(str(old), 1)] * 2


def test_slices_must_tile_their_tensor() -> None:
    check_tiling("t", (), [((), ())])
    check_tiling("t", (4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 1)), ((2, 1), (2, 1))])
    check_tiling("t", (0, 2), [])
    for boxes in (
        [((0, 0), (2, 2)), ((1, 0), (2, 2))],  # overlap and a gap
        [((0, 0), (2, 2))],
        [((0, 0), (4, 2)), ((0, 0), (0, 2)), ((4, 0), (1, 0)), ((5, 0), (0, 0))],
    ):
        with pytest.raises(ValueError, match="t has"):
            check_tiling("t", (4, 2), boxes)
