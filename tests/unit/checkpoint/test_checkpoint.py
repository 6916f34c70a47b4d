"""Checkpoints are complete or ignored, and can be read with any sharding."""

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from lakh import checkpoint, config, storage
from lakh.checkpoint import format as fmt
from lakh.checkpoint.loading import CheckpointReader
from lakh.checkpoint.retention import to_remove
from lakh.checkpoint.tensor_file import write_tensors
from lakh.errors import CorruptCheckpoint, DiskFull, PeerTimeout, UserError
from lakh.spec import Run


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model.a": torch.randn(6, 4),
        "model.b": torch.randn(3),
        "optim.a.step": torch.tensor(7.0),
        "optim.a.m": torch.randn(6, 4).bfloat16(),
    }


def save(run_dir: Path, step: int = 5) -> str:
    folder = str(run_dir / "checkpoints" / checkpoint.folder_name(step))
    run = Run(name="x")
    checkpoint.save(
        folder,
        tensors(),
        step=step,
        sequence_index=step * 32,
        run_sha256=config.fingerprint(run),
        data_sha256="d",
        attachments={"run.toml": config.to_toml(run).encode(), "tokenizer.json": b"{}"},
    )
    return folder


def test_a_checkpoint_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    folder = save(tmp_path)
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    manifest = checkpoint.load(folder, into)
    assert (manifest.step, manifest.sequence_index) == (5, 160)
    for name, tensor in tensors().items():
        assert torch.equal(into[name], tensor), name


def test_read_model_returns_the_weights_and_the_run(tmp_path: Path) -> None:
    run, weights = checkpoint.read_model(save(tmp_path))
    assert run == Run(name="x")
    assert set(weights) == {"a", "b"}
    assert torch.equal(weights["a"], tensors()["model.a"])


def damage_truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


def damage_flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, Path.unlink])
def test_damaged_checkpoints_are_detected_named_and_skipped(tmp_path: Path, damage) -> None:
    old, new = save(tmp_path, 5), save(tmp_path, 10)
    damage(Path(new) / "rank-00000.safetensors")
    with pytest.raises(CorruptCheckpoint, match=r"rank-00000.safetensors"):
        checkpoint.verify(new)
    usable, passed = checkpoint.newest_usable(tmp_path)
    assert usable == old
    assert [error.where for error in passed] == [f"{new}/rank-00000.safetensors"]


def test_a_folder_without_a_manifest_is_ignored(tmp_path: Path) -> None:
    folder = save(tmp_path)
    (Path(folder) / "manifest.json").unlink()
    assert checkpoint.list_complete(tmp_path) == []
    assert checkpoint.newest_usable(tmp_path) == (None, [])
    with pytest.raises(UserError, match="no complete checkpoint"):
        checkpoint.find(tmp_path)


def test_a_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    path = Path(folder) / "manifest.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"format": "lakh-checkpoint/9"} | {"manifest_sha256": ""}))
    with pytest.raises(CorruptCheckpoint):
        checkpoint.verify(folder)


def test_find_returns_the_newest_checkpoint_of_a_run(tmp_path: Path) -> None:
    save(tmp_path, 5)
    newest = save(tmp_path, 20)
    assert checkpoint.find(tmp_path) == newest
    assert checkpoint.find(newest) == newest


def test_other_shapes_are_refused_before_anything_is_overwritten(tmp_path: Path) -> None:
    folder = save(tmp_path)
    good, bad = torch.full((6, 4), 9.0), torch.zeros(7, 4)
    with pytest.raises(UserError, match=r"float32 \[6, 4\], the run has float32 \[7, 4\]"):
        checkpoint.load(folder, {"model.a": good, "optim.a.m": bad.bfloat16(), "model.b": bad} | {"model.a": bad})
    with pytest.raises(UserError, match="has no tensor"):
        checkpoint.load(folder, {"model.a": good, "model.c": good})
    assert bool((good == 9).all())


@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 5),
    written_by=st.integers(1, 5),
    read_by=st.integers(1, 5),
)
def test_any_number_of_ranks_reads_slices_of_any_other_number(
    rows: int, columns: int, written_by: int, read_by: int, tmp_path_factory
) -> None:
    whole = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    folder = str(tmp_path_factory.mktemp("c"))
    stored = []
    files = {}
    for rank, part in enumerate(cut(whole, written_by)):
        if len(part[1]):
            file = f"rank-{rank:05d}.safetensors"
            files[file] = write_tensors(storage.join(folder, file), {"t": part[1]})
            stored.append(fmt.StoredSlice(file, (part[0], 0), tuple(part[1].shape)))
    tensors = {"t": fmt.StoredTensor("float32", tuple(whole.shape), tuple(stored))}
    fmt.Manifest(1, 8, "r", "d", written_by, files, tensors).write(folder)
    reader, pieces = CheckpointReader(folder), []
    for offset, part in cut(whole, read_by):
        target = torch.full_like(part, -1)
        reader.fill("t", (offset, 0), target)
        pieces.append(target)
    assert torch.equal(torch.cat(pieces), whole)


