"""Sources beyond plain folders: archives, records, questions and answers, documentation, git, packages."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import io
import json
import shutil
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakh.corpus import Settings, build, read_documents
from lakh.corpus.filters.licence import LicenceSettings
from lakh.corpus.reports.lookup import find_document
from lakh.corpus.sources import archives, batches, fetch_all, open_sources, packages, records
from lakh.corpus.sources.markup import to_markdown
from lakh.corpus.sources.readers import open_listed
from lakh.errors import DataError, PeerLost, UserError

CODE = "def add(a, b):\n    return a + b\n"
MIT = """MIT License

Copyright (c) 2020 Jane

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without
limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the
Software, and to permit persons to whom the Software is furnished to do so, subject to the following
conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions
of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED
TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL
THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF
CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER
DEALINGS IN THE SOFTWARE.
"""


def rows(out: Path) -> dict[str, dict[str, str]]:
    found = [row for batch in read_documents(str(out)) for row in batch.to_pylist()]
    return {f"{row['repo']}/{row['path']}": row for row in found}


@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".zip"])
def test_archive_is_a_repository_with_its_own_licence(tree: Callable[..., Path], tmp_path: Path, ending: str) -> None:
    root = tree("pkg-1.0", {"LICENSE": MIT, "src/a.py": CODE})
    target = tmp_path / f"pkg-1.0{ending}"
    if ending == ".zip":
        with zipfile.ZipFile(target, "w") as archive:
            for path in [*sorted(root.rglob("*.*")), root / "LICENSE"]:
                archive.write(path, path.relative_to(tmp_path))
    else:
        plain = tmp_path / "plain.tar"
        with tarfile.open(plain, "w") as tar:
            tar.add(root, "pkg-1.0")
        if ending == ".tar.zst":
            with pa.CompressedOutputStream(str(target), "zstd") as file:
                file.write(plain.read_bytes())
        else:
            kind = ending.removeprefix(".tar").removeprefix(".")
            with tarfile.open(target, f"w:{kind}") as tar:
                tar.add(root, "pkg-1.0")
    build([str(target)], tmp_path / "out", workers=1)
    row = rows(tmp_path / "out")["pkg-1.0/src/a.py"]
    assert (row["licence"], row["text"]) == ("MIT", CODE)
    assert "LICENSE" in row["licence_evidence"]


def test_licence_of_a_wheel_comes_from_its_metadata(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "pkg-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("pkg/a.py", CODE)
        archive.writestr(
            "pkg-1.0.dist-info/METADATA", "Metadata-Version: 2.4\nName: pkg\nLicense-Expression: Apache-2.0\n"
        )
    build([f"pkg={tmp_path / 'pkg-1.0-py3-none-any.whl'}"], tmp_path / "out", workers=1)
    assert {row["licence"] for row in rows(tmp_path / "out").values()} == {"Apache-2.0"}


def test_records_of_several_formats_are_read(tmp_path: Path) -> None:
    stack = {
        "content": CODE,
        "max_stars_repo_name": "a/b",
        "max_stars_repo_path": "x.py",
        "max_stars_repo_licenses": ["MIT"],
    }
    github = {"repo": {"name": "c/d"}, "file": {"path": "y.py", "size": 9, "content": CODE + "# y\ny = 1\n"}}
    flat = {"repo_name": "e/f", "file_path": "z.py", "content": CODE + "z = 2\n", "license": "MIT", "content_hash": "0"}
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, [stack, github, flat])))
    build([f"own:{tmp_path / 'r.jsonl'}"], tmp_path / "out", workers=1)
    assert set(rows(tmp_path / "out")) == {"a/b/x.py", "c/d/y.py", "e/f/z.py"}


@pytest.mark.slow
def test_parquet_file_is_split_by_row_group(tmp_path: Path) -> None:
    texts = [f"value_{number} = {number}\n" for number in range(30)]
    table = pa.table({"content": texts, "path": [f"f{number}.py" for number in range(30)]})
    pq.write_table(table, tmp_path / "r.parquet", row_group_size=10)
    report = build([f"own:{tmp_path / 'r.parquet'}"], tmp_path / "out", Settings(split_bytes=1), workers=1)
    assert (report.kept, len(report.shards)) == (30, 3)


POSTS = """<?xml version="1.0" encoding="utf-8"?>
<posts>
  <row Id="1" PostTypeId="1" Score="5" Title="How to add?"
       Body="&lt;p&gt;How do I add &lt;code&gt;a&lt;/code&gt;?&lt;/p&gt;"
       ContentLicense="CC BY-SA 4.0" />
  <row Id="2" PostTypeId="1" Score="1" Title="Nobody knows"
       Body="&lt;p&gt;Why?&lt;/p&gt;" ContentLicense="CC BY-SA 4.0" />
  <row Id="3" PostTypeId="2" ParentId="1" Score="1" Body="&lt;p&gt;Slowly.&lt;/p&gt;" />
  <row Id="4" PostTypeId="2" ParentId="1" Score="9"
       Body="&lt;pre&gt;&lt;code&gt;a + b&#xA;  c&lt;/code&gt;&lt;/pre&gt;" />
  <row Id="5" PostTypeId="2" Score="9" Body="lost" />
  <row Id="6" PostTypeId="5" Body="a tag wiki" />
