// Products with float32 weights, for the vectors of the including file's instruction set. A panel of 32 rows has its
// numbers column by column, so that the sum of a row is one chain of additions in the order of the columns: a token has
// the same bits alone, where a product reads each panel from memory once, and in a tile of tokens that share its loads.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace lakh {
namespace {

constexpr int kRowVectors = int(kPanelRows) / kFloats;  // of a column of a panel
constexpr int kTogether = kFloats == 16 ? 12 : 3;  // tokens whose sums stay in registers: 24 of 32 (AVX2: 12 of 16)
constexpr int kFewTokens = 4;  // whose weights come from memory
constexpr int64_t kChunkColumns = 256;  // whose part of a panel stays in the first-level cache; a sum of sums rounds less

// The part of a panel that one call multiplies: `columns` of its columns, and `rows` of its rows in y.
struct PanelChunk {
  const float* weights;
  int64_t columns, rows;
  bool is_first;
};

// y = (or, after the first chunk, +=) the products of T tokens with a chunk.
template <int T>
__attribute__((noinline)) void multiply_tokens(const PanelChunk& chunk, const float* x, int64_t x_stride, float* y,
                                               int64_t y_stride) {
  Floats sums[T][kRowVectors];
#pragma GCC unroll 12
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 8
    for (int i = 0; i < kRowVectors; ++i) sums[t][i] = Floats{};
  }
  const float* weights = chunk.weights;
  for (int64_t j = 0; j < chunk.columns; ++j, weights += kPanelRows) {
    if (T <= kFewTokens) lakh::prefetch<kPanelRows * sizeof(float)>(reinterpret_cast<const uint8_t*>(weights));
    Floats column[kRowVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kRowVectors; ++i) column[i] = load(weights + kFloats * i);
#pragma GCC unroll 12
    for (int t = 0; t < T; ++t) {
      const float number = x[t * x_stride + j];
#pragma GCC unroll 8
      for (int i = 0; i < kRowVectors; ++i) sums[t][i] += number * column[i];
    }
  }
#pragma GCC unroll 12
  for (int t = 0; t < T; ++t) {
    float* const to = y + t * y_stride;
    if (chunk.rows < kPanelRows) {
      float rows[kPanelRows];
      memcpy(rows, sums[t], sizeof rows);
      for (int64_t r = 0; r < chunk.rows; ++r) to[r] = chunk.is_first ? rows[r] : to[r] + rows[r];
      continue;
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRowVectors; ++i) {
      const Floats total = chunk.is_first ? sums[t][i] : load(to + kFloats * i) + sums[t][i];
      memcpy(to + kFloats * i, &total, sizeof total);
    }
  }
}

// The same for `count` tokens, at most T.
template <int T>
void multiply_rest(int64_t count, const PanelChunk& chunk, const float* x, int64_t x_stride, float* y, int64_t y_stride) {
  if (count == T) return multiply_tokens<T>(chunk, x, x_stride, y, y_stride);
  if constexpr (T > 1) multiply_rest<T - 1>(count, chunk, x, x_stride, y, y_stride);
}

void multiply_floats(const StoredMatrix& w, Range blocks, const Activations& x, int64_t num_tokens, float* y) {
  const auto* const all = reinterpret_cast<const float*>(w.values);
  for (int64_t block = blocks.first; block < blocks.last; block += kPanelBlocks) {
    const int64_t first_row = block * kBlockRows, rows = w.rows - first_row < kPanelRows ? w.rows - first_row : kPanelRows;
    for (int64_t j = 0; j < w.columns; j += kChunkColumns) {
      const int64_t columns = w.columns - j < kChunkColumns ? w.columns - j : kChunkColumns;
      const PanelChunk chunk = {all + first_row * w.columns + j * kPanelRows, columns, rows, j == 0};
      for (int64_t n = 0; n < num_tokens; n += kTogether) {
        const int64_t count = num_tokens - n < kTogether ? num_tokens - n : kTogether;
        float* const to = y + n * w.stride + w.first_row + first_row;
        multiply_rest<kTogether>(count, chunk, x.numbers + n * w.columns + j, w.columns, to, w.stride);
      }
    }
  }
}

}  // namespace
}  // namespace lakh
