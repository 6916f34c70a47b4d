"""Write a safetensors file tensor by tensor: eight bytes of length, a JSON header, the bytes of the tensors.

Needs no memory beyond the tensors and hashes while writing, which the safetensors package cannot do. The file appears
only when it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lakh import storage

__all__ = ["write_tensors"]

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


def write_tensors(url: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write tensors that are in host memory; returns the size and hash of the file for the manifest."""
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
        file = storage.HashingFile(raw)
        file.write(len(head).to_bytes(8, "little") + head)
        for _, tensor in ordered:
            if tensor.numel():
                file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return {"bytes": file.size_bytes, "sha256": file.sha256}