</posts>
"""


def test_question_has_its_answers_best_first(tmp_path: Path) -> None:
    (tmp_path / "Posts.xml").write_text(POSTS)
    settings = Settings(licences=LicenceSettings(also=("CC-BY-SA-4.0",)))
    report = build([f"exchange={tmp_path / 'Posts.xml'}"], tmp_path / "out", settings, workers=1)
    row = rows(tmp_path / "out")["exchange/questions/1.md"]
    assert row["text"].index("a + b\n  c") < row["text"].index("Slowly")
    assert row["text"].startswith("# How to add?\n\nHow do I add `a`?")
    assert (row["licence"], row["language"]) == ("CC-BY-SA-4.0", "markdown")
    assert (report.kept, report.dropped) == (1, {"bad-record": 2})
    assert build([f"exchange={tmp_path / 'Posts.xml'}"], tmp_path / "strict", workers=1).dropped["licence"] == 1


def test_documentation_is_a_separate_source(tree: Callable[..., Path], tmp_path: Path) -> None:
    page = "<head><title>t</title></head><body><nav>menu</nav><h1>Adding</h1><p>Use <code>add</code> often.</p></body>"
    root = tree(
        "manual",
        {"a.md": "# Adding\n\nUse it.\n", "b.rst": "Adding\n======\n\nUse it well.\n", "c.html": page, "d.py": CODE},
    )
    report = build([f"own:docs:{root}"], tmp_path / "out", workers=1)
    found = rows(tmp_path / "out")
    assert set(found) == {"manual/a.md", "manual/b.rst", "manual/c.html"}
    assert found["manual/c.html"]["text"] == "# Adding\n\nUse `add` often."
    assert report.dropped == {"not-code": 1}


def test_any_html_becomes_text() -> None:
    assert to_markdown("<ul><li>a<li>b</ul>") == "- a\n- b"
    assert to_markdown("<script>x</script><p>a &lt; b &amp; c") == "a < b & c"
    assert to_markdown("<" * 1000) == "<" * 1000


@pytest.mark.skipif(shutil.which("git") is None, reason="no git: apt-get install git")
def test_commit_is_a_source_independent_of_the_working_tree(
    tree: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tree("project", {"LICENSE": MIT, "a.py": CODE})
    git = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@t.invalid"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"], ["tag", "v1"]):
        subprocess.run([*git, *command], check=True)
    (root / "a.py").write_text(CODE + "changed = True\n")
    (root / "b.py").write_text("uncommitted = 1\n")
    build([f"git:{root}"], tmp_path / "out", workers=1)
    assert {place: row["text"] for place, row in rows(tmp_path / "out").items()} == {"project/a.py": CODE}
    build([f"git:{root}@v1"], tmp_path / "tagged", workers=1)
    assert set(rows(tmp_path / "tagged")) == {"project/a.py"}
    with pytest.raises(UserError, match="git:"):
        build([f"git:{root}@nowhere"], tmp_path / "other")


@pytest.fixture
def index(tree: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A simple index of one package, served over HTTP, in its HTML form."""
    root = tree("pkg-2.0", {"PKG-INFO": "Metadata-Version: 2.4\nName: pkg\nLicense-Expression: MIT\n", "pkg.py": CODE})
    folder = tmp_path / "index" / "pkg"
    folder.mkdir(parents=True)
    with tarfile.open(folder / "pkg-2.0.tar.gz", "w:gz") as tar:
        tar.add(root, "pkg-2.0")
    digest = hashlib.sha256((folder / "pkg-2.0.tar.gz").read_bytes()).hexdigest()
    links = [f'<a href="pkg-2.0.tar.gz#sha256={digest}">x</a>', '<a href="pkg-1.9.tar.gz#sha256=00">x</a>']
    links += ['<a href="pkg-3.0rc1.tar.gz#sha256=00">x</a>', '<a href="pkg-2.0-py3-none-any.whl#sha256=00">x</a>']
    (folder / "index.html").write_text("\n".join(links))

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *a: Quiet(*a, directory=str(tmp_path / "index")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_package_is_fetched_once_and_its_code_never_runs(index: Path, tmp_path: Path) -> None:
    build(["pypi:pkg"], tmp_path / "out", workers=1)
    row = rows(tmp_path / "out")["pkg/pkg.py"]
    assert (row["licence"], row["source"]) == ("MIT", "pypi:pkg")
    (index / "pkg-2.0.tar.gz").unlink()
    assert packages.fetch("pypi:pkg")  # from the cache
    with pytest.raises(UserError, match="no such version"):
        packages.fetch("pypi:pkg==7.0")
    with pytest.raises(UserError, match="no such package"):
        packages.fetch("pypi:nothing")


def test_missing_packages_are_reported_together_or_counted(index: Path, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("pypi:pkg  # the one that is there\n\npypi:nothing\npypi:nobody\n")
    words = [f"@{tmp_path / 'words.txt'}"]
    with pytest.raises(UserError, match=r"2 of 3 packages.*pypi:nobody.*pypi:nothing.*--skip-missing"):
        build(words, tmp_path / "out", workers=1)
    seen = []
    report = build(words, tmp_path / "out", workers=1, skip_missing=True, progress=lambda *report: seen.append(report))
    assert (report.kept, report.dropped) == (1, {"missing": 2, "not-code": 1})
    assert ("fetching", 3, 3) in seen


def test_network_errors_are_retried_and_keep_what_was_fetched(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakh.storage.RETRY_FIRST_WAIT_S", 0.001)
    real = packages.fetch_url

    def cut(url: str, target: Path, sha256: str = "") -> None:
        if "1.9" in url:
            raise PeerLost(f"fetch {url}", "failed 5 times", "try again later")
        real(url, target, sha256)

    monkeypatch.setattr(packages, "fetch_url", cut)
    with pytest.raises(PeerLost, match=r"pkg-1\.9"):
        fetch_all(open_sources(["pypi:pkg==1.9", "pypi:pkg", "pypi:nothing"]), skip_missing=True)
    (index / "pkg-2.0.tar.gz").unlink()
    assert packages.fetch("pypi:pkg")


def test_packages_with_the_same_name_get_distinct_names(index: Path) -> None:
    repos = [source.repo for source in open_sources(["pypi:pkg==2.0", "pypi:pkg", "npm:pkg@1", "npm:other"])]  # type: ignore[attr-defined]
    assert sorted(repos) == ["npm-pkg-1", "other", "pypi-pkg", "pypi-pkg-2.0"]


def test_package_with_a_wrong_hash_is_rejected(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakh.storage.RETRY_FIRST_WAIT_S", 0.001)
    (index / "pkg-2.0.tar.gz").write_bytes(b"something else")
    with pytest.raises(DataError, match="do not use it"):
        packages.fetch("pypi:pkg==2.0")


@pytest.mark.parametrize("word", ["pypi:", "npm:../../etc", "debian:--help", "pypi:a b", "file.unknown"])
def test_invalid_source_arguments_are_user_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.unknown").write_text("x")
    with pytest.raises(UserError):
        build([word], tmp_path / "out")


def test_history_of_a_document_lists_the_copies_it_replaced(tree: Callable[..., Path], tmp_path: Path) -> None:
    root = tree("proj", {"a.py": CODE, "b.py": "# a comment\n" + CODE, "LICENSE": MIT})
    build([str(root)], tmp_path / "out", Settings(dropped_texts=True), workers=1)
    history = find_document(str(tmp_path / "out"), "proj/a.py")
    assert history.won_over == (("exact-duplicate", "proj/b.py"),)
    assert history.document is not None
    assert history.document.licence == "MIT"
    lost = find_document(str(tmp_path / "out"), "proj/b.py")
    assert (lost.reason, lost.detail, lost.dropped_text) == ("exact-duplicate", "of proj/a.py", "# a comment\n" + CODE)


@pytest.mark.parametrize("part_bytes", [1, 7, 50, 64, 200, 1000])
def test_large_jsonl_is_read_in_parts_without_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    lines = [json.dumps({"text": f"value = {n}\n" * (n % 4 + 1), "path": f"f{n}.py"}) for n in range(40)]
    lines[5:5] = ["", "not json"]
    file = tmp_path / "r.jsonl"
    file.write_text("\n".join(lines))
    whole = [(raw.path, raw.content, raw.reason) for raw in records.read_jsonl(str(file), 0, "r", synthetic=False)]
    assert len(whole) == 41
    monkeypatch.setattr(records, "PART_BYTES", part_bytes)
    parts = [row["part"] for batch in batches(open_sources([str(file)])) for row in batch.to_pylist()]
    assert parts == list(range(-(-file.stat().st_size // part_bytes)))
    found = [raw for part in parts for raw in records.read_jsonl(str(file), part, "r", synthetic=False)]
    assert [raw.content for raw in found] == [content for _, content, _ in whole]
    assert [raw.reason for raw in found] == [reason for _, _, reason in whole]


def written_archive(target: Path) -> dict[str, bytes]:
    """An archive with empty, small and large members, long names, a folder and a link; returns its files."""
    files = {f"src/{'deep/' * (n % 40)}m{n}.py": f"x = {n}\n".encode() * (n * n % 300) for n in range(40)}
    with contextlib.ExitStack() as stack:
        if target.suffix == ".zip":
            packed = stack.enter_context(zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED))
            for name, content in files.items():
                packed.writestr(name, content)
        else:
            mode = cast(Any, f"w:{target.suffix[1:]}" if target.suffix != ".tar" else "w")
            tar = stack.enter_context(tarfile.open(target, mode))
            folder = tarfile.TarInfo("src")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
            link = tarfile.TarInfo("src/link.py")
            link.type, link.linkname = tarfile.SYMTYPE, "m1.py"
            tar.addfile(link)
    return files


@pytest.mark.parametrize("ending", [".tar", ".zip", ".tar.gz"])
@pytest.mark.parametrize("part_bytes", [4_999, 5_120, 20_000])
def test_large_archive_is_read_in_parts_without_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, part_bytes: int
) -> None:
    target = tmp_path / f"a{ending}"
    files = written_archive(target)
    monkeypatch.setattr(archives, "PART_BYTES", part_bytes)
    listed = [row for batch in batches(open_sources([str(target)])) for row in batch.to_pylist()]
    assert [row["part"] for row in listed] == list(range(len(listed)))
    assert (len(listed) > 1) == (ending != ".tar.gz" and target.stat().st_size > part_bytes)
    found = [raw for row in listed for raw in open_listed(row, 10**6, lambda path, size: True)]
    assert {raw.path: raw.content for raw in found if not raw.reason} == files
    assert [raw.path for raw in found if raw.reason] == ([] if ending == ".zip" else ["src/link.py"])
    assert len(found) == len(files) + (ending != ".zip")  # none twice


@pytest.mark.parametrize("ending", [".tar", ".zip"])
def test_damaged_large_archive_says_so_once_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    target = tmp_path / f"a{ending}"
    written_archive(target)
    monkeypatch.setattr(archives, "PART_BYTES", 9_000)
    listed = [row for batch in batches(open_sources([str(target)])) for row in batch.to_pylist()]
    target.write_bytes(target.read_bytes()[: target.stat().st_size // 2])
    found = [raw for row in listed for raw in open_listed(row, 10**6, lambda path, size: True)]
    places = [raw.path for raw in found if raw.reason == "unreadable"]
    assert places
    assert len(places) == len(set(places)) <= len(listed)


def test_parquet_row_groups_are_read_without_loss(tmp_path: Path) -> None:
    """Empty files, groups of one row, and a last group that is smaller."""
    texts = [f"x = {n}\n" for n in range(25)]
    for size in (1, 7, 25, 100):
        target = tmp_path / f"r{size}.parquet"
        table = pa.table({"content": texts, "path": [f"{n}.py" for n in range(25)]})
        pq.write_table(table, target, row_group_size=size)
        listed = [row for batch in batches(open_sources([str(target)])) for row in batch.to_pylist()]
        assert len(listed) == -(-25 // size)
        found = [raw.content for row in listed for raw in open_listed(row, 10**6, lambda path, size: True)]
        assert found == [text.encode() for text in texts]
