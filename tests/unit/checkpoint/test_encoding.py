"""Encoded slices: exact ones are bit-exact, bounded ones keep their bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lakh.checkpoint.encoding import BLOCK, BLOCK_BOUNDS, decode, encode
from lakh.checkpoint.encoding.parts import unpack
from lakh.checkpoint.encoding.residuals import NUM_PARTS, decode_residuals, encode_residuals

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
@pytest.mark.parametrize("kind", ["delta5", "value5", "log", "delta4", "value4", "root8"])
def test_bounded_slices_keep_their_bound(kind: str, dtype: torch.dtype) -> None:
    base = moments().to(dtype)
    tensor = base + (0.01 * moments().flip(0)).to(dtype) if kind.startswith("delta") else base
    tensor = tensor.square() if kind in ("root8", "log") else tensor
    encoded = encode(kind, tensor, base if kind.startswith("delta") else None)
    found = decode(encoded.data, dtype, tuple(tensor.shape), base)
    assert torch.equal(found, encoded.decoded), "the writer knows what a reader gets"
    wanted, got, before = (value.float().reshape(-1) for value in (tensor, found, base))
    if kind.startswith("delta"):
        wanted, got = wanted - before, got - before
    if kind in ("root8", "log"):
        wanted, got = wanted.sqrt(), got.sqrt()
        assert bool((got[wanted > 0] > 0).all()), "a second moment never becomes zero"
    # 1 % for the scale in bf16, and the rounding of the result to bf16, relative to the whole value.
    rounding = 2**-8 * before.abs().max() if dtype is torch.bfloat16 else 1e-6
    for start in range(0, len(wanted), BLOCK):
        part = slice(start, start + BLOCK)
        limit = BLOCK_BOUNDS[kind] * 1.01 * wanted[part].abs().max() + rounding
        assert float((got[part] - wanted[part]).abs().max()) <= float(limit)


def test_logs_keep_zeros_and_the_scale_of_every_value() -> None:
    tensor = moments().square() * torch.logspace(-12, 2, 100)[:, None]
    tensor[3, 5] = 0.0
    for values in (tensor, tensor[:, 0].clone(), tensor[:1]):
        encoded = encode("log", values, None)
        found = decode(encoded.data, values.dtype, tuple(values.shape), None)
        assert torch.equal(found == 0, values == 0)
        ratio = (found / values)[values > 0].sqrt()
        assert float((ratio - 1).abs().max()) <= BLOCK_BOUNDS["log"] * 1.01
    far = torch.tensor([[1e-30, 1e30], [1e30, 1e-30], [1.0, 1.0]])  # 50 octaves from its row and column
    assert torch.equal(decode(encode("log", far, None).data, far.dtype, (3, 2), None) > 0, far > 0)


def test_differences_are_grouped_by_the_exponent_of_their_base() -> None:
    """Groups of numbers that are smaller than their changes are encoded by themselves."""
    base = moments(300, 200) * torch.logspace(-4, 0, 300)[:, None]
    tensor = base + 1e-3 * torch.randn(300, 200)
    encoded = encode("exact", tensor, base)
    header, _ = unpack(encoded.data)
    assert header["of"] == "base"
    assert set(header["changes"]) == {0, 1}
    assert bits(decode(encoded.data, tensor.dtype, (300, 200), base)) == bits(tensor)
    with pytest.raises(ValueError, match="groups of another base"):
        decode(encoded.data, tensor.dtype, (300, 200), torch.ones(300, 200))


def test_moments_are_differences_to_what_rows_columns_and_the_base_predict() -> None:
    kept, new = torch.randn(2, 300, 200, generator=torch.Generator().manual_seed(0))
    base = kept.exp() * torch.rand(300, 1)
    tensor = (0.5 * kept + 0.5 * new).exp() * torch.logspace(-6, 0, 200)
    sizes = {}
    for before in (None, base):
        encoded = encode("exact", tensor, before)
        header, _ = unpack(encoded.data)
        assert (header["of"], header["slope"] > 0) == ("means", before is not None)
        assert bits(decode(encoded.data, tensor.dtype, (300, 200), before)) == bits(tensor)
        sizes[before is None] = encoded.data.nbytes
    assert sizes[False] < sizes[True] < 0.85 * tensor.nbytes
    with pytest.raises(ValueError, match="base is missing"):
        decode(encoded.data, tensor.dtype, (300, 200), None)


@pytest.mark.parametrize("outliers", [0, 3, 2000])
@pytest.mark.parametrize("spread", [0, 100, 1 << 20, 1 << 31])
@pytest.mark.parametrize("with_signs", [False, True])
def test_residuals_of_any_spread_come_back(outliers: int, spread: int, with_signs: bool) -> None:
    random = np.random.default_rng(0)
    numbers = random.integers(-spread, spread, 5000, endpoint=spread == 0).astype(np.int32)
    numbers[:outliers] = random.integers(-(1 << 31), 1 << 31, outliers)
    signs = (random.random(5000) < 0.1).astype(np.uint32) if with_signs else None
    header, parts = encode_residuals(numbers.copy(), signs)
    found, found_signs = decode_residuals(header, [memoryview(part) for part in parts], 5000)
    assert len(parts) == NUM_PARTS
    assert np.array_equal(found, numbers)
    assert found_signs is None if signs is None else np.array_equal(found_signs, signs)
    if outliers <= 3 and spread <= 1 << 20:
        needed_bits = max(8, (2 * spread).bit_length()) + 0.6 * with_signs
        assert sum(map(len, parts)) < 5000 * (needed_bits + 1) / 8


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


def test_of_a_table_only_changed_rows_are_stored() -> None:
    """Bit-exact, and as small as the rows that changed."""
    random = torch.Generator().manual_seed(1)
    base = torch.randn(10_000, 16, generator=random)
    rows = torch.randperm(10_000, generator=random)[:50]
    for changed in (rows, rows[:0], torch.tensor([0, 9_999])):
        table = base.clone()
        table[changed] = torch.randn(len(changed), 16, generator=random)
        encoded = encode("exact", table, base)
        assert torch.equal(decode(encoded.data, table.dtype, (10_000, 16), base), table)
        assert encoded.data.nbytes < 300 + len(changed) * 16 * 4 * 1.2
    with pytest.raises(ValueError, match="base is missing"):
        decode(encoded.data, table.dtype, (10_000, 16), None)
    with pytest.raises(ValueError, match="a row that its base does not have"):
        decode(encoded.data, table.dtype, (100, 16), base[:100])