def cut(whole: torch.Tensor, ranks: int) -> list[tuple[int, torch.Tensor]]:
    size = -(-len(whole) // ranks)
    return [(min(r * size, len(whole)), whole[r * size : (r + 1) * size]) for r in range(ranks)]


steps = st.lists(st.integers(0, 50), unique=True, max_size=8)


@given(good=steps, damaged=steps, unfinished=steps, keep=st.integers(1, 4))
def test_the_newest_good_checkpoints_are_never_removed(
    good: list[int], damaged: list[int], unfinished: list[int], keep: int
) -> None:
    damaged = [step for step in damaged if step not in good]
    unfinished = [step for step in unfinished if step not in good and step not in damaged]
    gone = to_remove(good, damaged, unfinished, keep=keep)
    assert not set(gone) & set(sorted(good)[-keep:])
    assert len(set(good) - set(gone)) == min(keep, len(good))
    assert all(step < max(good, default=-1) for step in gone)
    if len(good) < keep:
        assert set(gone) <= set(unfinished), "every complete checkpoint stays until there are enough good ones"


def test_prune_removes_old_folders(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        save(tmp_path, step)
    (Path(save(tmp_path, 12)) / "manifest.json").unlink()
    checkpoint.prune(tmp_path, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000015"]


@pytest.mark.parametrize("writes_before", [0, 1, 3])
def test_a_full_disk_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes_before: int) -> None:
    old = save(tmp_path, 5)
    left, real = [writes_before], os.fsync

    def full(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match="run the same command again"):
        save(tmp_path, 10)
    monkeypatch.undo()
    assert checkpoint.find(tmp_path) == old
    assert not list(tmp_path.rglob("*.part"))


def begin(run_dir: Path, written: dict[str, torch.Tensor], step: int = 5) -> checkpoint.CheckpointSave:
    saving = checkpoint.CheckpointSave(
        str(run_dir / "checkpoints" / checkpoint.folder_name(step)),
        written,
        step=step,
        sequence_index=step * 32,
        run_sha256="r",
        data_sha256="d",
        attachments={},
    )
    saving.start(checkpoint.HostCopies())
    return saving


def test_changes_after_the_copy_are_not_saved(tmp_path: Path) -> None:
    changing = tensors()
    saving = begin(tmp_path, changing)
    for tensor in changing.values():
        tensor.fill_(7)
    assert checkpoint.list_complete(tmp_path) == []  # whole only when it is finished
    saving.finish()
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    checkpoint.load(checkpoint.find(tmp_path), into)
    for name, tensor in tensors().items():
        assert torch.equal(into[name], tensor), name


def test_host_copies_reuse_their_memory(tmp_path: Path) -> None:
    copies = checkpoint.HostCopies()
    first = copies.take({"a": torch.ones(4), "b": torch.ones(2)})
    second = copies.take({"a": torch.zeros(4), "b": torch.zeros(3)})
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert torch.equal(second["a"], torch.zeros(4))
    assert torch.equal(second["b"], torch.zeros(3))


def test_a_full_disk_in_the_background_is_raised_by_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    saving = begin(tmp_path, tensors())
    with pytest.raises(DiskFull, match="run the same command again"):
        saving.finish()
    assert not list(tmp_path.rglob("*.part"))
    assert checkpoint.list_complete(tmp_path) == []


def test_a_hanging_disk_is_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr("lakh.checkpoint.saving.WRITE_TIMEOUT_S", 0.01)
    monkeypatch.setattr("lakh.checkpoint.saving.write_tensors", lambda url, tensors: hangs.wait(60))
    saving = begin(tmp_path, tensors())
    with pytest.raises(PeerTimeout, match="is still being written"):
        saving.finish()
    hangs.set()


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
types = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])


@pytest.mark.slow
@given(written=st.dictionaries(st.text(min_size=1, max_size=5), st.tuples(shapes, types), max_size=6))
def test_the_safetensors_package_reads_our_files(written, tmp_path_factory) -> None:
    wanted = {name: (torch.rand(shape) * 9).to(kind) for name, (shape, kind) in written.items()}
    path = tmp_path_factory.mktemp("t") / "x.safetensors"
    entry = write_tensors(str(path), wanted)
    assert (entry.bytes, entry.sha256) == (path.stat().st_size, (storage.sha256(path),))
    found = safetensors.torch.load_file(path)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_damaged_manifest_does_not_hide_the_other_checkpoints(tmp_path: Path, lakh, last_line) -> None:
    whole, damaged = save(tmp_path, 5), save(tmp_path, 10)
    (Path(damaged) / "manifest.json").write_text("[1]")
    code, out, _ = lakh("checkpoint", "list", str(tmp_path), "--json")
    assert code == 0
    listed = last_line(out)["checkpoints"]
    assert [(row["step"], row["folder"], row["ranks"]) for row in listed] == [(5, whole, 1), (10, damaged, None)]
    assert "damaged" in listed[1]["damaged"]
    assert not listed[0]["damaged"]


@pytest.mark.parametrize("command", ["list", "verify", "gc"])
def test_listing_checkpoints_does_not_import_torch(command: str, tmp_path: Path) -> None:
    save(tmp_path)
    program = "import sys; sys.modules['torch'] = None; from lakh.cli import main; main(sys.argv[1:])"
    words = [sys.executable, "-c", program, "checkpoint", command, str(tmp_path), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert command == "gc" or len(json.loads(done.stdout)["checkpoints"]) == 1


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'lod'"):
        checkpoint.lod  # noqa: B018
