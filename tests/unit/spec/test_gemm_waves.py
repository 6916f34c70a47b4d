"""Wave quantisation of matrix products on a GPU's multiprocessors."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lakh.spec import Model
from lakh.spec.gemm_waves import block_efficiency, fullest_micro_batch, num_waves, wave_efficiency

H200 = 132
MODEL = Model(layers=24, width=2048, heads=16, kv_heads=8, ffn=5632, vocab=32768, context=4096)


@given(rows=st.integers(1, 1 << 18), columns=st.integers(1, 1 << 15), processors=st.integers(1, 200))
def test_no_wave_is_more_than_full(rows: int, columns: int, processors: int) -> None:
    assert 0 < wave_efficiency(rows, columns, processors) <= 1


def test_a_wave_with_a_tile_for_every_processor_is_full() -> None:
    assert wave_efficiency(132 * 256, 128, H200) == 1
    assert wave_efficiency(132 * 256 + 1, 128, H200) < 0.6  # one more row needs another wave


def test_17_sequences_of_4k_fill_waves_that_8_and_16_leave_idle() -> None:
    shares = {size: block_efficiency(MODEL, size * 4096, H200) for size in (8, 16, 17)}
    assert max(shares, key=shares.__getitem__) == 17
    assert fullest_micro_batch(MODEL, 4096, (8, 16, 17), H200) == 17


def test_waves_of_arrays_are_those_of_each_element() -> None:
    rows = np.array([100, 4096, 65537])
    expected = [num_waves(int(row), 2048, (128, 128), H200) for row in rows]
    assert num_waves(rows, 2048, (128, 128), H200, np.ceil).tolist() == expected
