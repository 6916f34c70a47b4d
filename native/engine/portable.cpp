// Kernels in plain C++ for CPUs without the others' instructions.
#include "float_product.h"
#include "kernels.h"

namespace lakh {
namespace {

template <bool kHasMinimum>
struct Bits8 {
  template <int T>
  static void run(const StoredMatrix& w, int64_t block, const Activations& x, int64_t token, float* y) {
    const int8_t* values = reinterpret_cast<const int8_t*>(w.values) + block * w.groups * 256;
    const int64_t offset = block * w.groups * kBlockRows;
    const uint16_t *scales = w.scales + offset, *minimums = kHasMinimum ? w.minimums + offset : nullptr;
    float sums[T][kBlockRows] = {};
    for (int64_t g = 0; g < w.groups; ++g, values += 256, scales += kBlockRows) {
      for (int t = 0; t < T; ++t) {
        const int64_t at = (token + t) * w.groups + g;
        const int8_t* q = x.values + at * kGroup;
        int32_t dots[kBlockRows] = {};
        for (int quad = 0; quad < 8; ++quad)
          for (int r = 0; r < kBlockRows; ++r)
            for (int i = 0; i < 4; ++i) dots[r] += values[quad * 32 + r * 4 + i] * q[quad * 4 + i];
        const float sum = x.sums[at];
        for (int r = 0; r < kBlockRows; ++r) {
          sums[t][r] += float(dots[r]) * (from_half(scales[r]) * x.scales[at]);
          if (kHasMinimum) sums[t][r] += from_half(minimums[g * kBlockRows + r]) * sum;
        }
      }
    }
    for (int t = 0; t < T; ++t) store_rows(sums[t], block, w, token + t, y);
  }
};

struct Bits4 {
  template <int T>
  static void run(const StoredMatrix& w, int64_t block, const Activations& x, int64_t token, float* y) {
    const uint8_t* values = w.values + block * w.groups * 128;
    const int64_t offset = block * w.groups * kBlockRows;
    const uint16_t *scales = w.scales + offset, *minimums = w.minimums + offset;
    float sums[T][kBlockRows] = {};
    for (int64_t g = 0; g < w.groups; ++g, values += 128, scales += kBlockRows, minimums += kBlockRows) {
      for (int t = 0; t < T; ++t) {
        const int64_t at = (token + t) * w.groups + g;
        const int8_t* q = x.values + at * kGroup;
        int32_t dots[kBlockRows] = {};
        for (int quad = 0; quad < 4; ++quad)
          for (int r = 0; r < kBlockRows; ++r)
            for (int i = 0; i < 4; ++i) {
              const uint8_t both = values[quad * 32 + r * 4 + i];
              dots[r] += (both & 15) * q[quad * 4 + i] + (both >> 4) * q[16 + quad * 4 + i];
            }
        const float sum = x.sums[at];
        for (int r = 0; r < kBlockRows; ++r) {
          sums[t][r] += float(dots[r]) * (from_half(scales[r]) * x.scales[at]) + from_half(minimums[r]) * sum;
        }
      }
    }
    for (int t = 0; t < T; ++t) store_rows(sums[t], block, w, token + t, y);
  }
};

}  // namespace

const Kernels* portable_kernels() {
  static const Kernels kernels = {"portable", for_tokens<Bits8<false>>, for_tokens<Bits8<true>>, for_tokens<Bits4>,
                                  multiply_floats, portable_vector_kernels()};
  return &kernels;
}

}  // namespace lakh
