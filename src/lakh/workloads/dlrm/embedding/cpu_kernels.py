"""Lookups and updates of one embedding table on a CPU, compiled by numba.

An update sorts the lookups by row (a stable radix sort), adds the gradients of equal rows in the order of the samples,
and changes each row once. The order of additions depends on the batch alone, never on threads, so the result has the
same bits on any number of them. No gradient of the size of the lookups or of the table is written to memory.

Cost: `lookup` reads each looked-up row once. An update reads the gradient of its bag once per lookup, and reads and
writes each touched row and its state once; the sort makes one pass over the lookups for each 11 bits of the row number.

Indices are unsigned where numba would otherwise test for negative ones, which keeps a loop from being vectorized.

Legend: N lookups of the table, R rows, W values of a row in S blocks of K with one state each, B samples, C columns of
all tables together.
"""

from __future__ import annotations

import numpy as np

from lakh.compiled import compiled
from lakh.workloads.dlrm.embedding.prefetch import prefetch_row

__all__ = ["VECTOR", "adagrad", "adam", "fill_uniform", "gradient_square", "lookup", "sgd", "sort_lookups"]

VECTOR = 4
"""Widths and columns are multiples of it."""
RADIX_BITS = 11
ROW_SHIFT = np.uint64(32)
GRADIENT_MASK = np.uint64((1 << 32) - 1)
LARGEST_SQUARE = 2.0**42
REST_UNITS = np.int64(1 << 62)
AHEAD = 8  # lookups between the prefetch of a row and its use


@compiled
def lookup(weights_RW, ids_N, offsets, batch, out_BC, column):
    """Write the sum of each bag into its columns of `out_BC`. Returns the first bag with an id out of range, or -1."""
    rows, width = weights_RW.shape
    for bag in range(len(offsets) - 1):
        first = column + bag // batch * width
        start, end = offsets[bag], offsets[bag + 1]
        for position in range(start, end):
            if ids_N[position] < 0 or ids_N[position] >= rows:
                return bag
        out_W = out_BC[bag % batch, first : first + width]
        out_W[:] = 0
        for position in range(start, end):
            if position + AHEAD < len(ids_N):
                prefetch_row(weights_RW, ids_N[position + AHEAD], width)
            row_W = weights_RW[ids_N[position]]
            for w in range(width):
                out_W[w] += row_W[w]
    return -1


