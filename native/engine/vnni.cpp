// Kernels for AVX-512 VNNI: one instruction multiplies 4 columns of 8 rows and adds them. It takes unsigned by signed
// bytes: a weight byte b is read as b + 128, and 128 times the sum of the activations is subtracted again. A few tokens
// read the row blocks as they are stored, in the 256-bit form; many tokens share panels (vnni_panel.h).
#include "kernels.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__F16C__)
#include <immintrin.h>
#include <string.h>

#include "float_product.h"
#include "vnni_panel.h"

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

template <bool kHasMinimum>
struct Bits8 {
  template <int T>
  static void run(const StoredMatrix& w, int64_t block, const Activations& x, int64_t token, float* y) {
    const uint8_t* values = w.values + block * w.groups * 256;
    const int64_t offset = block * w.groups * kBlockRows;
    const uint16_t *scales = w.scales + offset, *minimums = kHasMinimum ? w.minimums + offset : nullptr;
    const __m256i flip = _mm256_set1_epi8(char(0x80));
    __m256 sums[T];
    for (int t = 0; t < T; ++t) sums[t] = _mm256_setzero_ps();
    for (int64_t g = 0; g < w.groups; ++g, values += 256, scales += kBlockRows) {
      prefetch<256>(values);
      __m256i even[T], odd[T];  // two chains: an instruction takes 5 cycles
      for (int t = 0; t < T; ++t) {
        even[t] = _mm256_set1_epi32(x.offsets[(token + t) * w.groups + g]);
        odd[t] = _mm256_setzero_si256();
      }
      for (int quad = 0; quad < 8; quad += 2) {
        const __m256i v0 = _mm256_xor_si256(bytes(values + 32 * quad), flip);
        const __m256i v1 = _mm256_xor_si256(bytes(values + 32 * quad + 32), flip);
        for (int t = 0; t < T; ++t) {
          const int8_t* q = x.values + ((token + t) * w.groups + g) * kGroup + 4 * quad;
          even[t] = _mm256_dpbusd_epi32(even[t], v0, quad_of(q));
          odd[t] = _mm256_dpbusd_epi32(odd[t], v1, quad_of(q + 4));
        }
      }
      const __m256 scale = halves(scales);
      for (int t = 0; t < T; ++t) {
        const int64_t at = (token + t) * w.groups + g;
        const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(x.scales[at]));
        sums[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(even[t], odd[t])), both, sums[t]);
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
      __m256i first[T], second[T];
      for (int t = 0; t < T; ++t) first[t] = second[t] = _mm256_setzero_si256();
      for (int quad = 0; quad < 4; ++quad) {
        const __m256i both = bytes(values + 32 * quad);
        const __m256i low = _mm256_and_si256(both, mask);
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
        for (int t = 0; t < T; ++t) {
          const int8_t* q = x.values + ((token + t) * w.groups + g) * kGroup + 4 * quad;
          first[t] = _mm256_dpbusd_epi32(first[t], low, quad_of(q));
          second[t] = _mm256_dpbusd_epi32(second[t], high, quad_of(q + 16));
        }
      }
      const __m256 scale = halves(scales), minimum = halves(minimums);
      for (int t = 0; t < T; ++t) {
        const int64_t at = (token + t) * w.groups + g;
        const __m256 own = _mm256_set1_ps(x.scales[at]), sum = _mm256_set1_ps(x.sums[at]);
        const __m256 dots = _mm256_cvtepi32_ps(_mm256_add_epi32(first[t], second[t]));
        sums[t] = _mm256_fmadd_ps(dots, _mm256_mul_ps(scale, own), sums[t]);
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

constexpr int64_t kPanelTokens = 12;  // fewer cost less than unpacking

template <class Block, int kBits, bool kHasMinimum>
void product(const StoredMatrix& w, Range blocks, const Activations& x, int64_t num_tokens, float* y) {
  (num_tokens < kPanelTokens ? for_tokens<Block> : for_panels<kBits, kHasMinimum>)(w, blocks, x, num_tokens, y);
}

}  // namespace

const Kernels* vnni_kernels() {
  static const Kernels kernels = {"vnni", product<Bits8<false>, 8, false>, product<Bits8<true>, 8, true>,
                                  product<Bits4, 4, true>, multiply_floats, avx512_vector_kernels()};
  const bool has = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl") &&
                   __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("f16c") &&
                   avx512_vector_kernels() != nullptr;
  return has ? &kernels : nullptr;
}

}  // namespace lakh
#else
const lakh::Kernels* lakh::vnni_kernels() { return nullptr; }
#endif
