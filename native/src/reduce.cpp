#include "reduce.h"

#include <cmath>
#include <cstring>
#include <type_traits>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "lakh_c3.h"

// On x86 the compiler generates one version per instruction set and the loader selects; ARM64 always has NEON.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define LAKH_ISA __attribute__((target_clones("default", "arch=haswell", "arch=skylake-avx512")))
#else
#define LAKH_ISA
#endif
#if defined(__clang__)
#define LAKH_NO_CARRY _Pragma("clang loop vectorize(assume_safety)")
#else
#define LAKH_NO_CARRY _Pragma("GCC ivdep")
#endif

namespace lakh {
namespace {

constexpr size_t kBlock = 2048;  // elements: 8 KB of float32 accumulators stay in the first-level cache

struct Sum { template <class T> static T apply(T a, T b) { return static_cast<T>(a + b); } };
struct Prod { template <class T> static T apply(T a, T b) { return static_cast<T>(a * b); } };
// A NaN on either side wins, as in torch.
struct Min { template <class T> static T apply(T a, T b) { return (a < b || a != a) ? a : b; } };
struct Max { template <class T> static T apply(T a, T b) { return (a > b || a != a) ? a : b; } };

template <class T, class Op>
inline __attribute__((always_inline)) void combine(T *__restrict__ acc, const T *__restrict__ src, size_t n) {
  LAKH_NO_CARRY
  for (size_t i = 0; i < n; ++i) acc[i] = Op::apply(acc[i], src[i]);
}

template <class T, class Op>
inline __attribute__((always_inline)) void combine_two(T *dst, const T *a, const T *b, size_t n) {
  LAKH_NO_CARRY
  for (size_t i = 0; i < n; ++i) dst[i] = Op::apply(a[i], b[i]);
}

template <class T>
inline __attribute__((always_inline)) void divide(T *values, size_t n, int divisor) {
  const T by = static_cast<T>(divisor);
  LAKH_NO_CARRY
  for (size_t i = 0; i < n; ++i) values[i] = static_cast<T>(values[i] / by);
}

template <class T, class Op>
inline __attribute__((always_inline)) void fold_as(void *const *dst, int num_dst, const void *const *src, int num_src,
                                                   size_t count, int divisor) {
  T acc[kBlock];
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t n = count - at < kBlock ? count - at : kBlock;
    T *const first = static_cast<T *>(dst[0]) + at;
    if (num_src == 2) {
      combine_two<T, Op>(first, static_cast<const T *>(src[0]) + at, static_cast<const T *>(src[1]) + at, n);
      if (divisor > 1) divide(first, n, divisor);
    } else {
      std::memcpy(acc, static_cast<const T *>(src[0]) + at, n * sizeof(T));
      for (int k = 1; k < num_src; ++k) combine<T, Op>(acc, static_cast<const T *>(src[k]) + at, n);
      if (divisor > 1) divide(acc, n, divisor);
      std::memcpy(first, acc, n * sizeof(T));
    }
    for (int k = 1; k < num_dst; ++k) std::memcpy(static_cast<T *>(dst[k]) + at, first, n * sizeof(T));
  }
}

// Floats as their bits, written so that the compiler vectorises it.
typedef uint32_t __attribute__((may_alias)) Bits;

struct Bf16 {
  static inline __attribute__((always_inline)) void load(float *__restrict__ to, const uint16_t *__restrict__ from, size_t n) {
    Bits *__restrict__ bits = reinterpret_cast<Bits *>(to);
    LAKH_NO_CARRY
    for (size_t i = 0; i < n; ++i) bits[i] = static_cast<uint32_t>(from[i]) << 16;
  }
  // To nearest even. A NaN that arithmetic made of bf16 operands has zeros in its lower half (its payload is an operand's, or
  // the default), so rounding keeps it a NaN; to_bf16 handles other NaNs.
  static inline __attribute__((always_inline)) uint16_t round(float value) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, value);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
  static inline __attribute__((always_inline)) void store(uint16_t *__restrict__ to, const float *__restrict__ from, size_t n) {
    LAKH_NO_CARRY
    for (size_t i = 0; i < n; ++i) to[i] = round(from[i]);
  }
  // acc op= from, widened on the way.
  template <class Op>
  static inline __attribute__((always_inline)) void combine(float *__restrict__ acc, const uint16_t *__restrict__ from, size_t n) {
    LAKH_NO_CARRY
    for (size_t i = 0; i < n; ++i) acc[i] = Op::apply(acc[i], __builtin_bit_cast(float, static_cast<uint32_t>(from[i]) << 16));
  }
  // The case of two ranks in one pass, in registers.
  template <class Op>
  static inline __attribute__((always_inline)) void two(uint16_t *to, const uint16_t *a, const uint16_t *b, size_t n, float by) {
    size_t i = 0;
#if defined(__aarch64__)
    if (std::is_same<Op, Sum>::value) {
      const uint32x4_t one = vdupq_n_u32(1), below_half = vdupq_n_u32(0x7fff);
      const auto rounded = [&](float32x4_t x) {
        const uint32x4_t bits = vreinterpretq_u32_f32(vmulq_n_f32(x, by));
        return vaddhn_u32(bits, vaddq_u32(below_half, vandq_u32(vshrq_n_u32(bits, 16), one)));
      };
      for (; i + 8 <= n; i += 8) {
        const uint16x8_t x = vld1q_u16(a + i), y = vld1q_u16(b + i);
        const float32x4_t low = vaddq_f32(vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16)),
                                          vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(y), 16)));
        const float32x4_t high = vaddq_f32(vreinterpretq_f32_u32(vshll_high_n_u16(x, 16)),
                                           vreinterpretq_f32_u32(vshll_high_n_u16(y, 16)));
        vst1q_u16(to + i, vcombine_u16(rounded(low), rounded(high)));
      }
    }
