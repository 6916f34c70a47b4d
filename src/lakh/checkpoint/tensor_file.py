"""Write a safetensors file tensor by tensor, and read parts of a remote one by range reads.

A file is eight bytes of length, a JSON header and the bytes of the tensors. Writing needs no memory beyond the tensors
and hashes on the way, which the safetensors package cannot do. The file appears only when it is complete.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lakh import storage
from lakh.checkpoint.chunk_hashes import ChunkHashingFile
from lakh.checkpoint.format import StoredFile

__all__ = ["RemoteTensorFile", "write_tensors"]

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8
_HEADER_LIMIT_BYTES = 100 << 20  # the limit of the safetensors package


def write_tensors(url: str, tensors: Mapping[str, Tensor]) -> StoredFile:
    """Write tensors that are in host memory; returns the size and hashes of the file for the manifest."""
    # The widest types first, so that every tensor is aligned to its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, at = {}, 0
    for name, tensor in ordered:
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % _ALIGNMENT)
    with storage.create(url) as raw:
        file = ChunkHashingFile(raw)
        try:
            file.write(len(head).to_bytes(8, "little") + head)
            for _, tensor in ordered:
                if tensor.numel():
                    file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
            return file.finish()
        finally:
            file.abandon()


class RemoteTensorFile:
    """A safetensors file on an object store; a slice reads only its rows. Raises ValueError if the file is damaged."""

    def __init__(self, url: str) -> None:
        self._url = url
        size = int.from_bytes(storage.read_range(url, 0, 8), "little")
        if not 0 < size <= _HEADER_LIMIT_BYTES:
            raise ValueError(f"its header has {size:,} bytes")
        self._header, self._start = json.loads(storage.read_range(url, 8, size)), 8 + size

    def read(self, name: str, box: tuple[slice, ...] | None) -> Tensor:
        """The slice `box` of a tensor; None: the whole tensor."""
        try:
            entry = self._header[name]
            shape, (first, _) = entry["shape"], entry["data_offsets"]
            dtype = next(dtype for dtype, written in _NAMES.items() if written == entry["dtype"])
        except (KeyError, TypeError, ValueError, StopIteration):
            raise ValueError(f"its header does not describe {name}") from None
        box = tuple(slice(0, size) for size in shape) if box is None else box
        rows = box[0] if box else slice(0, 1)
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        raw = storage.read_range(
            self._url, self._start + first + rows.start * row_bytes, (rows.stop - rows.start) * row_bytes
        )
        values = torch.frombuffer(bytearray(raw), dtype=dtype)
        return values.reshape(rows.stop - rows.start, *shape[1:])[(slice(None), *box[1:])] if box else values[0]
