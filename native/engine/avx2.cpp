// Kernels for AVX2: 4 columns of 8 rows at a time. maddubs multiplies unsigned by signed bytes, so a sign moves from the
// weight to the activation; |weight| <= 128 and |activation| <= 127, so no pair of products overflows 16 bits.
#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#include <string.h>

#include "float_product.h"

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

inline __m256i add_pairs(__m256i sum, __m256i products) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
}

template <bool kHasMinimum>
struct Bits8 {
  template <int T>
  static void run(const StoredMatrix& w, int64_t block, const Activations& x, int64_t token, float* y) {
    const uint8_t* values = w.values + block * w.groups * 256;
    const int64_t offset = block * w.groups * kBlockRows;
    const uint16_t *scales = w.scales + offset, *minimums = kHasMinimum ? w.minimums + offset : nullptr;
    __m256 sums[T];
    for (int t = 0; t < T; ++t) sums[t] = _mm256_setzero_ps();
    for (int64_t g = 0; g < w.groups; ++g, values += 256, scales += kBlockRows) {
      prefetch<256>(values);
      __m256i dots[T];
      for (int t = 0; t < T; ++t) dots[t] = _mm256_setzero_si256();
      for (int quad = 0; quad < 8; ++quad) {
        const __m256i v = bytes(values + 32 * quad), size = _mm256_abs_epi8(v);
        for (int t = 0; t < T; ++t) {
          const __m256i q = quad_of(x.values + ((token + t) * w.groups + g) * kGroup + 4 * quad);
          dots[t] = add_pairs(dots[t], _mm256_maddubs_epi16(size, _mm256_sign_epi8(q, v)));
        }
      }
      const __m256 scale = halves(scales);
      for (int t = 0; t < T; ++t) {
        const int64_t at = (token + t) * w.groups + g;
        const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(x.scales[at]));
        sums[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[t]), both, sums[t]);
        if (kHasMinimum) {
          const __m256 sum = _mm256_set1_ps(x.sums[at]);
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

struct Bits4 {
  template <int T>
  static void run(const StoredMatrix& w, int64_t block, const Activations& x, int64_t token, float* y) {
    const uint8_t* values = w.values + block * w.groups * 128;
    const int64_t offset = block * w.groups * kBlockRows;
    const uint16_t *scales = w.scales + offset, *minimums = w.minimums + offset;
    const __m256i mask = _mm256_set1_epi8(15);
    __m256 sums[T];
    for (int t = 0; t < T; ++t) sums[t] = _mm256_setzero_ps();
    for (int64_t g = 0; g < w.groups; ++g, values += 128, scales += kBlockRows, minimums += kBlockRows) {
      prefetch<128>(values);
      __m256i dots[T];
      for (int t = 0; t < T; ++t) dots[t] = _mm256_setzero_si256();
      for (int quad = 0; quad < 4; ++quad) {
        const __m256i both = bytes(values + 32 * quad);
        const __m256i low = _mm256_and_si256(both, mask);
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
        for (int t = 0; t < T; ++t) {
          const int8_t* q = x.values + ((token + t) * w.groups + g) * kGroup + 4 * quad;
          // 15 * 127 * 4 fits 16 bits: both halves are added before the pairs.
          const __m256i products = _mm256_add_epi16(_mm256_maddubs_epi16(low, quad_of(q)),
                                                    _mm256_maddubs_epi16(high, quad_of(q + 16)));
          dots[t] = add_pairs(dots[t], products);
        }
      }
      const __m256 scale = halves(scales), minimum = halves(minimums);
      for (int t = 0; t < T; ++t) {
        const int64_t at = (token + t) * w.groups + g;
        const __m256 own = _mm256_set1_ps(x.scales[at]), sum = _mm256_set1_ps(x.sums[at]);
        sums[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[t]), _mm256_mul_ps(scale, own), sums[t]);
        sums[t] = _mm256_fmadd_ps(minimum, sum, sums[t]);
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

const Kernels* avx2_kernels() {
  static const Kernels kernels = {"avx2", for_tokens<Bits8<false>>, for_tokens<Bits8<true>>, for_tokens<Bits4>,
                                  multiply_floats, avx2_vector_kernels()};
  const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                   avx2_vector_kernels() != nullptr;
  return has ? &kernels : nullptr;
}

}  // namespace lakh
#else
const lakh::Kernels* lakh::avx2_kernels() { return nullptr; }
#endif
