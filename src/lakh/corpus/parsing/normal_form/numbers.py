"""Write numbers by their value, so that two ways to write one give the same bytes. Kernels of writer.py.

Each writes to `out` from `size` on and returns the new size; none writes more than three bytes per byte of text, and
three more.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lakh.compiled import compiled

__all__ = ["hex_digit", "write_lower", "write_python_number"]

LARGE, LARGE_FROM = 5, 5 * 10**17  # larger integers are written as their remainder, after this byte
PRIME = 576460752303423433  # 2^59 - 55: a remainder times 16 fits in 63 bits
SIGNIFICANT = 15  # digits that all ways to write a 64-bit float agree on


@compiled
def write_lower(data: Any, begin: int, end: int, out: Any, size: int) -> int:
    for i in range(begin, end):
        c = data[i]
        out[size] = c | 32 if 65 <= c <= 90 else c
        size += 1
    return size


@compiled
def hex_digit(c: int) -> int:
    if 48 <= c <= 57:
        return int(c) - 48
    if 97 <= (c | 32) <= 102:
        return int(c | 32) - 87
    return -1


@compiled
def write_python_number(data: Any, begin: int, end: int, out: Any, size: int) -> int:
    """An integer in decimal digits; a float as f, its significant digits, e and its exponent."""
    base = 10
    i = begin
    if end - begin > 2 and data[begin] == 48:
        mark = data[begin + 1] | 32
        if mark == 120 or mark == 111 or mark == 98:
            base = 16 if mark == 120 else (8 if mark == 111 else 2)
            i += 2
    is_float = False
    if base == 10:
        for j in range(begin, end):
            c = data[j] | 32
            is_float = is_float or data[j] == 46 or c == 101 or c == 106
    if is_float:
        return _write_float(data, begin, end, out, size)
    value = np.int64(0)
    is_large = False
    while i < end:
        digit = hex_digit(data[i])
        if 0 <= digit < base:
            value = value * base + digit
            if value >= LARGE_FROM or is_large:
                is_large = True
                value = value % PRIME
        elif data[i] != 95:  # a suffix, as in Cython or Python 2
            break
        i += 1
    if is_large:
        out[size] = LARGE
        for k in range(8):
            out[size + 1 + k] = (value >> (8 * k)) & 255
        size += 9
    else:
        size = _write_int(value, out, size)
    return write_lower(data, i, end, out, size)


@compiled
def _write_int(value: Any, out: Any, size: int) -> int:
    if value < 0:
        out[size] = 45
        size += 1
        value = -value
    start = size
    while True:
        out[size] = 48 + value % 10
        size += 1
        value //= 10
        if value == 0:
            break
    for k in range((size - start) // 2):
        out[start + k], out[size - 1 - k] = out[size - 1 - k], out[start + k]
    return size


@compiled
def _write_float(data: Any, begin: int, end: int, out: Any, size: int) -> int:
    out[size] = 102
    size += 1
    start = size
    exponent = np.int64(0)
    significant = 0
    fraction = False
    i = begin
    while i < end:
        c = data[i]
        if c == 46:
            fraction = True
        elif 48 <= c <= 57:
            if significant > 0 or c != 48:
                significant += 1
                if significant <= SIGNIFICANT:
                    out[size] = c
                    size += 1
                else:
                    exponent += 1
            exponent -= fraction
        elif c != 95:
            break
        i += 1
    while size > start and out[size - 1] == 48:
        size -= 1
        exponent += 1
    if i < end and data[i] | 32 == 101:
        i += 1
        sign = 1
        if i < end and (data[i] == 43 or data[i] == 45):
            sign = -1 if data[i] == 45 else 1
            i += 1
        power = 0
        while i < end and (48 <= data[i] <= 57 or data[i] == 95):
            if data[i] != 95 and power < 10**6:
                power = power * 10 + int(data[i]) - 48
            i += 1
        exponent += sign * power
    if size > start:
        out[size] = 101
        size = _write_int(exponent, out, size + 1)
    return write_lower(data, i, end, out, size)
