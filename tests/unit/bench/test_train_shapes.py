"""Micro-batches of the training benchmark fill whole waves of a GPU's multiprocessors."""

import pytest
from bench.train.shapes import SHAPES

from lakh.spec.gemm_waves import block_efficiency, fullest_micro_batch

H200 = 132


def test_17_sequences_of_4k_fill_what_8_and_16_leave_idle() -> None:
    model = SHAPES["1.2b-4k"].model
    shares = {size: block_efficiency(model, size * 4096, H200) for size in (8, 16, 17)}
    assert shares[17] > 0.995
    assert max(shares[8], shares[16]) < 0.985


@pytest.mark.parametrize(("name", "most"), [("1.2b-4k", 20), ("162m-2k", 68)])
def test_the_bench_takes_the_fullest_that_fits_into_an_h200(name: str, most: int) -> None:
    shape = SHAPES[name]
    sizes = range(most // 2, most + 1)
    assert fullest_micro_batch(shape.model, shape.sequence, sizes, H200) == shape.micro_batch
