"""Matrix products with a few tokens on one CPU core, each in one pass over the matrix; compiled by numba.

Memory bandwidth limits a matrix that does not fit the cache; a second pass over one of its rows, though cached, is work
that no load hides. So every number of tokens up to eight (except seven) has its own loop: 3 tokens take 1.4 times as
long as one, 5 take 2.3 times (Neoverse-N1, 350 MB of weights; four and then one took 3.2 times).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

__all__ = ["compiled", "matmul_f32"]

compiled = numba.njit(fastmath=True, nogil=True, cache=True, error_model="numpy")


def _make_dot(num: int) -> Any:
    """A function (row, x, n, y, i) that sets y[n : n + num, i] = x[n : n + num] @ row.

    The source is generated, because the compiler keeps named sums in registers, but not an array of sums.
    """
    each = range(num)
    lines = [
        f"def dot_{num}(row, x, n, y, i):",
        *[f"    x{k}, sum{k} = x[n + {k}], f32(0)" for k in each],
        "    for j in range(row.shape[0]):",
        "        weight = row[j]",
        *[f"        sum{k} += x{k}[j] * weight" for k in each],
        *[f"    y[n + {k}, i] = sum{k}" for k in each],
    ]
    namespace: dict[str, Any] = {"f32": np.float32}
    exec(compile("\n".join(lines), __file__, "exec"), namespace)  # this file's name: numba stores its cache beside it
    return compiled(namespace[f"dot_{num}"])


_dot_1, _dot_2, _dot_3, _dot_4, _dot_5, _dot_6, _dot_8 = map(_make_dot, (1, 2, 3, 4, 5, 6, 8))


@compiled
def matmul_f32(w: Any, x: Any, y: Any, num: int) -> None:
    """y[:num] = x[:num] @ w.T"""
    for i in range(w.shape[0]):
        row = w[i]
        n = 0
        while num - n >= 8:
            _dot_8(row, x, n, y, i)
            n += 8
        if num - n == 7:
            _dot_4(row, x, n, y, i)
            n += 4
        left = num - n
        if left == 6:
            _dot_6(row, x, n, y, i)
        elif left == 5:
            _dot_5(row, x, n, y, i)
        elif left == 4:
            _dot_4(row, x, n, y, i)
        elif left == 3:
            _dot_3(row, x, n, y, i)
        elif left == 2:
            _dot_2(row, x, n, y, i)
        elif left == 1:
            _dot_1(row, x, n, y, i)
