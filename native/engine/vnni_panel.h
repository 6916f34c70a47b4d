// Panels of 32 rows for products with many tokens on AVX-512 VNNI. A thread unpacks the rows once, to unsigned bytes in
// the order of the instruction and float32 scales, and multiplies them with all tokens. The integers are exact and the
// float32 operations of a row are those of the row blocks (rows_256.h), so that the results have the same bits.
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
  uint8_t* values;  // groups x 8 quads x 32 rows x 4 bytes
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

// The row blocks from `block` on; those from `last` on are zeros.
template <int kBits, bool kHasMinimum>
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
          store(quad, _mm256_xor_si256(stored, _mm256_set1_epi8(char(0x80))));
        } else {
          const __m256i mask = _mm256_set1_epi8(15);
          store(quad, _mm256_and_si256(stored, mask));
          store(quad + 4, _mm256_and_si256(_mm256_srli_epi16(stored, 4), mask));
        }
      }
    }
  }
}

// The products of a panel with T tokens. The 4 T sums of integers and floats stay in registers.
template <int kBits, bool kHasMinimum, int T>
void multiply(Panel panel, const StoredMatrix& w, int64_t block, const Activations& x, int64_t token, float* y) {
  __m512 sums[T][2];
  for (int t = 0; t < T; ++t) sums[t][0] = sums[t][1] = _mm512_setzero_ps();
  const uint8_t* values = panel.values;
  for (int64_t g = 0; g < w.groups; ++g) {
    __m512i dots[T][2];
    const int8_t* tokens[T];
    for (int t = 0; t < T; ++t) {
      const int64_t at = (token + t) * w.groups + g;
      tokens[t] = x.values + at * kGroup;
      dots[t][0] = dots[t][1] = kBits == 8 ? _mm512_set1_epi32(x.offsets[at]) : _mm512_setzero_si512();
    }
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad, values += kPanelRows * 4) {
      const __m512i first = _mm512_load_si512(values), second = _mm512_load_si512(values + 64);
      for (int t = 0; t < T; ++t) {
        int32_t q;
        memcpy(&q, tokens[t] + 4 * quad, sizeof q);
        const __m512i all = _mm512_set1_epi32(q);
        dots[t][0] = _mm512_dpbusd_epi32(dots[t][0], first, all);
        dots[t][1] = _mm512_dpbusd_epi32(dots[t][1], second, all);
      }
    }
    for (int half = 0; half < 2; ++half) {
      const int64_t at_rows = g * kPanelRows + half * kHalfRows;
      const __m512 scale = _mm512_load_ps(panel.scales + at_rows);
      for (int t = 0; t < T; ++t) {
        const int64_t at = (token + t) * w.groups + g;
        const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x.scales[at]));
        sums[t][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[t][half]), both, sums[t][half]);
        if (kHasMinimum) {
          const __m512 minimum = _mm512_load_ps(panel.minimums + at_rows);
          sums[t][half] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x.sums[at]), sums[t][half]);
        }
      }
    }
  }
  const int64_t first = block * kBlockRows;
  for (int t = 0; t < T; ++t) {
    float* const to = y + (token + t) * w.stride + w.first_row + first;
    for (int half = 0; half < 2; ++half) {
      const int64_t left = w.rows - first - half * kHalfRows;
      if (left >= kHalfRows) {
        _mm512_storeu_ps(to + half * kHalfRows, sums[t][half]);
      } else if (left > 0) {
        float rows[kHalfRows];
        _mm512_storeu_ps(rows, sums[t][half]);
        memcpy(to + half * kHalfRows, rows, left * sizeof(float));
      }
    }
  }
}

template <int kBits, bool kHasMinimum>
void for_panels(const StoredMatrix& w, Range blocks, const Activations& x, int64_t num_tokens, float* y) {
  static thread_local PanelMemory memory;
  const Panel panel = memory.panel(w.groups);
  for (int64_t block = blocks.first; block < blocks.last; block += kPanelBlocks) {
    unpack<kBits, kHasMinimum>(w, block, blocks.last, panel);
    StoredMatrix own = w;  // a part of the rows ends at its last block
    if (blocks.last * kBlockRows < own.rows) own.rows = blocks.last * kBlockRows;
    int64_t n = 0;
    for (; n + 6 <= num_tokens; n += 6) multiply<kBits, kHasMinimum, 6>(panel, own, block, x, n, y);
    switch (num_tokens - n) {
      case 5: multiply<kBits, kHasMinimum, 5>(panel, own, block, x, n, y); break;
      case 4: multiply<kBits, kHasMinimum, 4>(panel, own, block, x, n, y); break;
      case 3: multiply<kBits, kHasMinimum, 3>(panel, own, block, x, n, y); break;
      case 2: multiply<kBits, kHasMinimum, 2>(panel, own, block, x, n, y); break;
      case 1: multiply<kBits, kHasMinimum, 1>(panel, own, block, x, n, y); break;
      default: break;
    }
  }
}

}  // namespace
}  // namespace lakh