#endif
    LAKH_NO_CARRY
    for (; i < n; ++i) {
      const float x = __builtin_bit_cast(float, static_cast<uint32_t>(a[i]) << 16);
      const float y = __builtin_bit_cast(float, static_cast<uint32_t>(b[i]) << 16);
      to[i] = round(Op::apply(x, y) * by);
    }
  }
};

#if defined(__aarch64__)
typedef __fp16 __attribute__((may_alias)) Half;
#elif defined(__FLT16_MANT_DIG__)
typedef _Float16 __attribute__((may_alias)) Half;
#endif

struct F16 {
  static inline __attribute__((always_inline)) void load(float *__restrict__ to, const uint16_t *__restrict__ from, size_t n) {
    const Half *__restrict__ source = reinterpret_cast<const Half *>(from);
    LAKH_NO_CARRY
    for (size_t i = 0; i < n; ++i) to[i] = static_cast<float>(source[i]);
  }
  static inline __attribute__((always_inline)) void store(uint16_t *__restrict__ to, const float *__restrict__ from, size_t n) {
    Half *__restrict__ target = reinterpret_cast<Half *>(to);
    LAKH_NO_CARRY
    for (size_t i = 0; i < n; ++i) target[i] = static_cast<Half>(from[i]);
  }
  template <class Op>
  static inline __attribute__((always_inline)) void combine(float *__restrict__ acc, const uint16_t *__restrict__ from, size_t n) {
    const Half *__restrict__ source = reinterpret_cast<const Half *>(from);
    LAKH_NO_CARRY
    for (size_t i = 0; i < n; ++i) acc[i] = Op::apply(acc[i], static_cast<float>(source[i]));
  }
  template <class Op>
  static inline __attribute__((always_inline)) void two(uint16_t *to, const uint16_t *a, const uint16_t *b, size_t n, float by) {
    Half *target = reinterpret_cast<Half *>(to);
    const Half *x = reinterpret_cast<const Half *>(a), *y = reinterpret_cast<const Half *>(b);
    LAKH_NO_CARRY
    for (size_t i = 0; i < n; ++i) target[i] = static_cast<Half>(Op::apply(static_cast<float>(x[i]), static_cast<float>(y[i])) * by);
  }
};

template <class Format, class Op>
inline __attribute__((always_inline)) void fold_16bit(void *const *dst, int num_dst, const void *const *src,
                                                      int num_src, size_t count, int divisor) {
  float acc[kBlock];
  const bool halves = num_src == 2 && divisor <= 2;  // a half is exact, so multiplying is dividing
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t n = count - at < kBlock ? count - at : kBlock;
    uint16_t *const first = static_cast<uint16_t *>(dst[0]) + at;
    if (halves) {
      Format::template two<Op>(first, static_cast<const uint16_t *>(src[0]) + at, static_cast<const uint16_t *>(src[1]) + at, n,
                               divisor == 2 ? 0.5f : 1.0f);
    } else {
      Format::load(acc, static_cast<const uint16_t *>(src[0]) + at, n);
      for (int k = 1; k < num_src; ++k) Format::template combine<Op>(acc, static_cast<const uint16_t *>(src[k]) + at, n);
      if (divisor > 1) divide(acc, n, divisor);
      Format::store(first, acc, n);
    }
    for (int k = 1; k < num_dst; ++k) std::memcpy(static_cast<uint16_t *>(dst[k]) + at, first, n * 2);
  }
}

#define LAKH_FOLD(NAME, BODY)                                                                                   \
  template <class Op>                                                                                           \
  void NAME(void *const *d, int nd, const void *const *s, int ns, size_t n, int div) {                          \
    BODY;                                                                                                       \
  }
