from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from lakh.corpus import REASONS, FileFilterSettings, Settings, build, read_documents, read_report
from lakh.corpus.reports.lookup import find_document
from lakh.errors import CorruptShard, DataError, DiskFull, UserError

FILES: dict[str, str | bytes] = {
    "a.py": "def a():\n    return 1\n",
    "copy_of_a.py": "def a():\r\n    return 1   \r\n\r\n",
    "b.rs": 'fn main() { println!("b"); }\n',
    "empty.py": "",
    "nul.py": b"x\0y",
    "latin.py": "# caf\u00e9\n".encode("latin-1"),
    "README.md": "hello",
    "big.py": "x = 1\n" * 1000,
}
SMALL = Settings(filters=FileFilterSettings(max_file_bytes=5000))


def texts(out: Path) -> dict[str, str]:
    rows = [row for batch in read_documents(str(out)) for row in batch.to_pylist()]
    return {f"{row['repo']}/{row['path']}": row["text"] for row in rows}


def test_every_file_is_kept_or_dropped_with_a_reason(tree: Callable[..., Path], tmp_path: Path) -> None:
    root = tree("proj", FILES)
    (root / "dangling.py").symlink_to(root / "nowhere")
    report = build([f"own:{root}"], tmp_path / "out", SMALL)
    assert texts(tmp_path / "out") == {"proj/a.py": FILES["a.py"], "proj/b.rs": FILES["b.rs"]}
    assert report.dropped == {
        "bad-encoding": 1,
        "binary": 1,
        "empty": 1,
        "exact-duplicate": 1,
        "not-code": 1,
        "too-large": 1,
        "unreadable": 1,
    }
    assert report.read == report.kept + sum(report.dropped.values()) == 9
    assert report.languages == {"python": 1, "rust": 1}
    assert report.licences == {"LicenseRef-own": 2}
    named = {
        row["path"]: row["reason"] for row in pq.read_table(tmp_path / "out" / "dropped-00000.parquet").to_pylist()
    }
    assert named["dangling.py"] == "unreadable"
    assert set(named.values()) <= set(REASONS)


