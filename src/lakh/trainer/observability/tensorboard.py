"""TensorBoard's event files, written by hand: a scalar is thirty bytes of protocol buffer in a framed record.

A record is its length (u64), a checksum of the length, the bytes, and a checksum of the bytes; checksums are CRC-32C,
rotated right by 15 and offset, as in TFRecord files (tensorflow/core/lib/io/record_writer.h). An Event message has
wall_time (field 1, double), step (2, varint), file_version (3, string) or summary (5); a summary value has a tag (1)
and a simple_value (2, float). Needs no package; `tensorboard --logdir RUN` reads it.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path

__all__ = ["ScalarFile"]

CASTAGNOLI = 0x82F63B78
MASK_DELTA = 0xA282EAD8


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (CASTAGNOLI if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _crc_table()


def masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF


def _varint(value: int) -> bytes:
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def _text(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


class ScalarFile:
    """Appends scalars to a new file in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab")
        self._record(struct.pack("<Bd", 1 << 3 | 1, now) + _text(3, b"brain.Event:2"))

    def add(self, tag: str, value: float, *, step: int, time_s: float) -> None:
        scalar = _text(1, tag.encode()) + struct.pack("<Bf", 2 << 3 | 5, value)
        event = struct.pack("<Bd", 1 << 3 | 1, time_s) + b"\x10" + _varint(step) + _text(5, _text(1, scalar))
        self._record(event)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _record(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self._file.write(length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data)))
