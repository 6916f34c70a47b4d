"""The native products with 8-bit and 4-bit weights equal numpy's, on every kernel that this CPU runs."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lakh.errors import UserError
from lakh.server.model.cpu import large_pages, native, packed
from lakh.server.model.cpu.packed import PackedMatrix
from lakh.workloads.code.formats.gguf_types import GroupedIntegers

library = native.open_library()
needs_library = pytest.mark.skipif(library is None, reason="the native engine library is not built")
KERNELS = library.lakh_engine_kernels().decode().split() if library is not None else ["none"]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    assert library is not None
    assert library.lakh_engine_select(request.param.encode()) == 0
    yield request.param
    library.lakh_engine_select(KERNELS[0].encode())
    library.lakh_engine_set_threads(1)


def make(rows: int, columns: int, bits: int, seed: int = 0) -> tuple[torch.Tensor, PackedMatrix]:
    weight = torch.randn((rows, columns), generator=torch.Generator().manual_seed(seed))
    return weight, PackedMatrix(columns, {0: packed.pack(weight, bits)})


def oracle(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x rounded to 8 bits in groups of 32, times the dequantized weight, in float64."""
    grouped = x.reshape(len(x), -1, 32)
    scales = np.abs(grouped).max(axis=-1, keepdims=True) / np.float32(127)
    scaled = np.divide(grouped, scales, out=np.zeros_like(grouped), where=scales > 0)
    rounded = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
    return (rounded.astype(np.float64) * scales).reshape(x.shape) @ weight.astype(np.float64).T


@needs_library
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 16, 17, 37])
def test_products_equal_numpy(kernel: str, bits: int, num: int) -> None:
    rows, columns = 43, 96  # the last row block has 3 rows
    _, matrix = make(rows, columns, bits)
    x = torch.randn((num, columns), generator=torch.Generator().manual_seed(num))
    x[-1, 32:64] = 0  # a group without a scale
    expected = oracle(x.numpy(), matrix.dequantize().numpy())
    np.testing.assert_allclose(packed.linear(x, matrix).numpy(), expected, rtol=1e-4, atol=1e-3)


