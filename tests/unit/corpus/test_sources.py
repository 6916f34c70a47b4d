from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lakh.corpus.sources import Fingerprint, InstalledPackages, ListedFile, Stdlib, batches, open_sources
from lakh.errors import UserError


def listed(*words: str, exclude: Path | None = None) -> list[dict[str, object]]:
    return [row for batch in batches(open_sources(words, exclude)) for row in batch.to_pylist()]


def test_folder_is_walked_in_order_without_hidden_and_vendored_folders(tree: Callable[..., Path]) -> None:
    files = dict.fromkeys(("b.py", "a.py", ".git/config", ".hidden/c.py", "node_modules/d.js"), "x")
    root = tree("proj", files | {"sub/__pycache__/e.py": "x", "sub/f.py": "x", ".eslintrc.js": "x"})
    assert [(row["repo"], row["path"]) for row in listed(str(root))] == [
        ("proj", path) for path in (".eslintrc.js", "a.py", "b.py", "sub/f.py")
    ]


def test_links_are_never_followed_out_of_the_folder(tree: Callable[..., Path]) -> None:
    outside = tree("outside", {"secret.py": "x"})
    root = tree("proj", {"a.py": "x"})
    (root / "in.py").symlink_to(root / "a.py")
    (root / "out.py").symlink_to(outside / "secret.py")
    (root / "folder").symlink_to(outside)
    (root / "dangling.py").symlink_to(root / "nowhere.py")
    (root / "loop.py").symlink_to(root / "loop.py")
    reasons = {row["path"]: row["reason"] for row in listed(str(root))}
    assert reasons == {
        "a.py": "",
        "in.py": "",
        "out.py": "symlink",
        "folder": "symlink",
        "dangling.py": "unreadable",
        "loop.py": "unreadable",
    }


def test_pipe_is_not_read(tree: Callable[..., Path]) -> None:
    root = tree("proj", {"a.py": "x"})
    os.mkfifo(root / "pipe.py")
    assert {row["path"]: row["reason"] for row in listed(str(root))} == {"a.py": "", "pipe.py": "unreadable"}


def test_file_name_that_is_not_text_is_escaped(tree: Callable[..., Path]) -> None:
    root = tree("proj", {"a.py": "x"})
    (Path(os.fsdecode(os.fsencode(root) + b"/b\xff.py"))).write_text("x")
    assert [row["path"] for row in listed(str(root))] == ["a.py", "b\\udcff.py"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("nowhere", "no such folder"),
        ("installed:nothing", "choose one of"),
        ("proj/a.py", "is a file"),
        ("empty", "no files"),
    ],
)
def test_source_that_cannot_be_read_is_a_user_error(
    tree: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, message: str
) -> None:
    tree("proj", {"a.py": "x"})
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        listed(word)


@pytest.mark.parametrize("argument", ["own:", "docs:", "mine="])
def test_a_source_without_a_path_is_not_the_working_folder(argument: str) -> None:
    with pytest.raises(UserError, match=f"{argument}: has no path"):
        open_sources([argument])


def test_two_folders_with_the_same_name_need_explicit_names(tree: Callable[..., Path]) -> None:
    one, two = tree("one/api", {"a.py": "x"}), tree("two/api", {"a.py": "y"})
    with pytest.raises(UserError, match="NEWNAME=PATH"):
        listed(str(one), str(two))
    assert {row["repo"] for row in listed(str(one), f"other={two}")} == {"api", "other"}
    assert len(listed(str(one), str(one) + "/")) == 1  # the same folder twice is one source


def test_output_folder_is_not_a_source(tree: Callable[..., Path]) -> None:
    root = tree("proj", {"a.py": "x", "corpus/docs-00000.parquet": "x"})
    assert [row["path"] for row in listed(str(root), exclude=root / "corpus")] == ["a.py"]
    with pytest.raises(UserError, match="choose another --out"):
        listed(str(root), exclude=root)


