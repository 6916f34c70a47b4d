// Products of row blocks as they are stored, with a few tokens, in vectors of 256 bits: 4 columns of 8 rows at a time. The
// files that include it have the sums of products of a group of columns, exact in integers, for their instructions:
// `Dots::set<T>(values, group, dots)`.
#pragma once

#include <immintrin.h>
#include <string.h>

#include "kernels.h"

namespace lakh {
namespace {

inline __m256 halves(const uint16_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline __m256i bytes(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

inline __m256i quad_of(const int8_t* q) {
  int32_t quad;
  memcpy(&quad, q, sizeof quad);
  return _mm256_set1_epi32(quad);
}

// The numbers of one group of columns, of the first token and those after it.
struct GroupOfTokens {
  const Activations& x;
  int64_t first, stride;  // groups

  int64_t at(int t) const { return first + t * stride; }
  __m256i quad(int t, int column) const { return quad_of(x.values + at(t) * kGroup + column); }
};

template <class Dots, int kBits, bool kHasMinimum>
struct RowBlock {
  template <int T>
  static void run(const StoredMatrix& w, int64_t block, const Activations& x, int64_t token, float* y) {
    constexpr int64_t kGroupBytes = 32 * kBits;
    const uint8_t* values = w.values + block * w.groups * kGroupBytes;
    const int64_t offset = block * w.groups * kBlockRows;
    const uint16_t *scales = w.scales + offset, *minimums = kHasMinimum ? w.minimums + offset : nullptr;
    __m256 sums[T];
    for (int t = 0; t < T; ++t) sums[t] = _mm256_setzero_ps();
    for (int64_t g = 0; g < w.groups; ++g, values += kGroupBytes, scales += kBlockRows) {
      prefetch<kGroupBytes>(values);
      const GroupOfTokens group = {x, token * w.groups + g, w.groups};
      __m256i dots[T];
      Dots::template set<T>(values, group, dots);
      const __m256 scale = halves(scales);
      for (int t = 0; t < T; ++t) {
        const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(x.scales[group.at(t)]));
        sums[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[t]), both, sums[t]);
        if (kHasMinimum) {
          const __m256 sum = _mm256_set1_ps(x.sums[group.at(t)]);
          sums[t] = _mm256_fmadd_ps(halves(minimums + g * kBlockRows), sum, sums[t]);
        }
      }
    }
    for (int t = 0; t < T; ++t) {
      float rows[kBlockRows];
      _mm256_storeu_ps(rows, sums[t]);
      store_rows(rows, block, w, token + t, y);
    }
  }
};

}  // namespace
}  // namespace lakh