def test_file_that_fails_while_it_is_read_is_dropped_by_name(
    tree: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree("proj", {"a.py": "x = 1\n", "b.py": "y = 2\n"})
    real = Path.open

    def failing(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == "b.py":
            raise OSError(errno.EIO, "Input/output error")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", failing)
    report = build([f"own:{root}"], tmp_path / "out")
    assert (report.kept, report.dropped) == (1, {"unreadable": 1})
    dropped = find_document(str(tmp_path / "out"), "proj/b.py")
    assert dropped.document is None
    assert (dropped.reason, dropped.detail) == ("unreadable", "Input/output error")


@pytest.mark.slow
def test_result_does_not_depend_on_the_order_of_sources_or_the_size_of_shards(
    tree: Callable[..., Path], tmp_path: Path
) -> None:
    one = tree("one", {f"f{i}.py": f"value = {i % 7}\n" for i in range(20)})
    two = tree("two", {f"g{i}.py": f"value = {i % 9}\n" for i in range(20)})
    small = Settings(split_bytes=1)
    left = build([f"own:{one}", f"own:{two}"], tmp_path / "left")
    right = build([f"own:{two}", f"own:{one}"], tmp_path / "right", small)
    assert left.output_sha256 == right.output_sha256
    assert texts(tmp_path / "left") == texts(tmp_path / "right")
    assert left.kept == 9
    (one / "f0.py").write_text("value = 99\n")
    assert build([f"own:{one}", f"own:{two}"], tmp_path / "third").output_sha256 != left.output_sha256


@pytest.mark.slow
def test_every_split_gives_a_shard_that_the_manifest_lists(tree: Callable[..., Path], tmp_path: Path) -> None:
    root = tree("proj", {f"f{i}.py": f"value = {i}\n" for i in range(9)})
    report = build([f"own:{root}"], tmp_path / "out", Settings(split_bytes=20), workers=1)
    assert [shard["file"] for shard in report.shards] == [f"docs-{i:05d}.parquet" for i in range(5)]
    assert sum(shard["rows"] for shard in report.shards) == 9
    assert report.verify() == 5
    assert len(texts(tmp_path / "out")) == 9


def test_no_repository_exceeds_its_share(tree: Callable[..., Path], tmp_path: Path) -> None:
    root = tree("proj", {f"f{i}.py": f"value = {i}\n" for i in range(10)})
    report = build([f"own:{root}"], tmp_path / "out", Settings(per_repo_bytes=35))
    assert report.bytes_out <= 35
    assert (report.kept, report.dropped) == (3, {"over-repo-share": 7})


def test_finished_corpus_is_reused_until_something_changed(tree: Callable[..., Path], tmp_path: Path) -> None:
    root, out = tree("proj", FILES), tmp_path / "out"
    first = build([f"own:{root}"], out)
    again = build([f"own:{root}"], out)
    assert (first.reused, again.reused) == (False, True)
    assert again.manifest() == first.manifest()
    with pytest.raises(UserError, match=r"other settings.*--force"):
        build([f"own:{root}"], out, SMALL)
    (root / "new.py").write_text("z = 3\n")
    with pytest.raises(UserError, match=r"other files.*--force"):
        build([f"own:{root}"], out)
    assert build([f"own:{root}"], out, force=True).kept == first.kept + 1


def test_force_replaces_a_corpus_and_nothing_else(tree: Callable[..., Path], tmp_path: Path) -> None:
    root, out = tree("proj", FILES), tmp_path / "out"
    out.mkdir()
    (out / "manifest.json").write_text('{"format": "lakh-tokens/1"}')
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="something else"):
        build([f"own:{root}"], out, force=True)
    (out / "manifest.json").write_text("{ damaged")
    with pytest.raises(DataError):
        build([f"own:{root}"], out)
    (out / "dropped.parquet").write_text("left by an older version")
    (out / "docs-00007.parquet").write_text("left by a build that was killed")
    build([f"own:{root}"], out, force=True)
    assert sorted(os.listdir(out)) == [
        "README.md",
        "docs-00000.parquet",
        "dropped-00000.parquet",
        "manifest.json",
        "notes.txt",
    ]


@pytest.mark.parametrize("calls_before", [0, 5, 20])
def test_full_disk_raises_a_clear_error_and_leaves_no_complete_corpus(
    tree: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fill_disk_after: Callable[[int], None],
    calls_before: int,
) -> None:
    root, out = tree("proj", FILES), tmp_path / "out"
    fill_disk_after(calls_before)
    with pytest.raises(DiskFull):
        build([f"own:{root}"], out)
    assert not [name for name in os.listdir(out) if name.endswith(".part") or name == "manifest.json"]
    monkeypatch.undo()
    assert build([f"own:{root}"], out).verify()


def test_failed_commit_leaves_no_manifest(
    tree: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, out = tree("proj", FILES), tmp_path / "out"
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        if Path(target).name == "manifest.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(DiskFull):
        build([f"own:{root}"], out)
    with pytest.raises(UserError, match=r"not complete.*lakh corpus build"):
        read_report(str(out))


@pytest.mark.slow
def test_interrupted_build_is_not_complete_and_the_next_one_works(tree: Callable[..., Path], tmp_path: Path) -> None:
    root, out = tree("proj", FILES), tmp_path / "out"

    def interrupt(what: str, done: int, total: int) -> None:
        if what == "writing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build([f"own:{root}"], out, progress=interrupt)
    assert not (out / "manifest.json").exists()
    assert build([f"own:{root}"], out).kept == 3


def test_error_for_a_missing_corpus_names_the_build_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lakh corpus build"):
        list(read_documents(str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match="lakh corpus build"):
        read_report(str(tmp_path))


@pytest.fixture
def corpus(tree: Callable[..., Path], tmp_path: Path) -> Path:
    root = tree("proj", {f"f{i}.py": f"value_{i} = {i}\n" * 20 for i in range(50)})
    build([f"own:{root}"], tmp_path / "corpus")
    return tmp_path / "corpus"


def test_truncated_shard_is_found_on_opening(corpus: Path) -> None:
    shard = corpus / "docs-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CorruptShard, match=r"bytes, its manifest says.*--force"):
        next(iter(read_documents(str(corpus))))
    with pytest.raises(CorruptShard):
        read_report(str(corpus)).verify()


def test_missing_shard_is_found_on_opening(corpus: Path) -> None:
    (corpus / "docs-00000.parquet").unlink()
    with pytest.raises(CorruptShard, match="is missing"):
        next(iter(read_documents(str(corpus))))


def test_flipped_byte_is_detected_or_harmless(corpus: Path) -> None:
    shard = corpus / "docs-00000.parquet"
    good, documents = shard.read_bytes(), texts(corpus)
    found = 0
    for place in range(4, len(good), 31):
        raw = bytearray(good)
        raw[place] ^= 0x40
        shard.write_bytes(raw)
        with pytest.raises(CorruptShard):
            read_report(str(corpus)).verify()
        try:
            assert texts(corpus) == documents  # a flip in an unused statistic
        except CorruptShard:
            found += 1
    assert found > 10


def test_incomplete_manifest_is_reported_as_damaged(corpus: Path) -> None:
    manifest = json.loads((corpus / "manifest.json").read_text())
    del manifest["output_sha256"]
    (corpus / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="lacks output_sha256"):
        read_report(str(corpus))


def test_document_is_found_by_id_prefix_and_place(corpus: Path) -> None:
    by_place = find_document(str(corpus), "proj/f7.py")
    assert by_place.document is not None
    assert by_place.document.text.startswith("value_7")
    assert find_document(str(corpus), by_place.id) == find_document(str(corpus), by_place.id[:10]) == by_place
    with pytest.raises(UserError, match=r"did you mean proj/f7\.py"):
        find_document(str(corpus), "proj/ff7.py")


def test_ambiguous_id_prefix_lists_the_matches(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakh.corpus.reports.lookup.MIN_PREFIX", 1)
    with pytest.raises(UserError, match="give more of the id"):
        find_document(str(corpus), find_document(str(corpus), "proj/f1.py").id[:1])


def test_two_sources_that_share_a_repository_name_are_refused(tree: Callable[..., Path], tmp_path: Path) -> None:
    root = tree("cpython", {"abc.py": "x = 1\n"})
    with pytest.raises(UserError, match="NEWNAME=PATH"):
        build([f"own:{root}", "installed:stdlib"], tmp_path / "out")
