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
f32 = np.float32


@compiled
def matmul_f32(w: Any, x: Any, y: Any, num: int) -> None:
    """y[:num] = x[:num] @ w.T"""
    for i in range(w.shape[0]):
        row = w[i]
        n = 0
        while num - n >= 8:
            a, b, c, d, e, f, g, h = _dot_8(row, x, n)
            y[n, i], y[n + 1, i], y[n + 2, i], y[n + 3, i] = a, b, c, d
            y[n + 4, i], y[n + 5, i], y[n + 6, i], y[n + 7, i] = e, f, g, h
            n += 8
        left = num - n
        if left == 6:
            a, b, c, d, e, f = _dot_6(row, x, n)
            y[n, i], y[n + 1, i], y[n + 2, i], y[n + 3, i], y[n + 4, i], y[n + 5, i] = a, b, c, d, e, f
        elif left == 5:
            y[n, i], y[n + 1, i], y[n + 2, i], y[n + 3, i], y[n + 4, i] = _dot_5(row, x, n)
        elif left == 4:
            y[n, i], y[n + 1, i], y[n + 2, i], y[n + 3, i] = _dot_4(row, x, n)
        elif left == 3:
            y[n, i], y[n + 1, i], y[n + 2, i] = _dot_3(row, x, n)
        elif left == 2:
            y[n, i], y[n + 1, i] = _dot_2(row, x, n)
        elif left == 1:
            y[n, i] = _dot_1(row, x, n)
        elif left == 7:
            y[n, i], y[n + 1, i], y[n + 2, i], y[n + 3, i] = _dot_4(row, x, n)
            y[n + 4, i], y[n + 5, i], y[n + 6, i] = _dot_3(row, x, n + 4)


# The loops differ only in their number of sums: the compiler keeps named sums in registers, but not an array of sums.


@compiled
def _dot_1(row: Any, x: Any, n: int) -> Any:
    x0 = x[n]
    a = f32(0)
    for j in range(row.shape[0]):
        a += x0[j] * row[j]
    return a


@compiled
def _dot_2(row: Any, x: Any, n: int) -> Any:
    x0, x1 = x[n], x[n + 1]
    a = b = f32(0)
    for j in range(row.shape[0]):
        v = row[j]
        a += x0[j] * v
        b += x1[j] * v
    return a, b


@compiled
def _dot_3(row: Any, x: Any, n: int) -> Any:
    x0, x1, x2 = x[n], x[n + 1], x[n + 2]
    a = b = c = f32(0)
    for j in range(row.shape[0]):
        v = row[j]
        a += x0[j] * v
        b += x1[j] * v
        c += x2[j] * v
    return a, b, c


@compiled
def _dot_4(row: Any, x: Any, n: int) -> Any:
    x0, x1, x2, x3 = x[n], x[n + 1], x[n + 2], x[n + 3]
    a = b = c = d = f32(0)
    for j in range(row.shape[0]):
        v = row[j]
        a += x0[j] * v
        b += x1[j] * v
        c += x2[j] * v
        d += x3[j] * v
    return a, b, c, d


@compiled
def _dot_5(row: Any, x: Any, n: int) -> Any:
    x0, x1, x2, x3, x4 = x[n], x[n + 1], x[n + 2], x[n + 3], x[n + 4]
    a = b = c = d = e = f32(0)
    for j in range(row.shape[0]):
        v = row[j]
        a += x0[j] * v
        b += x1[j] * v
        c += x2[j] * v
        d += x3[j] * v
        e += x4[j] * v
    return a, b, c, d, e


@compiled
def _dot_6(row: Any, x: Any, n: int) -> Any:
    x0, x1, x2, x3, x4, x5 = x[n], x[n + 1], x[n + 2], x[n + 3], x[n + 4], x[n + 5]
    a = b = c = d = e = f = f32(0)
    for j in range(row.shape[0]):
        v = row[j]
        a += x0[j] * v
        b += x1[j] * v
        c += x2[j] * v
        d += x3[j] * v
        e += x4[j] * v
        f += x5[j] * v
    return a, b, c, d, e, f


@compiled
def _dot_8(row: Any, x: Any, n: int) -> Any:
    x0, x1, x2, x3, x4, x5, x6, x7 = x[n], x[n + 1], x[n + 2], x[n + 3], x[n + 4], x[n + 5], x[n + 6], x[n + 7]
    a = b = c = d = e = f = g = h = f32(0)
    for j in range(row.shape[0]):
        v = row[j]
        a += x0[j] * v
        b += x1[j] * v
        c += x2[j] * v
        d += x3[j] * v
        e += x4[j] * v
        f += x5[j] * v
        g += x6[j] * v
        h += x7[j] * v
    return a, b, c, d, e, f, g, h