@compiled
def sort_lookups(ids_N, offsets, shape_RW, batch, columns, column):
    """The lookups sorted by row, as keys: the row, and in the low 32 bits where the gradient of its bag starts.

    That is the number of vectors of four values before it in the gradient, batch x columns. Lookups of one row stay in
    the order of the samples.
    """
    rows, width = shape_RW
    keys, other = np.empty(len(ids_N), np.uint64), np.empty(len(ids_N), np.uint64)
    for bag in range(len(offsets) - 1):
        gradient = np.uint64((bag % batch * columns + column + bag // batch * width) // VECTOR)
        for position in range(offsets[bag], offsets[bag + 1]):
            keys[position] = (np.uint64(ids_N[position]) << ROW_SHIFT) | gradient
    counts = np.empty(1 << RADIX_BITS, np.int64)
    digit_mask = np.uint64((1 << RADIX_BITS) - 1)
    sorted_bits = 0
    while (rows - 1) >> sorted_bits:
        shift = ROW_SHIFT + np.uint64(sorted_bits)
        counts[:] = 0
        for i in range(len(keys)):
            counts[(keys[i] >> shift) & digit_mask] += 1
        total = 0
        for digit in range(len(counts)):
            count = counts[digit]
            counts[digit] = total
            total += count
        for i in range(len(keys)):
            digit = (keys[i] >> shift) & digit_mask
            other[counts[digit]] = keys[i]
            counts[digit] += 1
        keys, other = other, keys
        sorted_bits += RADIX_BITS
    return keys


@compiled
def _add_gradients(weights_RW, keys_N, start, gradient, sum_W):
    """Add the gradients of the row at `start` into `sum_W`; returns where the next row starts."""
    width, row = len(sum_W), keys_N[start] >> ROW_SHIFT
    first = np.int64(keys_N[start] & GRADIENT_MASK) * VECTOR
    gradient_W = gradient[first : first + width]
    for w in range(width):
        sum_W[w] = gradient_W[w]
    end = start + 1
    while end < len(keys_N) and keys_N[end] >> ROW_SHIFT == row:
        first = np.int64(keys_N[end] & GRADIENT_MASK) * VECTOR
        gradient_W = gradient[first : first + width]
        for w in range(width):
            sum_W[w] += gradient_W[w]
        end += 1
    if end + AHEAD < len(keys_N):
        prefetch_row(weights_RW, keys_N[end + AHEAD] >> ROW_SHIFT, width)
    return end


@compiled
def gradient_square(weights_RW, keys_N, gradient):
    """The sum of squares of the gradients of all rows, those of equal rows added. In fixed point, so that it does not
    depend on the order of the rows, unless it is larger than LARGEST_SQUARE or not finite."""
    sum_W = np.empty(weights_RW.shape[1], np.float32)
    whole, rest = np.int64(0), np.int64(0)  # in units of 2**-20 and 2**-82
    total, start = 0.0, 0
    while start < len(keys_N):
        start = _add_gradients(weights_RW, keys_N, start, gradient, sum_W)
        square = 0.0
        for w in range(len(sum_W)):
            square += np.float64(sum_W[w]) * np.float64(sum_W[w])
        total += square
        if total < LARGEST_SQUARE:
            scaled = square * 2.0**20
            floor = np.int64(scaled)
            whole += floor
            rest += np.int64((scaled - floor) * 2.0**62)
            if rest >= REST_UNITS:
                rest -= REST_UNITS
                whole += np.int64(1)
    return whole * 2.0**-20 + rest * 2.0**-82 if total < LARGEST_SQUARE else total


@compiled
def _mean_square(sum_W):
    """In four partial sums with a fixed order, so that every CPU gets the same bits."""
    a = b = c = d = np.float32(0)
    one, two, three, four = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
    for vector in range(len(sum_W) // VECTOR):
        w = np.uint64(vector) * four
        a += sum_W[w] * sum_W[w]
        b += sum_W[w + one] * sum_W[w + one]
        c += sum_W[w + two] * sum_W[w + two]
        d += sum_W[w + three] * sum_W[w + three]
    return ((a + b) + (c + d)) / np.float32(len(sum_W))


@compiled
def sgd(weights_RW, keys_N, gradient, lr):
    """row -= lr * gradient"""
    sum_W = np.empty(weights_RW.shape[1], np.float32)
    rate, start = np.float32(lr), 0
    while start < len(keys_N):
        row_W = weights_RW[keys_N[start] >> ROW_SHIFT]
        start = _add_gradients(weights_RW, keys_N, start, gradient, sum_W)
        for w in range(len(sum_W)):
            row_W[w] -= rate * sum_W[w]


@compiled
def adagrad(weights_RW, square_RS, keys_N, gradient, lr, eps):
    """square += mean(gradient ** 2); row -= lr / (sqrt(square) + eps) * gradient, for each block of a row"""
    sum_W = np.empty(weights_RW.shape[1], np.float32)
    block = weights_RW.shape[1] // square_RS.shape[1]
    start = 0
    while start < len(keys_N):
        row = keys_N[start] >> ROW_SHIFT
        row_W, square_S = weights_RW[row], square_RS[row]
        start = _add_gradients(weights_RW, keys_N, start, gradient, sum_W)
        for s in range(len(square_S)):
            sum_K, row_K = sum_W[s * block : (s + 1) * block], row_W[s * block : (s + 1) * block]
            square_S[s] += _mean_square(sum_K)
            rate = np.float32(lr / (np.sqrt(square_S[s]) + eps))
            for k in range(len(sum_K)):
                row_K[k] -= rate * sum_K[k]


@compiled
def adam(weights_RW, mean_RW, square_RS, keys_N, gradient, lr, eps, beta1, beta2, step):
    """Adam with one second moment per block of a row; rows that a step does not look up keep their weights and moments.

    mean = beta1 * mean + (1 - beta1) * gradient; square = beta2 * square + (1 - beta2) * mean(gradient ** 2);
    row -= lr * (mean / (1 - beta1 ** step)) / (sqrt(square / (1 - beta2 ** step)) + eps)
    """
    sum_W = np.empty(weights_RW.shape[1], np.float32)
    old1, new1, old2, new2 = np.float32(beta1), np.float32(1 - beta1), np.float32(beta2), np.float32(1 - beta2)
    correction1, correction2 = 1 - beta1**step, np.sqrt(1 - beta2**step)
    block = weights_RW.shape[1] // square_RS.shape[1]
    start = 0
    while start < len(keys_N):
        row = keys_N[start] >> ROW_SHIFT
        row_W, mean_W, square_S = weights_RW[row], mean_RW[row], square_RS[row]
        start = _add_gradients(weights_RW, keys_N, start, gradient, sum_W)
        for s in range(len(square_S)):
            sum_K, row_K = sum_W[s * block : (s + 1) * block], row_W[s * block : (s + 1) * block]
            mean_K = mean_W[s * block : (s + 1) * block]
            square_S[s] = old2 * square_S[s] + new2 * _mean_square(sum_K)
            rate = np.float32(lr / correction1 / (np.sqrt(square_S[s]) / correction2 + eps))
            for k in range(len(sum_K)):
                mean_K[k] = old1 * mean_K[k] + new1 * sum_K[k]
                row_K[k] -= rate * mean_K[k]


@compiled
def fill_uniform(weights_RW, key, first_row, first_column, table_width, bound):
    """Random values in [-bound, bound) that depend on key, row and column alone, so that a shard has the table's own.

    The generator is SplitMix64 (Steele, Lea and Flood 2014) at the counter `row * table_width + column`.
    """
    for r in range(weights_RW.shape[0]):
        for w in range(weights_RW.shape[1]):
            counter = np.uint64((first_row + r) * table_width + first_column + w + 1)
            z = np.uint64(key) + counter * np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z = z ^ (z >> np.uint64(31))
            unit = np.float64(z >> np.uint64(11)) / 9007199254740992.0  # 2**53
            weights_RW[r, w] = np.float32((2 * unit - 1) * bound)
