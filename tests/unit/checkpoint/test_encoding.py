"""Encoded slices: exact ones are bit-exact, bounded ones keep their bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lakh.checkpoint.encoding import BLOCK, BLOCK_BOUNDS, decode, encode

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@given(
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    with_base=st.booleans(),
)
def test_exact_slices_are_bit_exact_for_any_bits(data, dtype: torch.dtype, shape: tuple[int, ...], with_base) -> None:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw, other = (bytearray(data.draw(st.binary(min_size=size, max_size=size))) for _ in range(2))
    tensor = torch.frombuffer(raw, dtype=dtype).reshape(shape)
    base = torch.frombuffer(other, dtype=dtype).reshape(shape) if with_base else None
    encoded = encode("exact", tensor, base)
    assert bits(decode(encoded.data, dtype, shape, base)) == bits(tensor)
    assert bits(encoded.decoded) == bits(tensor)


def moments(rows: int = 100, columns: int = 70) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, columns) * torch.rand(rows, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["delta4", "value4", "root8"])
def test_bounded_slices_keep_their_bound(kind: str, dtype: torch.dtype) -> None:
    base = moments().to(dtype)
    tensor = base + (0.01 * moments().flip(0)).to(dtype) if kind == "delta4" else base
    tensor = tensor.square() if kind == "root8" else tensor
    encoded = encode(kind, tensor, base if kind == "delta4" else None)
    found = decode(encoded.data, dtype, tuple(tensor.shape), base)
    assert torch.equal(found, encoded.decoded), "the writer knows what a reader gets"
    wanted, got, before = (value.float().reshape(-1) for value in (tensor, found, base))
    if kind == "delta4":
        wanted, got = wanted - before, got - before
    if kind == "root8":
        wanted, got = wanted.sqrt(), got.sqrt()
        assert bool((got[wanted > 0] > 0).all()), "a second moment never becomes zero"
    # 1 % for the scale in bf16, and the rounding of the result to bf16, relative to the whole value.
    rounding = 2**-8 * before.abs().max() if dtype is torch.bfloat16 else 1e-6
    for start in range(0, len(wanted), BLOCK):
        part = slice(start, start + BLOCK)
        limit = BLOCK_BOUNDS[kind] * 1.01 * wanted[part].abs().max() + rounding
        assert float((got[part] - wanted[part]).abs().max()) <= float(limit)


def test_factored_second_moments_keep_means_of_rows_and_columns() -> None:
    tensor = moments().square()
    encoded = encode("factored", tensor, None)
    assert encoded.data.nbytes < 0.2 * tensor.nbytes
    found = decode(encoded.data, tensor.dtype, tuple(tensor.shape), None)
    torch.testing.assert_close(found.mean(0), tensor.mean(0), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.mean(1), tensor.mean(1), rtol=1e-4, atol=0)
    vector = encode("factored", tensor[:, 0].clone(), None)  # no rows and columns: 8 bits each
    assert torch.equal(decode(vector.data, tensor.dtype, (100,), None), vector.decoded)
    zero = encode("factored", torch.zeros(4, 4), None)
    assert torch.equal(decode(zero.data, torch.float32, (4, 4), None), torch.zeros(4, 4))


def test_values_that_have_no_bound_are_stored_exactly() -> None:
    tensor = torch.tensor([1.0, float("nan"), float("inf"), -0.0])
    found = decode(encode("delta4", tensor, torch.zeros(4)).data, torch.float32, (4,), torch.zeros(4))
    assert bits(found) == bits(tensor)


@pytest.mark.parametrize("damage", [b"", b"\0\0\0\0", b"\xff\xff\xff\xff{}", b"\2\0\0\0{}", b"\2\0\0\0[]"])
def test_bytes_that_are_no_slice_are_a_value_error(damage: bytes) -> None:
    with pytest.raises(ValueError, match=""):
        decode(np.frombuffer(damage, np.uint8), torch.float32, (4,), None)
