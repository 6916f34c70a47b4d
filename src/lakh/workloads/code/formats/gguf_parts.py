"""GGUF files in several parts, as llama.cpp's llama-gguf-split writes them: NAME-00001-of-00003.gguf.

The first part has the settings; each has its number (`split.no`, from 0), the number of parts (`split.count`) and that
of all tensors (`split.tensors.count`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lakh.errors import CorruptCheckpoint, UserError

__all__ = ["GgufPart", "find", "is_part", "join", "model_name", "paths_of"]

NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
SHOWN = 4  # names in a message


class GgufPart(NamedTuple):
    path: Path
    settings: Mapping[str, Any]
    tensors: Sequence[Any]


def is_part(settings: Mapping[str, Any]) -> bool:
    return "split.count" in settings and settings["split.count"] not in (0, 1)


def model_name(path: Path) -> str:
    """The file's name without its ending and the number of its part."""
    found = NAME.fullmatch(path.name)
    return path.stem if found is None else found[1]


def paths_of(path: Path) -> list[Path]:
    """All parts beside this one, by their names; the file itself if it has no such name."""
    found = NAME.fullmatch(path.name)
    if found is None:
        return [path]
    return [path.with_name(f"{found[1]}-{number:05}-of-{found[3]}.gguf") for number in range(1, int(found[3]) + 1)]


def find(path: Path, settings: Mapping[str, Any]) -> list[Path]:
    """All parts of the file of which `path` is one, in order. Raises a UserError that names those that are missing."""
    number, count = _numbers(path, settings)
    paths = paths_of(path)
    if len(paths) != count or paths[number] != path:
        form = f"{model_name(path)}-{number + 1:05}-of-{count:05}.gguf"
        raise UserError(str(path), f"is part {number + 1} of {count}, and its name does not say so", f"name it {form}")
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        what = f"is part {number + 1} of {count}; missing: {', '.join(missing[:SHOWN])}{more}"
        raise UserError(str(path), what, "put all parts into one folder")
    return paths


def join(parts: Sequence[GgufPart]) -> dict[str, Any]:
    """The tensors of all parts by name. Raises a CorruptCheckpoint if these are not the parts of one file."""
    found: dict[str, Any] = {}
    owner: dict[str, Path] = {}
    for index, part in enumerate(parts):
        numbers = _numbers(part.path, part.settings)
        if numbers != (index, len(parts)):
            what = f"is part {numbers[0] + 1} of {numbers[1]}, and its name says {index + 1} of {len(parts)}"
            raise CorruptCheckpoint(str(part.path), what, "download it again")
        for tensor in part.tensors:
            if tensor.name in found:
                what = f"has the tensor {tensor.name}, which {owner[tensor.name].name} also has"
                raise CorruptCheckpoint(str(part.path), what, "use the parts of one file")
            found[tensor.name], owner[tensor.name] = tensor, part.path
    first = parts[0]
    total = first.settings.get("split.tensors.count")
    if total is not None and total != len(found):
        what = f"says that all parts have {total} tensors, and they have {len(found)}"
        raise CorruptCheckpoint(str(first.path), what, "use the parts of one file")
    return found


def _numbers(path: Path, settings: Mapping[str, Any]) -> tuple[int, int]:
    """The number of a part, from 0, and that of all parts."""
    number, count = settings.get("split.no"), settings.get("split.count")
    if not (type(number) is type(count) is int and 0 <= number < count):
        what = f"has split.no {number!r} and split.count {count!r}, which are not a part and a number of parts"
        raise CorruptCheckpoint(str(path), what[:200], "download it again")
    return number, count
