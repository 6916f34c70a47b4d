"""Hostile or broken input: counted, named and skipped; never a crash, never an escape."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakh.corpus import Settings, build, read_documents
from lakh.corpus.reports.lookup import find_document
from lakh.corpus.sources import archives
from lakh.errors import UserError

CODE = b"def add(a, b):\n    return a + b\n"


def paths(out: Path) -> set[str]:
    return {path for batch in read_documents(str(out), ["path"]) for path in batch.column("path").to_pylist()}


def reason_of(out: Path, place: str) -> str:
    return find_document(str(out), place).reason


def tar(path: Path, entries: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for info, content in entries:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def info(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


def test_unsafe_members_of_a_tar_are_dropped_by_name(tmp_path: Path) -> None:
    entries = [
        (info("pkg-1.0/ok.py"), CODE),
        (info("../../escape.py"), CODE + b"1\n"),
        (info("/etc/absolute.py"), CODE + b"2\n"),
        (info("pkg-1.0/link.py", tarfile.SYMTYPE, "/etc/passwd"), b""),
        (info("pkg-1.0/hard.py", tarfile.LNKTYPE, "pkg-1.0/ok.py"), b""),
        (info("pkg-1.0/device.py", tarfile.CHRTYPE), b""),
        (info("pkg-1.0/pipe.py", tarfile.FIFOTYPE), b""),
        (info("pkg-1.0/../../up.py"), CODE + b"3\n"),
    ]
    source = tar(tmp_path / "pkg-1.0.tar.gz", entries)
    before = set(os.listdir(tmp_path))
    report = build([f"own:{source}"], tmp_path / "out", workers=1)
    assert paths(tmp_path / "out") == {"ok.py"}
    assert report.dropped == {"symlink": 2, "unsafe-archive": 5}
    assert set(os.listdir(tmp_path)) == before | {"out"}  # nothing was unpacked anywhere
    assert reason_of(tmp_path / "out", "pkg-1.0/../../escape.py") == "unsafe-archive"


def test_unsafe_members_of_a_zip_are_dropped_by_name(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "pkg.zip", "w") as archive:
        archive.writestr("ok.py", CODE)
        archive.writestr("../escape.py", CODE)
        archive.writestr("C:\\windows.py", CODE)
        link = zipfile.ZipInfo("link.py")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    report = build([f"own:{tmp_path / 'pkg.zip'}"], tmp_path / "out", workers=1)
    assert paths(tmp_path / "out") == {"ok.py"}
    assert report.dropped == {"symlink": 1, "unsafe-archive": 2}


@pytest.mark.parametrize("form", ["tar", "zip"])
def test_archive_bomb_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(archives, "MIN_LIMIT_BYTES", 1 << 20)
    line = b"value = 0  # the same line again and again\n"
    if form == "tar":
        entries = [(info(f"f{number}.py"), line * 10_000) for number in range(60)]
        source = tar(tmp_path / "bomb.tar.gz", entries)
        limit = source.stat().st_size * archives.MAX_RATIO
        monkeypatch.setattr(archives, "MAX_RATIO", 20)
        assert limit > 0
    else:
        source = tmp_path / "bomb.zip"
        with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for number in range(60):
                archive.writestr(f"f{number}.py", line * 10_000)
        monkeypatch.setattr(archives, "MAX_RATIO", 20)
    read = []
    for member in archives.members(str(source), 1_000_000, lambda path, size: True):
        read.append(member)
    assert read[-1].reason == "unsafe-archive"
    assert "more than 20 times its size" in read[-1].detail
    assert len(read) < 60


@pytest.mark.parametrize("cut", [0.3, 0.7, 0.99])
def test_truncated_archive_gives_what_could_be_read_and_a_reason(tmp_path: Path, cut: float) -> None:
    entries = [(info(f"f{number}.py"), CODE + os.urandom(3000).hex().encode()) for number in range(30)]
    source = tar(tmp_path / "cut.tar.gz", entries)
    source.write_bytes(source.read_bytes()[: int(source.stat().st_size * cut)])
    read = list(archives.members(str(source), 1_000_000, lambda path, size: True))
    assert read[-1].reason == "unreadable"
    assert 0 < len(read) <= 31


@pytest.mark.parametrize("ending", sorted(archives.ENDINGS))
def test_noise_with_the_name_of_an_archive_is_unreadable(tmp_path: Path, ending: str) -> None:
    source = tmp_path / f"noise{ending}"
    source.write_bytes(os.urandom(2000))
    read = list(archives.members(str(source), 1000, lambda path, size: True))
    assert [member.reason for member in read] == ["unreadable"]


def test_duplicate_paths_give_one_document(tmp_path: Path) -> None:
    entries = [(info("a.py"), CODE), (info("a.py"), CODE + b"# newer, another text altogether\nx = 1\n")]
    source = tar(tmp_path / "twice.tar.gz", entries)
    report = build([f"own:{source}"], tmp_path / "out", workers=1)
    assert (report.kept, report.dropped) == (1, {"duplicate-path": 1})


def test_damaged_records_are_counted_one_by_one(tmp_path: Path) -> None:
    good = {"content": CODE.decode(), "repo_name": "jane/parser", "path": "a.py", "license": "MIT"}
    lines = [
        json.dumps(good).encode(),
        b"{ not json",
        b"[1, 2]",
        json.dumps({"content": 7, "path": "b.py"}).encode(),
        b'{"content": "x = 1\\n", "path": "deep.py", "more": ' + b"[" * 100_000 + b"}",
        b"\xff\xfe\x00",
        b"",
    ]
    (tmp_path / "records.jsonl").write_bytes(b"\n".join(lines))
    report = build([f"own:{tmp_path / 'records.jsonl'}"], tmp_path / "out", workers=1)
    assert (report.kept, report.dropped) == (1, {"bad-record": 5})
    assert report.licences == {"MIT": 1}
    assert find_document(str(tmp_path / "out"), "jane/parser/a.py").document is not None


def test_corrupt_parquet_row_group_leaves_the_others(tmp_path: Path) -> None:
    source = tmp_path / "records.parquet"
    rows = pa.table(
        {"content": [f"value = {number}\n" * 50 for number in range(40)], "path": [f"f{n}.py" for n in range(40)]}
    )
    pq.write_table(rows, source, row_group_size=10, compression="none", use_dictionary=False, write_page_checksum=True)
    raw = bytearray(source.read_bytes())
    at = raw.find(b"value = 15\n" * 20)
    assert at > 0
    raw[at + 50] ^= 0x40
    source.write_bytes(raw)
    report = build([f"own:{source}"], tmp_path / "out", workers=1)
    assert report.dropped["bad-record"] == 1
    assert report.read == report.kept + sum(report.dropped.values())
    assert report.kept >= 20


def test_file_that_is_not_parquet_is_reported(tmp_path: Path) -> None:
    (tmp_path / "noise.parquet").write_bytes(b"PAR1 no such thing PAR1")
    report = build([f"own:{tmp_path / 'noise.parquet'}"], tmp_path / "out", workers=1)
    assert (report.kept, report.dropped) == (0, {"bad-record": 1})


def test_texts_that_are_hard_to_parse_do_not_stop_a_build(tree: Callable[..., Path], tmp_path: Path) -> None:
    root = tree(
        "proj",
        {
            "ok.py": CODE,
            "one_line.js": b"var a = '" + b"x" * 3_000_000 + b"';",
            "nested.js": b"(" * 40_000 + b")" * 40_000 + b"\n",
            "nested_lines.py": b"x = " + b"[\n" * 20_000 + b"]\n" * 20_000,
            "nested.c": b"int f() { return " + b"(\n" * 30_000 + b"1" + b")\n" * 30_000 + b"; }\n",
            "quotes.py": b"'''\n" * 20_001,
            "invalid.py": b"x = '\xff\xfe'\n",
            "nul.c": b"int x;\0\n",
            "surrogates.py": "x = '\ud800'\n".encode("utf-8", "surrogatepass"),
            "braces.rs": b"{\n" * 50_000,
        },
    )
    report = build([f"own:{root}"], tmp_path / "out", workers=1)
    assert "ok.py" in paths(tmp_path / "out")
    assert report.read == report.kept + sum(report.dropped.values()) == 10
    assert reason_of(tmp_path / "out", "proj/one_line.js") == "too-large"
    assert (
        reason_of(tmp_path / "out", "proj/invalid.py")
        == reason_of(tmp_path / "out", "proj/surrogates.py")
        == "bad-encoding"
    )


@pytest.mark.slow
def test_many_tiny_files_become_several_splits(tree: Callable[..., Path], tmp_path: Path) -> None:
    root = tree("proj", {f"d{number % 40}/f{number}.py": f"value = {number}\n" for number in range(3000)})
    report = build([f"own:{root}"], tmp_path / "out", Settings(split_bytes=10_000), workers=1)
    assert report.kept == 3000
    assert len(report.shards) > 3


def test_very_long_line_in_records_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakh.corpus.sources.records.MAX_LINE_BYTES", 1000)
    good = json.dumps({"content": CODE.decode(), "path": "a.py"}).encode()
    long = json.dumps({"content": "x" * 5000, "path": "b.py"}).encode()
    (tmp_path / "r.jsonl.gz").write_bytes(gzip.compress(b"\n".join([long, good, long])))
    report = build([f"own:{tmp_path / 'r.jsonl.gz'}"], tmp_path / "out", workers=1)
    assert (report.kept, report.dropped) == (1, {"too-large": 2})


def test_synthetic_records_must_state_their_origin(tmp_path: Path) -> None:
    records = [
        {"text": CODE.decode(), "path": "a.py", "model": "some-model", "prompt": "write add"},
        {"text": CODE.decode() + "# other\ny = 2\n", "path": "b.py"},
    ]
    (tmp_path / "made.jsonl").write_text("\n".join(map(json.dumps, records)))
    report = build([f"synthetic:{tmp_path / 'made.jsonl'}"], tmp_path / "out", workers=1)
    assert (report.kept, report.dropped) == (1, {"bad-record": 1})
    kept = find_document(str(tmp_path / "out"), "made/a.py").document
    assert kept is not None
    assert json.loads(kept.provenance) == {"model": "some-model", "prompt": "write add"}
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="is a folder"):
        build([f"synthetic:{tmp_path / 'folder'}"], tmp_path / "out2")
