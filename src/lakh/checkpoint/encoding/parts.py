"""The bytes of an encoded slice: a length, a JSON header, and parts; zstd from pyarrow, which the trainer needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["compress", "decompress", "pack", "unpack"]

ZSTD_LEVEL = 1  # entropy coding: matches, which higher levels look for, cost more than they save here


def compress(data: np.ndarray) -> bytes:
    return bytes(pa.Codec("zstd", compression_level=ZSTD_LEVEL).compress(np.ascontiguousarray(data), asbytes=True))


def decompress(data: Any, size_bytes: int) -> Any:
    return pa.Codec("zstd").decompress(data, decompressed_size=size_bytes)


def pack(header: dict[str, Any], parts: Sequence[bytes]) -> np.ndarray:
    head = json.dumps(header | {"sizes": [len(part) for part in parts]}, separators=(",", ":")).encode()
    return np.frombuffer(b"".join([len(head).to_bytes(4, "little"), head, *parts]), np.uint8)


def unpack(data: np.ndarray) -> tuple[dict[str, Any], list[memoryview]]:
    view = memoryview(data.tobytes())
    at = 4 + int.from_bytes(view[:4], "little")
    header = json.loads(bytes(view[4:at]))
    parts = []
    for size in header["sizes"]:
        parts.append(view[at : at + size])
        at += size
    return header, parts
