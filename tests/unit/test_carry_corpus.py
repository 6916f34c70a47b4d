"""A corpus split into xz files is restored unchanged, or not at all."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lakh.corpus import build, read_documents, read_report
from lakh.errors import CorruptShard, UserError

SCRIPT = Path(__file__).parents[2] / "scripts" / "carry_corpus.py"


@pytest.fixture(scope="module")
def carry() -> ModuleType:
    spec = importlib.util.spec_from_file_location("carry_corpus", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["carry_corpus"] = module  # its worker processes look for it there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("carried")
    folders = []
    for number in range(12):
        folder = base / f"repo{number}"
        folder.mkdir()
        (folder / "LICENSE").write_text("SPDX-License-Identifier: MIT\n")
        for name in ("one", "two"):
            body = "\n".join(f"    total = {name}_{number} * {i} + offset_{number * 7 + i}" for i in range(30))
            (folder / f"{name}.py").write_text(f"def {name}_{number}(x):\n    # größer\n{body}\n    return total\n")
        folders.append(str(folder))
    build(folders, base / "corpus", workers=1)
    return base / "corpus"


def texts(corpus: str | Path) -> dict[tuple[str, str], str]:
    rows = [row for batch in read_documents(str(corpus), ["repo", "path", "text"]) for row in batch.to_pylist()]
    return {(row["repo"], row["path"]): row["text"] for row in rows}


@pytest.mark.slow
def test_both_parts_together_are_the_corpus_and_no_repository_is_in_both(
    carry: ModuleType, corpus: Path, tmp_path: Path
) -> None:
    carry.pack(str(corpus), tmp_path / "pieces", heldout=0.4, piece_bytes=2000, jobs=1)
    for part in ("train", "heldout"):
        carry.unpack(tmp_path / "pieces", str(tmp_path / part), part)
        assert read_report(str(tmp_path / part)).verify() > 0
    train, heldout = texts(tmp_path / "train"), texts(tmp_path / "heldout")
    assert train | heldout == texts(corpus)
    assert not {repo for repo, _ in train} & {repo for repo, _ in heldout}


def test_a_share_of_each_repository_leaves_none_out(carry: ModuleType, corpus: Path, tmp_path: Path) -> None:
    one_file = max(len(text.encode()) for text in texts(corpus).values())
    carry.pack(str(corpus), tmp_path / "pieces", heldout=0.0, piece_bytes=10**9, per_repo_bytes=one_file, jobs=1)
    carry.unpack(tmp_path / "pieces", str(tmp_path / "train"), "train")
    kept = texts(tmp_path / "train")
    assert len(kept) == 12
    assert {repo for repo, _ in kept} == {repo for repo, _ in texts(corpus)}


def test_pieces_with_other_documents_make_no_corpus(carry: ModuleType, corpus: Path, tmp_path: Path) -> None:
    carry.pack(str(corpus), tmp_path / "pieces", heldout=0.0, piece_bytes=2000, jobs=1)
    index = json.loads((tmp_path / "pieces" / "pieces.json").read_bytes())
    index["parts"]["train"]["pieces"].pop()
    (tmp_path / "pieces" / "pieces.json").write_text(json.dumps(index))
    with pytest.raises(CorruptShard, match="not those that were packed"):
        carry.unpack(tmp_path / "pieces", str(tmp_path / "train"), "train")
    assert not (tmp_path / "train" / "manifest.json").exists()


def test_a_folder_without_pieces_is_named(carry: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pieces\.json"):
        carry.unpack(tmp_path, str(tmp_path / "out"), "train")
