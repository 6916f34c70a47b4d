// Sums of products with the VNNI instructions of 256 bits: one multiplies 4 columns of 8 rows and adds them. It takes
// unsigned by signed bytes: a weight byte b is read as b + 128, and 128 times the sum of the activations is subtracted.
#pragma once

#include "rows_256.h"

namespace lakh {
namespace {

inline __m256i add_products(__m256i sum, __m256i weights, __m256i quad) {
#if defined(__AVX512VNNI__)
  return _mm256_dpbusd_epi32(sum, weights, quad);
#else
  return _mm256_dpbusd_avx_epi32(sum, weights, quad);
#endif
}

// Each token has two chains of sums: an instruction takes 5 cycles.
struct Dots8 {
  template <int T>
  static inline __attribute__((always_inline)) void set(const uint8_t* values, const GroupOfTokens& group, __m256i* dots) {
    const __m256i flip = _mm256_set1_epi8(char(0x80));
    __m256i odd[T];
    for (int t = 0; t < T; ++t) {
      dots[t] = _mm256_set1_epi32(group.x.offsets[group.at(t)]);
      odd[t] = _mm256_setzero_si256();
    }
    for (int quad = 0; quad < 8; quad += 2) {
      const __m256i v0 = _mm256_xor_si256(bytes(values + 32 * quad), flip);
      const __m256i v1 = _mm256_xor_si256(bytes(values + 32 * quad + 32), flip);
      for (int t = 0; t < T; ++t) {
        dots[t] = add_products(dots[t], v0, group.quad(t, 4 * quad));
        odd[t] = add_products(odd[t], v1, group.quad(t, 4 * quad + 4));
      }
    }
    for (int t = 0; t < T; ++t) dots[t] = _mm256_add_epi32(dots[t], odd[t]);
  }
};

struct Dots4 {
  template <int T>
  static inline __attribute__((always_inline)) void set(const uint8_t* values, const GroupOfTokens& group, __m256i* dots) {
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i high_dots[T];
    for (int t = 0; t < T; ++t) dots[t] = high_dots[t] = _mm256_setzero_si256();
    for (int quad = 0; quad < 4; ++quad) {
      const __m256i both = bytes(values + 32 * quad);
      const __m256i low = _mm256_and_si256(both, mask);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
      for (int t = 0; t < T; ++t) {
        dots[t] = add_products(dots[t], low, group.quad(t, 4 * quad));
        high_dots[t] = add_products(high_dots[t], high, group.quad(t, 4 * quad + 16));
      }
    }
    for (int t = 0; t < T; ++t) dots[t] = _mm256_add_epi32(dots[t], high_dots[t]);
  }
};

}  // namespace
}  // namespace lakh
