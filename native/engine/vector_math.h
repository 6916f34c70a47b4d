// Functions of float32 that the compiler turns into vector code.
#pragma once

#include <stdint.h>
#include <string.h>

#include <utility>

namespace lakh {

// e to the x, x between -87 and 88 (others count as these), within a millionth: 2^n * e^r with |r| <= log(2) / 2.
static inline __attribute__((always_inline)) float fast_exp(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float n = __builtin_rintf(x * 1.44269504f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const uint32_t exponent = uint32_t(int32_t(n) + 127) << 23;
  float power;
  memcpy(&power, &exponent, sizeof power);
  return p * power;
}

static inline __attribute__((always_inline)) float fast_tanh(float x) { return 1.0f - 2.0f / (fast_exp(2.0f * x) + 1.0f); }

// Numbers of one vector, loaded from any address.
#if defined(__AVX512F__)
constexpr int kFloats = 16;
#elif defined(__AVX2__)
constexpr int kFloats = 8;
#else
constexpr int kFloats = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kFloats)));
typedef int8_t Bytes __attribute__((vector_size(kFloats)));

static inline __attribute__((always_inline)) Floats load(const float* from) {
  Floats found;
  memcpy(&found, from, sizeof found);
  return found;
}

static inline __attribute__((always_inline)) Floats load(const int8_t* from) {
  Bytes found;
  memcpy(&found, from, sizeof found);
  return __builtin_convertvector(found, Floats);
}

// In vectors: the compiler keeps a loop of scalars, whose order of comparisons decides what a NaN gives.
static inline __attribute__((always_inline)) float largest_of(const float* from, int64_t length) {
  float largest = from[0];
  int64_t i = 0;
  if (length >= kFloats) {
    Floats most = load(from);
    for (i = kFloats; i + kFloats <= length; i += kFloats) {
      const Floats next = load(from + i);
      most = most < next ? next : most;
    }
    for (int lane = 0; lane < kFloats; ++lane) largest = largest < most[lane] ? most[lane] : largest;
  }
  for (; i < length; ++i) largest = largest < from[i] ? from[i] : largest;
  return largest;
}

// Lane i of the result: the sum of two lanes of a, or of b where bit K of i is set.
template <int K, int... I>
static inline __attribute__((always_inline)) Floats add_lanes(Floats a, Floats b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (I & K ? I + kFloats : I)...) +
         __builtin_shufflevector(a, b, (I & K ? (I ^ K) + kFloats : I ^ K)...);
#else
  typedef int32_t Lanes __attribute__((vector_size(4 * kFloats)));
  return __builtin_shuffle(a, b, Lanes{(I & K ? I + kFloats : I)...}) +
         __builtin_shuffle(a, b, Lanes{(I & K ? (I ^ K) + kFloats : I ^ K)...});
#endif
}

typedef float Quad __attribute__((vector_size(16)));

// The totals of 4 vectors, always in the same order of additions.
static inline __attribute__((always_inline)) Quad totals(const Floats* each) {
  const auto lanes = std::make_integer_sequence<int, kFloats>();
  const Floats all = add_lanes<2>(add_lanes<1>(each[0], each[1], lanes), add_lanes<1>(each[2], each[3], lanes), lanes);
  Quad parts[kFloats / 4];
  memcpy(parts, &all, sizeof parts);
  Quad sums = parts[0];
  for (int i = 1; i < kFloats / 4; ++i) sums += parts[i];
  return sums;
}

}  // namespace lakh
