// Kernels with the NEON dot product (ARMv8.2): one instruction multiplies 4 columns of 4 rows.
#include "kernels.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif

#include "float_product.h"

namespace lakh {
namespace {

inline float32x4_t halves(const uint16_t* from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }

// A sum of at most 32 products of bytes, below 2^22, is added to the bits of the float 1.5 * 2^23: read as a float the
// result is that number plus the sum, exactly. A subtraction is 4 times as fast as the instruction that converts.
constexpr int32_t kIntegerOfFloat = 0x4b400000;
constexpr float kFloatOfInteger = 12582912.0f;

inline float32x4_t to_floats(int32x4_t sums) {
  return vsubq_f32(vreinterpretq_f32_s32(sums), vdupq_n_f32(kFloatOfInteger));
}

// Sums of products of 8 rows with T tokens in one group of columns, exact in integers. A row of weights is loaded once
// for all tokens; 2 T independent sums hide the latency of the instruction.
template <int T>
struct GroupDots {
  int32x4_t low[T], high[T];  // rows 0-3, rows 4-7

  GroupDots() {
    for (int t = 0; t < T; ++t) low[t] = high[t] = vdupq_n_s32(kIntegerOfFloat);
  }

  // One quad of columns: the weights of rows 0-3 and 4-7, and the quad `kLane` of the 16 columns q of each token.
  template <int kLane>
  inline __attribute__((always_inline)) void add(int8x16_t rows_low, int8x16_t rows_high, const int8x16_t* q) {
    for (int t = 0; t < T; ++t) {
      low[t] = vdotq_laneq_s32(low[t], rows_low, q[t], kLane);
      high[t] = vdotq_laneq_s32(high[t], rows_high, q[t], kLane);
    }
  }
};

// The numbers of T tokens in 16 columns from `column` of a group on.
template <int T>
inline __attribute__((always_inline)) void load_tokens(const Activations& x, int64_t token, int64_t groups, int64_t group,
                                                       int column, int8x16_t* q) {
  for (int t = 0; t < T; ++t) q[t] = vld1q_s8(x.values + ((token + t) * groups + group) * kGroup + column);
}

// The sums of 8 rows for T tokens in float32.
template <int T>
struct RowSums {
  float32x4_t low[T], high[T];

  RowSums() {
    for (int t = 0; t < T; ++t) low[t] = high[t] = vdupq_n_f32(0);
  }

  // minimums: null if the format has none.
  inline __attribute__((always_inline)) void add(const GroupDots<T>& dots, const uint16_t* scales, const uint16_t* minimums,
                                                 const Activations& x, int64_t token, int64_t groups, int64_t group) {
    const float32x4_t scale_low = halves(scales), scale_high = halves(scales + 4);
    for (int t = 0; t < T; ++t) {
      const int64_t at = (token + t) * groups + group;
      const float scale = x.scales[at];
      low[t] = vfmaq_f32(low[t], to_floats(dots.low[t]), vmulq_n_f32(scale_low, scale));
      high[t] = vfmaq_f32(high[t], to_floats(dots.high[t]), vmulq_n_f32(scale_high, scale));
      if (minimums != nullptr) {
        const float sum = x.sums[at];
        low[t] = vfmaq_n_f32(low[t], halves(minimums), sum);
        high[t] = vfmaq_n_f32(high[t], halves(minimums + 4), sum);
      }
    }
  }

