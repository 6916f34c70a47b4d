// Functions of float32 that the compiler turns into vector code.
#pragma once

#include <stdint.h>
#include <string.h>

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
  const int32_t exponent = (int32_t(n) + 127) << 23;
  float power;
  memcpy(&power, &exponent, sizeof power);
  return p * power;
}

// Numbers of one vector, loaded from any address.
#if defined(__AVX2__)
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

static inline __attribute__((always_inline)) float total(Floats each) {
  float sum = (each[0] + each[1]) + (each[2] + each[3]);
#if defined(__AVX2__)
  sum += (each[4] + each[5]) + (each[6] + each[7]);
#endif
  return sum;
}

}  // namespace lakh
