"""GGUF files in several parts, written by the `gguf` package: any part's name loads all of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lakh.errors import CorruptCheckpoint, DataError, UserError
from lakh.server.engine import Engine, SamplingParams
from lakh.server.model import weights as model_weights
from lakh.workloads.code.formats import gguf, gguf_parts

from .test_gguf_families import Exported

package = pytest.importorskip("gguf", reason="pip install gguf")


def split(path: Path, folder: Path, **options: Any) -> list[Path]:
    """The same settings and tensors in several files; returns them in order."""
    reader = package.GGUFReader(path)
    writer = package.GGUFWriter(None, reader.fields["general.architecture"].contents(), **options)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind, *more = field.types
            writer.add_key_value(key, field.contents(), kind, sub_type=more[0] if more else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    folder.mkdir()
    writer.write_header_to_file(folder / path.name)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    found = Exported("qwen2", tmp_path_factory.mktemp("gguf"), hidden_size=64, intermediate_size=64)
    found.save("q8_0")
    return found


@pytest.fixture
def parts(exported: Exported, tmp_path: Path) -> list[Path]:
    found = split(exported.path, tmp_path / "parts", split_max_tensors=9)
    assert len(found) >= 3
    assert found[0].name.endswith(f"-00001-of-{len(found):05}.gguf")
    return found


def copy(source: Path, target: Path) -> Path:
    return Path(shutil.copy(source, target))


@pytest.mark.parametrize("options", [{"split_max_tensors": 9}, {"split_max_tensors": 4, "small_first_shard": True}])
def test_any_part_loads_the_whole_model(exported: Exported, tmp_path: Path, options: dict[str, Any]) -> None:
    whole = gguf.load(exported.path)
    found = split(exported.path, tmp_path / "parts", **options)
    assert len(found) >= 3
    for path in (found[0], found[1], found[-1]):
        loaded = gguf.load(path)
        assert (loaded.spec, loaded.name) == (whole.spec, whole.name)
        assert loaded.tokenizer_json == whole.tokenizer_json
        assert loaded.weights.keys() == whole.weights.keys()
        assert loaded.weights.is_quantized
        assert all(torch.equal(loaded.weights[name], tensor) for name, tensor in whole.weights.items())


def test_the_engine_serves_parts_under_the_name_of_the_whole(exported: Exported, parts: list[Path]) -> None:
    whole, split_up = Engine.load(str(exported.path)), Engine.load(str(parts[1]))
    prompt, sampling = [list(range(3, 20))], SamplingParams(max_tokens=8)
    assert split_up.generate(prompt, sampling) == whole.generate(prompt, sampling)
    assert split_up.network.precision == whole.network.precision == "stored"
    assert model_weights.read(str(parts[2])).name == exported.path.stem
    assert gguf_parts.paths_of(parts[1]) == parts


def test_links_to_files_of_other_names_are_read(parts: list[Path], tmp_path: Path) -> None:
    """As in Hugging Face's cache, where a name is a link to a file that is named by its hash."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for number, part in enumerate(parts):
        copy(part, blobs / f"{number}")
        (snapshot / part.name).symlink_to(blobs / f"{number}")
    assert gguf.load(snapshot / parts[1].name).weights.keys() == gguf.load(parts[0]).weights.keys()


def test_missing_parts_are_named(parts: list[Path]) -> None:
    parts[0].unlink()
    parts[2].unlink()
    with pytest.raises(UserError) as error:
        gguf.load(parts[1])
    count = len(parts)
    assert f"is part 2 of {count}; missing: {parts[0].name}, {parts[2].name}" in str(error.value)
    assert "put all parts into one folder" in str(error.value)
    with pytest.raises(UserError, match="no such file"):
        gguf.load(parts[0])


def renamed(parts: list[Path]) -> Path:
    return parts[1].rename(parts[1].with_name("model.gguf"))


def swapped(parts: list[Path]) -> Path:
    first, second = parts[0].read_bytes(), parts[1].read_bytes()
    parts[0].write_bytes(second)
    parts[1].write_bytes(first)
    return parts[2]


def doubled(parts: list[Path]) -> Path:
    copy(parts[2], parts[1])
    return parts[0]


def shortened(parts: list[Path]) -> Path:
    parts[1].write_bytes(parts[1].read_bytes()[:-2000])
    return parts[0]


def emptied(parts: list[Path]) -> Path:
    parts[1].write_bytes(b"")
    return parts[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (renamed, r"is part 2 of \d, and its name does not say so.*name it model-00002-of-"),
        (swapped, r"00001-of-\d+\.gguf: is part 2 of \d, and its name says 1"),
        (doubled, r"00002-of-\d+\.gguf: is part 3 of \d, and its name says 2"),
        (shortened, r"00002-of-\d+\.gguf: cannot be read"),
        (emptied, r"00002-of-\d+\.gguf: "),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    change: Callable[[list[Path]], Path], words: str, parts: list[Path]
) -> None:
    with pytest.raises((UserError, DataError), match=words):
        gguf.load(change(parts))


def test_parts_of_another_file_are_refused(exported: Exported, parts: list[Path], tmp_path: Path) -> None:
    tensors = len(package.GGUFReader(exported.path).tensors)
    other = split(exported.path, tmp_path / "two", split_max_tensors=tensors - 1)
    copy(other[1], parts[1])
    with pytest.raises(CorruptCheckpoint, match=rf"is part 2 of 2, and its name says 2 of {len(parts)}"):
        gguf.load(parts[0])


def test_a_tensor_is_in_one_part_only_and_none_is_missing(parts: list[Path]) -> None:
    read = [gguf_parts.GgufPart(path, *contents(path)) for path in parts]
    whole = gguf_parts.join(read)
    twice = [*read[:-1], read[-1]._replace(tensors=[*read[-1].tensors, read[0].tensors[0]])]
    with pytest.raises(CorruptCheckpoint, match=rf"has the tensor .*, which {parts[0].name} also has"):
        gguf_parts.join(twice)
    fewer = [*read[:-1], read[-1]._replace(tensors=[])]
    with pytest.raises(CorruptCheckpoint, match=rf"all parts have {len(whole)} tensors, and they have"):
        gguf_parts.join(fewer)


def contents(path: Path) -> tuple[dict[str, Any], list[Any]]:
    reader = package.GGUFReader(path)
    return {key: field.contents() for key, field in reader.fields.items()}, reader.tensors


@pytest.mark.parametrize(
    "numbers", [{}, {"split.no": 3}, {"split.no": -1}, {"split.no": "1"}, {"split.no": 0, "split.count": "3"}]
)
def test_numbers_of_parts_are_checked(numbers: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"has split\.no"):
        gguf_parts.find(tmp_path / "a-00001-of-00003.gguf", {"split.count": 3, **numbers})
    assert not gguf_parts.is_part({"split.count": 1})
    assert not gguf_parts.is_part({})