  inline __attribute__((always_inline)) void store(int64_t block, const StoredMatrix& w, int64_t token, float* y) const {
    const bool is_full = (block + 1) * kBlockRows <= w.rows;
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      if (is_full) {
        float* const to = y + (token + t) * w.stride + w.first_row + block * kBlockRows;
        vst1q_f32(to, low[t]), vst1q_f32(to + 4, high[t]);
      } else {
        float sums[kBlockRows];
        vst1q_f32(sums, low[t]), vst1q_f32(sums + 4, high[t]);
        store_rows(sums, block, w, token + t, y);
      }
    }
  }
};

template <bool kHasMinimum>
struct Bits8 {
  template <int T>
  static void run(const StoredMatrix& w, int64_t block, const Activations& x, int64_t token, float* y) {
    const int8_t* values = reinterpret_cast<const int8_t*>(w.values) + block * w.groups * 256;
    const int64_t offset = block * w.groups * kBlockRows;
    const uint16_t *scales = w.scales + offset, *minimums = kHasMinimum ? w.minimums + offset : nullptr;
    RowSums<T> sums;
    for (int64_t g = 0; g < w.groups; ++g, scales += kBlockRows) {
      GroupDots<T> dots;
      for (int column = 0; column < kGroup; column += 16, values += 128) {
        int8x16_t q[T];
        load_tokens<T>(x, token, w.groups, g, column, q);
        dots.template add<0>(vld1q_s8(values), vld1q_s8(values + 16), q);
        dots.template add<1>(vld1q_s8(values + 32), vld1q_s8(values + 48), q);
        dots.template add<2>(vld1q_s8(values + 64), vld1q_s8(values + 80), q);
        dots.template add<3>(vld1q_s8(values + 96), vld1q_s8(values + 112), q);
      }
      sums.add(dots, scales, minimums, x, token, w.groups, g);
      if (kHasMinimum) minimums += kBlockRows;
    }
    sums.store(block, w, token, y);
  }
};

struct Bits4 {
  // The low halves are columns 0-15, the high halves columns 16-31.
  template <int T, int kLane>
  static inline __attribute__((always_inline)) void add(GroupDots<T>& dots, const uint8_t* values, const int8x16_t* q0,
                                                        const int8x16_t* q1) {
    const uint8x16_t first = vld1q_u8(values + 32 * kLane), second = vld1q_u8(values + 32 * kLane + 16);
    const uint8x16_t mask = vdupq_n_u8(15);
    dots.template add<kLane>(vreinterpretq_s8_u8(vandq_u8(first, mask)), vreinterpretq_s8_u8(vandq_u8(second, mask)), q0);
    dots.template add<kLane>(vreinterpretq_s8_u8(vshrq_n_u8(first, 4)), vreinterpretq_s8_u8(vshrq_n_u8(second, 4)), q1);
  }

  template <int T>
  static void run(const StoredMatrix& w, int64_t block, const Activations& x, int64_t token, float* y) {
    const uint8_t* values = w.values + block * w.groups * 128;
    const int64_t offset = block * w.groups * kBlockRows;
    const uint16_t *scales = w.scales + offset, *minimums = w.minimums + offset;
    RowSums<T> sums;
    for (int64_t g = 0; g < w.groups; ++g, values += 128, scales += kBlockRows, minimums += kBlockRows) {
      GroupDots<T> dots;
      int8x16_t q0[T], q1[T];
      load_tokens<T>(x, token, w.groups, g, 0, q0);
      load_tokens<T>(x, token, w.groups, g, 16, q1);
      add<T, 0>(dots, values, q0, q1);
      add<T, 1>(dots, values, q0, q1);
      add<T, 2>(dots, values, q0, q1);
      add<T, 3>(dots, values, q0, q1);
      sums.add(dots, scales, minimums, x, token, w.groups, g);
    }
    sums.store(block, w, token, y);
  }
};

bool cpu_has_dotprod() {
#if defined(__linux__)
  constexpr unsigned long kHwcapAsimdDp = 1UL << 20;
  return (getauxval(AT_HWCAP) & kHwcapAsimdDp) != 0;
#else
  return true;  // every 64-bit Apple computer
#endif
}

}  // namespace

const Kernels* dotprod_kernels() {
  static const Kernels kernels = {"dotprod", for_tokens<Bits8<false>>, for_tokens<Bits8<true>>, for_tokens<Bits4>,
                                  multiply_floats, portable_vector_kernels()};
  return cpu_has_dotprod() ? &kernels : nullptr;
}

}  // namespace lakh
#else
const lakh::Kernels* lakh::dotprod_kernels() { return nullptr; }
#endif