def test_fingerprint_changes_with_the_files(tree: Callable[..., Path]) -> None:
    def fingerprint() -> str:
        watch = Fingerprint()
        list(watch.watch(batches(open_sources([str(root)]))))
        return watch.hexdigest()

    root = tree("proj", {"a.py": "x", "b.py": "y"})
    before = fingerprint()
    assert fingerprint() == before
    os.utime(root / "a.py", ns=(1, 1))
    touched = fingerprint()
    (root / "b.py").unlink()
    assert len({before, touched, fingerprint()}) == 3


def test_standard_library_is_listed_without_its_tests() -> None:
    rows = list(Stdlib().files())
    assert any(row.path == "json/decoder.py" for row in rows)
    assert {row.licence for row in rows} == {"PSF-2.0"}
    assert not [row.path for row in rows if "test" in row.path.split("/")[:-1] or "site-packages" in row.path]


def distribution(root: Path, name: str, metadata: str, record: str) -> None:
    folder = root / f"{name}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{metadata}\n")
    (folder / "RECORD").write_text(record)


def test_packages_with_other_licences_are_counted_but_not_read(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("x = 1\n")
    distribution(tmp_path, "Good_One", "License-Expression: MIT", "good.py,,\n../../bin/tool,,\ngone.py,,\n")
    distribution(tmp_path, "viral", "License: GPL-3.0", "viral.py,,\n")
    distribution(tmp_path, "silent", "", "silent.py,,\n")
    rows: list[ListedFile] = list(InstalledPackages(search=(str(tmp_path),)).files())
    assert [(row.repo, row.path, row.licence, row.reason) for row in rows] == [
        ("good-one", "gone.py", "MIT", ""),  # missing on disk: the reader will say so
        ("good-one", "good.py", "MIT", ""),
        ("silent", "", "", "licence"),
        ("viral", "", "", "licence"),
    ]


MIT_METADATA = '[project]\nname = "x"\nlicense = "MIT"\n'


def test_licence_of_the_repository_around_a_folder_is_found(tree: Callable[..., Path]) -> None:
    root = tree("proj", {".git/config": "", "pyproject.toml": MIT_METADATA, "src/deep/a.py": "x"})
    found = listed(str(root / "src" / "deep"))
    assert [(row["licence"], str(row["licence_evidence"])[:20]) for row in found] == [("MIT", "../../pyproject.toml")]


def test_licence_is_not_taken_from_above_the_repository(tree: Callable[..., Path]) -> None:
    root = tree("outer", {"pyproject.toml": MIT_METADATA, "inner/.git/config": "", "inner/src/a.py": "x"})
    assert [row["licence"] for row in listed(str(root / "inner" / "src"))] == [""]
    assert [row["licence"] for row in listed(str(root / "inner"))] == [""]


def test_own_licence_of_a_folder_comes_before_that_of_the_repository(tree: Callable[..., Path]) -> None:
    gpl = '{"license": "GPL-3.0-only"}'
    root = tree("proj", {"pyproject.toml": MIT_METADATA, "part/package.json": gpl, "part/a.js": "x"})
    assert {row["licence"] for row in listed(str(root / "part"))} == {"GPL-3.0-only"}


def test_licence_files_in_folders_for_them_are_read(tree: Callable[..., Path]) -> None:
    root = tree("proj", {"docs/COPYING": "GNU GENERAL PUBLIC LICENSE\nVersion 3\n", "a.py": "x"})
    assert {row["licence"] for row in listed(str(root))} != {""}


@pytest.mark.parametrize("prefix", ["own:", "own:name="])
def test_own_code_needs_no_licence(tree: Callable[..., Path], prefix: str) -> None:
    root = tree("proj", {"a.py": "x", "package.json": '{"license": "GPL-3.0-only"}'})
    assert {row["licence"] for row in listed(f"{prefix}{root}")} == {"LicenseRef-own"}