LAKH_FOLD(fold_f64, (fold_as<double, Op>(d, nd, s, ns, n, div)))
LAKH_FOLD(fold_i32, (fold_as<int32_t, Op>(d, nd, s, ns, n, div)))
LAKH_FOLD(fold_i64, (fold_as<int64_t, Op>(d, nd, s, ns, n, div)))
LAKH_FOLD(fold_u8, (fold_as<uint8_t, Op>(d, nd, s, ns, n, div)))
LAKH_FOLD(fold_i8, (fold_as<int8_t, Op>(d, nd, s, ns, n, div)))
LAKH_FOLD(fold_f16, (fold_16bit<F16, Op>(d, nd, s, ns, n, div)))

// The sums of training get a version per instruction set; templates cannot be cloned, so these are plain functions.
LAKH_ISA void sum_f32(void *const *d, int nd, const void *const *s, int ns, size_t n, int div) {
  fold_as<float, Sum>(d, nd, s, ns, n, div);
}
LAKH_ISA void sum_bf16(void *const *d, int nd, const void *const *s, int ns, size_t n, int div) {
  fold_16bit<Bf16, Sum>(d, nd, s, ns, n, div);
}
LAKH_ISA void sum_f16(void *const *d, int nd, const void *const *s, int ns, size_t n, int div) {
  fold_16bit<F16, Sum>(d, nd, s, ns, n, div);
}

template <class Op>
void fold_op(int32_t dtype, void *const *d, int nd, const void *const *s, int ns, size_t n, int div) {
  switch (dtype) {
    case LAKH_C3_F32: return fold_as<float, Op>(d, nd, s, ns, n, div);
    case LAKH_C3_F64: return fold_f64<Op>(d, nd, s, ns, n, div);
    case LAKH_C3_F16: return fold_f16<Op>(d, nd, s, ns, n, div);
    case LAKH_C3_BF16: return fold_16bit<Bf16, Op>(d, nd, s, ns, n, div);
    case LAKH_C3_I32: return fold_i32<Op>(d, nd, s, ns, n, div);
    case LAKH_C3_I64: return fold_i64<Op>(d, nd, s, ns, n, div);
    case LAKH_C3_U8: return fold_u8<Op>(d, nd, s, ns, n, div);
    case LAKH_C3_I8: return fold_i8<Op>(d, nd, s, ns, n, div);
    default: return;
  }
}

}  // namespace

size_t element_bytes(int32_t dtype) {
  switch (dtype) {
    case LAKH_C3_F32: case LAKH_C3_I32: return 4;
    case LAKH_C3_F64: case LAKH_C3_I64: return 8;
    case LAKH_C3_F16: case LAKH_C3_BF16: return 2;
    case LAKH_C3_U8: case LAKH_C3_I8: return 1;
    default: return 0;
  }
}

bool reducible(int32_t dtype, int32_t op) {
  if (element_bytes(dtype) == 0 || op < LAKH_C3_SUM || op > LAKH_C3_PROD) return false;
  return op != LAKH_C3_AVG || dtype <= LAKH_C3_BF16;  // an average of integers is not an integer
}

void fold(int32_t dtype, int32_t op, void *const *destinations, int num_destinations, const void *const *sources,
          int num_sources, size_t count, int divisor) {
  if (count == 0) return;  // empty tensors have no address
  const int by = op == LAKH_C3_AVG ? divisor : 1;
  if (num_sources == 1 && by <= 1) {
    for (int k = 0; k < num_destinations; ++k) {
      if (destinations[k] != sources[0]) std::memmove(destinations[k], sources[0], count * element_bytes(dtype));
    }
    return;
  }
  switch (op) {
    case LAKH_C3_SUM: case LAKH_C3_AVG:
      if (dtype == LAKH_C3_F32) return sum_f32(destinations, num_destinations, sources, num_sources, count, by);
      if (dtype == LAKH_C3_BF16) return sum_bf16(destinations, num_destinations, sources, num_sources, count, by);
      if (dtype == LAKH_C3_F16) return sum_f16(destinations, num_destinations, sources, num_sources, count, by);
      return fold_op<Sum>(dtype, destinations, num_destinations, sources, num_sources, count, by);
    case LAKH_C3_PROD: return fold_op<Prod>(dtype, destinations, num_destinations, sources, num_sources, count, by);
    case LAKH_C3_MIN: return fold_op<Min>(dtype, destinations, num_destinations, sources, num_sources, count, by);
    case LAKH_C3_MAX: return fold_op<Max>(dtype, destinations, num_destinations, sources, num_sources, count, by);
    default: return;
  }
}

float from_bf16(uint16_t bits) {
  float value;
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  std::memcpy(&value, &wide, 4);
  return value;
}

uint16_t to_bf16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  return (bits & 0x7fffffffu) > 0x7f800000u ? static_cast<uint16_t>((bits >> 16) | 0x40u) : Bf16::round(value);
}

}  // namespace lakh
