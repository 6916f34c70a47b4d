"""Micro-batches whose products fill whole waves of a GPU's multiprocessors."""

import pytest
from bench.train.steps import SHAPES
from hypothesis import given
from hypothesis import strategies as st

from lakh.trainer.waves import fullest, fullness, wave_share

H200 = 132


@given(rows=st.integers(1, 1 << 18), columns=st.integers(1, 1 << 15), processors=st.integers(1, 200))
def test_no_wave_is_more_than_full(rows: int, columns: int, processors: int) -> None:
    assert 0 < wave_share(rows, columns, processors) <= 1


def test_a_wave_with_a_tile_for_everyone_is_full() -> None:
    assert wave_share(132 * 256, 128, H200) == 1
    assert wave_share(132 * 256 + 1, 128, H200) < 0.6  # one more row needs another wave


def test_17_sequences_of_4k_fill_what_8_and_16_leave_idle() -> None:
    model = SHAPES["1.2b-4k"].model
    shares = {size: fullness(model, size * 4096, H200) for size in (8, 16, 17)}
    assert shares[17] > 0.995
    assert max(shares[8], shares[16]) < 0.985


@pytest.mark.parametrize(("name", "most"), [("1.2b-4k", 20), ("162m-2k", 68)])
def test_the_bench_takes_the_fullest_that_fits_into_an_h200(name: str, most: int) -> None:
    shape = SHAPES[name]
    assert fullest(shape.model, shape.sequence, range(most // 2, most + 1), H200) == shape.micro_batch