@needs_library
@pytest.mark.parametrize("num", [1, 6, 20])
def test_a_matrix_has_rows_in_several_formats(kernel: str, num: int) -> None:
    """8 bits, 8 bits with minimums and 4 bits, with rows that no block divides."""
    generator = torch.Generator().manual_seed(num)
    weights = [torch.randn((rows, 64), generator=generator) for rows in (11, 5, 16)]
    with_minimums = np.random.default_rng(num)
    numbers = GroupedIntegers(
        8,
        with_minimums.integers(0, 32, (5, 2, 32)).astype(np.int8),
        with_minimums.random((5, 2), np.float32),
        -with_minimums.random((5, 2), np.float32),
    )
    pieces = {11: packed.pack_integers(numbers), 16: packed.pack(weights[2], 4), 0: packed.pack(weights[0], 8)}
    matrix = PackedMatrix(64, pieces)
    assert matrix.rows == 32
    dense = matrix.dequantize()
    torch.testing.assert_close(dense[:11], weights[0], atol=0.02, rtol=0)
    torch.testing.assert_close(dense[16:], weights[2], atol=0.2, rtol=0)
    assert numbers.minimums is not None
    expected_piece = numbers.values * numbers.scales[..., None] + numbers.minimums[..., None]
    np.testing.assert_allclose(dense[11:16].numpy(), expected_piece.reshape(5, 64), atol=0.02)
    x = torch.randn((num, 64), generator=generator)
    expected = oracle(x.numpy(), dense.numpy())
    np.testing.assert_allclose(packed.linear(x, matrix).numpy(), expected, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_taken_from_a_packed_matrix(bits: int) -> None:
    _, matrix = make(43, 96, bits)
    rows = [42, 0, 7, 8, 42]
    assert torch.equal(matrix.take(rows), matrix.dequantize()[rows])


@needs_library
@pytest.mark.parametrize("bits", [8, 4])
def test_extreme_numbers_do_not_overflow(kernel: str, bits: int) -> None:
    """Every weight and activation at its largest magnitude, in all combinations of signs, and the byte -128."""
    weight = torch.ones((16, 64))
    weight[8:] = -1
    weight[::2, 1::2] *= -1
    piece = packed.pack(weight, bits)
    if bits == 8:
        numbers = piece.values.view(torch.int8)
        numbers[numbers == -127] = -128  # only files from elsewhere have it
    matrix = PackedMatrix(64, {0: piece})
    x = torch.stack([torch.full((64,), 3e4), torch.full((64,), -3e4), weight[0] * 3e4, torch.full((64,), 1e-42)])
    expected = oracle(x.numpy(), matrix.dequantize().numpy())
    np.testing.assert_allclose(packed.linear(x, matrix).numpy()[:3], expected[:3], rtol=1e-5, atol=1)
    assert np.isfinite(packed.linear(x, matrix).numpy()).all()


@needs_library
@pytest.mark.parametrize("bits", [8, 4])
def test_threads_do_not_change_a_bit(kernel: str, bits: int) -> None:
    assert library is not None
    _, matrix = make(1000, 256, bits)
    x = torch.randn((33, 256), generator=torch.Generator().manual_seed(1))
    results = []
    for threads in (1, 2, 5):
        assert library.lakh_engine_set_threads(threads) == threads
        results += [packed.linear(x, matrix), packed.linear(x[:1], matrix)]
    for same in (results[0::2], results[1::2]):
        assert all(torch.equal(same[0], other) for other in same[1:])


@needs_library
@pytest.mark.timeout(60)
def test_callers_on_several_threads_take_turns() -> None:
    assert library is not None
    library.lakh_engine_set_threads(2)
    _, matrix = make(256, 128, 8)
    inputs = [torch.randn((n + 1, 128), generator=torch.Generator().manual_seed(n)) for n in range(4)]
    expected = [packed.linear(x, matrix) for x in inputs]
    wrong: list[int] = []

    def multiply(number: int) -> None:
        for _ in range(200):
            if not torch.equal(packed.linear(inputs[number], matrix), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=multiply, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=50)
    library.lakh_engine_set_threads(1)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(("bits", "largest_error"), [(8, 0.5 / 127), (4, 0.5 / 15)])
def test_quantized_numbers_are_near_the_originals(bits: int, largest_error: float) -> None:
    weight, matrix = make(24, 320, bits)
    grouped, back = (numbers.unflatten(1, (-1, 32)) for numbers in (weight, matrix.dequantize()))
    span = grouped.abs().amax(-1) if bits == 8 else grouped.amax(-1) - grouped.amin(-1)
    assert ((grouped - back).abs().amax(-1) <= span * (largest_error + 1e-3)).all(), "1e-3 is float16's rounding"


def test_eight_bits_are_the_numbers_of_gguf() -> None:
    gguf = pytest.importorskip("gguf", reason="pip install gguf")
    weight, matrix = make(16, 64, 8)
    theirs = gguf.quants.dequantize(
        gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0
    )
    np.testing.assert_allclose(matrix.dequantize().numpy(), theirs, atol=1e-6)


@needs_library
def test_unknown_formats_are_refused() -> None:
    assert library is not None
    assert library.lakh_engine_select(b"abacus") == -1
    for bits, columns in ((3, 32), (8, 33), (4, 32)):  # 4 bits have minimums
        table = np.array([[bits, 0, 0, 0, 8]], np.int64)
        assert library.lakh_engine_matmul(table.ctypes.data, 1, columns, 0, 1, 0) == -1


def test_a_library_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LAKH_ENGINE_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(UserError, match="LAKH_ENGINE_LIBRARY"):
        native.open_library.__wrapped__()


def test_a_damaged_library_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"not a library")
    monkeypatch.setenv("LAKH_ENGINE_LIBRARY", str(damaged))
    with pytest.raises(UserError, match=r"cannot be loaded.*install lakh again"):
        native.open_library.__wrapped__()


@needs_library
@pytest.mark.slow
def test_a_process_ends_while_workers_sleep() -> None:
    code = "from lakh.server.model.cpu import packed; packed.use_threads(4)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=dict(os.environ))


@needs_library
def test_a_variable_chooses_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
from lakh.server.model.cpu import native
print(native.open_library().lakh_engine_selected().decode())
"""
    for kernels in KERNELS:
        environment = {**os.environ, native.KERNELS_VARIABLE: kernels}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, check=True, timeout=60, env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == kernels
    native.open_library.cache_clear()
    monkeypatch.setenv(native.KERNELS_VARIABLE, "avx9000")
    with pytest.raises(UserError, match=r"avx9000: this CPU has no such kernels; choose .*portable"):
        native.open_library()


def test_placed_weights_are_copies_that_do_not_overlap() -> None:
    parts = [torch.randint(0, 255, (3, size), dtype=torch.uint8) for size in (1, 63, 64, 1000)]
    halves = torch.randn(7, 5).half()
    placed = [large_pages.place(part) for part in (*parts, halves)]
    large_pages.place(torch.zeros(5000))
    for part, copied in zip((*parts, halves), placed, strict=True):
        assert torch.equal(part, copied)
        assert copied.shape == part.shape
    assert large_pages.place(torch.empty(0)).nbytes == 0
    big = torch.arange(large_pages.MAPPING_BYTES // 8 + 1)
    assert torch.equal(large_pages.place(big), big)  # more than a mapping holds
