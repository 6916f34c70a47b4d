// The products of a range of row blocks with a range of tokens, one implementation for each instruction set.
#pragma once

#include <stdint.h>
#include <string.h>

#include "vector_kernels.h"

namespace lakh {

constexpr int64_t kBlockRows = 8;  // rows that are stored together
constexpr int64_t kPanelBlocks = 4, kPanelRows = kPanelBlocks * kBlockRows;  // of float32: 32 rows
constexpr int64_t kTileTokens = 16;  // tokens whose rounded numbers stay in the first-level cache

struct StoredMatrix {
  const uint8_t* values;
  const uint16_t* scales;    // float16; null: float32
  const uint16_t* minimums;  // float16; null: none
  int64_t rows, columns, groups;
  int64_t first_row, stride;  // the place of its first row in y, and the rows of y
};

// Tokens, and the same rounded to 8 bits in groups of 32.
struct Activations {
  const float* numbers;  // token after token
  const int8_t* values;  // token after token
  const float* scales;   // one for each group
  const float* sums;     // of the numbers of each group: scale times the sum of the rounded ones
  const int32_t* offsets;  // -128 times the sum of the rounded ones: cancels a weight's 128 where kernels need bytes above 0
};

struct Range {
  int64_t first, last;
};

using Product = void (*)(const StoredMatrix&, Range blocks, const Activations&, int64_t num_tokens, float* y);

struct Kernels {
  const char* name;
  Product bits_8, bits_8_minimum, bits_4, bits_32;
  const VectorKernels* vectors;
};

// Null where the instruction set was not compiled or this CPU does not have it.
const Kernels* portable_kernels();
const Kernels* dotprod_kernels();
const Kernels* avx2_kernels();
const Kernels* avx_vnni_kernels();
const Kernels* vnni_kernels();
const Kernels* amx_kernels();

static inline float from_half(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 1023;
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24
    const float small = float(fraction) * 5.9604644775390625e-8f;
    return sign ? -small : small;
  }
  const uint32_t bits = sign | (exponent == 31 ? 255u << 23 : (exponent + 112) << 23) | (fraction << 13);
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Copies the results of a row block: the last one may have fewer rows.
static inline void store_rows(const float* sums, int64_t block, const StoredMatrix& w, int64_t token, float* y) {
  const int64_t first = block * kBlockRows;
  const int64_t count = w.rows - first < kBlockRows ? w.rows - first : kBlockRows;
  float* const to = y + token * w.stride + w.first_row + first;
  for (int64_t r = 0; r < count; ++r) to[r] = sums[r];
}

constexpr int64_t kBytesAhead = 4096;

// A few tokens read their weights from memory: asks for those that follow, further ahead than x86 CPUs do themselves. A
// step of a 135M model takes 0.90x of its time without in 8 bits and 0.84x in 4, and 0.85x and 0.80x with two tokens
// (Xeon of 2.5 GHz, one thread, CPU time).
template <int64_t kBytes>
static inline __attribute__((always_inline)) void prefetch(const uint8_t* values) {
  for (int64_t at = kBytesAhead; at < kBytesAhead + kBytes; at += 64) __builtin_prefetch(values + at);
}

// Calls Block::run for 4 tokens at a time, and for the 1 to 3 that remain. Block is a type of an unnamed namespace, so
// that every instruction set gets its own copy of this function.
template <class Block>
void for_tile(const StoredMatrix& w, Range blocks, const Activations& x, Range tokens, float* y) {
  for (int64_t block = blocks.first; block < blocks.last; ++block) {
    int64_t n = tokens.first;
    for (; n + 4 <= tokens.last; n += 4) Block::template run<4>(w, block, x, n, y);
    switch (tokens.last - n) {
      case 3: Block::template run<3>(w, block, x, n, y); break;
      case 2: Block::template run<2>(w, block, x, n, y); break;
      case 1: Block::template run<1>(w, block, x, n, y); break;
      default: break;
    }
  }
}

template <class Block>
void for_tokens(const StoredMatrix& w, Range blocks, const Activations& x, int64_t num_tokens, float* y) {
  for (int64_t n = 0; n < num_tokens; n += kTileTokens) {
    for_tile<Block>(w, blocks, x, {n, n + kTileTokens < num_tokens ? n + kTileTokens : num_tokens}, y);
  }
}

}  // namespace lakh
