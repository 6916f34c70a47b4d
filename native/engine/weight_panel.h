// Panels of 32 rows for products with many tokens on AVX-512. A thread unpacks the rows once, to bytes in the order of
// the instruction and float32 scales, and multiplies them with all tokens.
#pragma once

#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

namespace lakh {
namespace {

constexpr int64_t kHalfRows = 16;
constexpr int64_t kPanelGroupBytes = kPanelRows * kGroup;

struct Panel {
  uint8_t* values;  // groups x 8 quads x 32 rows x 4 columns
  float* scales;    // groups x 32 rows
  float* minimums;  // the same; not set where the format has none
};

// The memory of one thread. Without containers: their code would be shared with files for other CPUs. Products take the
// pointers: the address of the memory itself is asked for with a call, which saves all registers.
class PanelMemory {
 public:
  ~PanelMemory() { free(memory_); }

  Panel panel(int64_t groups) {
    if (groups > groups_) {
      free(memory_);
      const int64_t bytes = groups * (kPanelGroupBytes + 2 * kPanelRows * int64_t(sizeof(float)));
      if (posix_memalign(&memory_, 64, bytes) != 0) abort();
      groups_ = groups;
    }
    uint8_t* const values = static_cast<uint8_t*>(memory_);
    float* const scales = reinterpret_cast<float*>(values + groups * kPanelGroupBytes);
    return {values, scales, scales + groups * kPanelRows};
  }

 private:
  void* memory_ = nullptr;
  int64_t groups_ = 0;
};

// 8 float16 numbers; zeros where the matrix has no such block.
inline void unpack_halves(const uint16_t* from, float* to) {
  const __m256 found =
      from == nullptr ? _mm256_setzero_ps() : _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  _mm256_storeu_ps(to, found);
}

// The row blocks from `block` on; those from `last` on are zeros. kFlipped: the bits of an 8-bit weight that are flipped;
// 0x80 adds 128 to the number, for instructions whose bytes have no sign.
template <int kBits, bool kHasMinimum, uint8_t kFlipped>
void unpack(const StoredMatrix& w, int64_t block, int64_t last, Panel panel) {
  const int64_t group_bytes = 32 * kBits;
  for (int64_t own = 0; own < kPanelBlocks; ++own) {
    const bool is_there = block + own < last;
    const uint8_t* values = w.values + (block + own) * w.groups * group_bytes;
    const int64_t offset = (block + own) * w.groups * kBlockRows;
    for (int64_t g = 0; g < w.groups; ++g, values += group_bytes) {
      const int64_t to = g * kPanelRows + own * kBlockRows, from = offset + g * kBlockRows;
      unpack_halves(is_there ? w.scales + from : nullptr, panel.scales + to);
      if (kHasMinimum) unpack_halves(is_there ? w.minimums + from : nullptr, panel.minimums + to);
      uint8_t* const quads = panel.values + g * kPanelGroupBytes + own * kBlockRows * 4;
      const auto store = [&](int quad, __m256i bytes) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(quads + quad * kPanelRows * 4), bytes);
      };
      for (int quad = 0; quad < kBits; ++quad) {
        __m256i stored = _mm256_setzero_si256();
        if (is_there) stored = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + 32 * quad));
        if (kBits == 8) {
          store(quad, _mm256_xor_si256(stored, _mm256_set1_epi8(char(kFlipped))));
        } else {
          const __m256i mask = _mm256_set1_epi8(15);
          store(quad, _mm256_and_si256(stored, mask));
          store(quad + 4, _mm256_and_si256(_mm256_srli_epi16(stored, 4), mask));
        }
      }
    }
  }
}

// Writes the sums of the 32 rows from `block` on for one token; the last panel may have fewer rows.
inline __attribute__((always_inline)) void store_panel_rows(__m512 first, __m512 second, int64_t block, const StoredMatrix& w,
                                                            int64_t token, float* y) {
  const __m512 halves[] = {first, second};
  float* const to = y + token * w.stride + w.first_row + block * kBlockRows;
  for (int half = 0; half < 2; ++half) {
    const int64_t left = w.rows - block * kBlockRows - half * kHalfRows;
    if (left >= kHalfRows) {
      _mm512_storeu_ps(to + half * kHalfRows, halves[half]);
    } else if (left > 0) {
      float rows[kHalfRows];
      _mm512_storeu_ps(rows, halves[half]);
      memcpy(to + half * kHalfRows, rows, left * sizeof(float));
    }
  }
}

// The matrix without the rows behind block `last`: a part of the rows ends there.
inline StoredMatrix rows_until(const StoredMatrix& w, int64_t last) {
  StoredMatrix own = w;
  if (last * kBlockRows < own.rows) own.rows = last * kBlockRows;
  return own;
}

}  // namespace
}  // namespace lakh
