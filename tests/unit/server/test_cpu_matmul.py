"""Every number of tokens has its own loop, and all compute the same product."""

import numpy as np
import pytest

from lakh.server.model.cpu.matmul import matmul_f32


@pytest.mark.parametrize("num", range(1, 18))
def test_matmul_equals_numpy_for_any_number_of_tokens(num: int) -> None:
    rng = np.random.default_rng(num)
    w = rng.standard_normal((5, 37), dtype=np.float32)
    x = rng.standard_normal((num + 2, 37), dtype=np.float32)
    y = np.full((num + 2, 5), 7, dtype=np.float32)
    matmul_f32(w, x, y, num)
    np.testing.assert_allclose(y[:num], x[:num] @ w.T, rtol=1e-4, atol=1e-4)
    assert (y[num:] == 7).all(), "beyond them nothing is written"
