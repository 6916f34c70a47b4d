// Kernels for AVX2. maddubs multiplies unsigned by signed bytes, so a sign moves from the weight to the activation;
// |weight| <= 128 and |activation| <= 127, so no pair of products overflows 16 bits.
#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "float_product.h"
#include "rows_256.h"

namespace lakh {
namespace {

inline __m256i add_pairs(__m256i sum, __m256i products) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
}

struct Dots8 {
  template <int T>
  static inline __attribute__((always_inline)) void set(const uint8_t* values, const GroupOfTokens& group, __m256i* dots) {
    for (int t = 0; t < T; ++t) dots[t] = _mm256_setzero_si256();
    for (int quad = 0; quad < 8; ++quad) {
      const __m256i v = bytes(values + 32 * quad), size = _mm256_abs_epi8(v);
      for (int t = 0; t < T; ++t) {
        dots[t] = add_pairs(dots[t], _mm256_maddubs_epi16(size, _mm256_sign_epi8(group.quad(t, 4 * quad), v)));
      }
    }
  }
};

struct Dots4 {
  template <int T>
  static inline __attribute__((always_inline)) void set(const uint8_t* values, const GroupOfTokens& group, __m256i* dots) {
    const __m256i mask = _mm256_set1_epi8(15);
    for (int t = 0; t < T; ++t) dots[t] = _mm256_setzero_si256();
    for (int quad = 0; quad < 4; ++quad) {
      const __m256i both = bytes(values + 32 * quad);
      const __m256i low = _mm256_and_si256(both, mask);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
      for (int t = 0; t < T; ++t) {
        // 15 * 127 * 4 fits 16 bits: both halves are added before the pairs.
        const __m256i products = _mm256_add_epi16(_mm256_maddubs_epi16(low, group.quad(t, 4 * quad)),
                                                  _mm256_maddubs_epi16(high, group.quad(t, 4 * quad + 16)));
        dots[t] = add_pairs(dots[t], products);
      }
    }
  }
};

}  // namespace

const Kernels* avx2_kernels() {
  static const Kernels kernels = {"avx2",
                                  for_tokens<RowBlock<Dots8, 8, false>>,
                                  for_tokens<RowBlock<Dots8, 8, true>>,
                                  for_tokens<RowBlock<Dots4, 4, true>>,
                                  multiply_floats,
                                  avx2_vector_kernels()};
  const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                   avx2_vector_kernels() != nullptr;
  return has ? &kernels : nullptr;
}

}  // namespace lakh
#else
const lakh::Kernels* lakh::avx2_kernels() { return nullptr; }
#endif
