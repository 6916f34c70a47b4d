#include "codec.h"

#include <cmath>
#include <cstring>

#include "lakh_c3.h"
#include "reduce.h"

namespace lakh {
namespace {

uint32_t mix(uint32_t index, uint32_t seed) {
  uint32_t h = index * 0x9e3779b1u ^ seed;
  h ^= h >> 16;
  h *= 0x85ebca6bu;
  h ^= h >> 13;
  h *= 0xc2b2ae35u;
  return h ^ (h >> 16);
}

void encode_bf16(const float *values, int64_t count, uint32_t seed, uint8_t *wire, float *residual) {
  for (int64_t i = 0; i < count; ++i) {
    const float x = residual ? values[i] + residual[i] : values[i];
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t noise = mix(static_cast<uint32_t>(i), seed) & 0xffffu;
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    const uint16_t out = finite ? static_cast<uint16_t>((bits + noise) >> 16) : to_bf16(x);
    std::memcpy(wire + 2 * i, &out, 2);
    if (residual) residual[i] = x - from_bf16(out);
  }
}

// Quantises `n` <= 32 values to k in [-limit, limit] and returns the scale's bits.
inline uint16_t quantise(const float *x, int64_t n, float limit, float *k) {
  float largest = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    const float a = std::fabs(x[i]);
    largest = a > largest ? a : largest;
    finite = finite && a <= 3.4028234e38f;
  }
  if (!finite) largest = NAN;
  const uint16_t bits = to_bf16(largest / limit);
  const float scale = from_bf16(bits);
  const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  for (int64_t i = 0; i < n; ++i) {
    float v = std::rint(x[i] * inverse);
    v = v > limit ? limit : v;
    k[i] = v >= -limit ? v : -limit;  // also for a NaN, whose scale is NaN
  }
  return bits;
}

template <bool kFour>
void encode_groups(const float *values, int64_t count, uint8_t *wire, float *residual) {
  constexpr int64_t kBytes = kFour ? 18 : 34;
  constexpr float kLimit = kFour ? 7.0f : 127.0f;
  float x[kGroup], k[kGroup];
  for (int64_t at = 0; at < count; at += kGroup, wire += kBytes) {
    const int64_t n = count - at < kGroup ? count - at : kGroup;
    for (int64_t i = 0; i < n; ++i) x[i] = residual ? values[at + i] + residual[at + i] : values[at + i];
    for (int64_t i = n; i < kGroup; ++i) x[i] = 0.0f;
    const uint16_t bits = quantise(x, kGroup, kLimit, k);
    std::memcpy(wire, &bits, 2);
    if (kFour) {
      for (int64_t i = 0; i < kGroup / 2; ++i) {
        const int low = static_cast<int>(k[2 * i]) & 15, high = static_cast<int>(k[2 * i + 1]) & 15;
        wire[2 + i] = static_cast<uint8_t>(low | high << 4);
      }
    } else {
      for (int64_t i = 0; i < kGroup; ++i) wire[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(k[i]));
    }
    if (residual) {
      const float scale = from_bf16(bits);
      for (int64_t i = 0; i < n; ++i) residual[at + i] = x[i] - k[i] * scale;
    }
  }
}

template <bool kFour>
void decode_groups(const uint8_t *wire, int64_t count, float *values, bool add) {
  constexpr int64_t kBytes = kFour ? 18 : 34;
  float x[kGroup];
  for (int64_t at = 0; at < count; at += kGroup, wire += kBytes) {
    const int64_t n = count - at < kGroup ? count - at : kGroup;
    uint16_t bits;
    std::memcpy(&bits, wire, 2);
    const float scale = from_bf16(bits);
    if (kFour) {
      for (int64_t i = 0; i < kGroup / 2; ++i) {
        const int8_t low = static_cast<int8_t>(wire[2 + i] << 4), high = static_cast<int8_t>(wire[2 + i]);
        x[2 * i] = static_cast<float>(low >> 4) * scale;
        x[2 * i + 1] = static_cast<float>(high >> 4) * scale;
      }
    } else {
      for (int64_t i = 0; i < kGroup; ++i) x[i] = static_cast<float>(static_cast<int8_t>(wire[2 + i])) * scale;
    }
    if (add) {
      for (int64_t i = 0; i < n; ++i) values[at + i] += x[i];
    } else {
      std::memcpy(values + at, x, static_cast<size_t>(n) * sizeof(float));
    }
  }
}

}  // namespace

int64_t codec_bytes(int32_t codec, int64_t count) {
  const int64_t groups = (count + kGroup - 1) / kGroup;
  switch (codec) {
    case LAKH_C3_CODEC_NONE: return 4 * count;
    case LAKH_C3_CODEC_BF16: return 2 * count;
    case LAKH_C3_CODEC_INT8: return 34 * groups;
    case LAKH_C3_CODEC_INT4: return 18 * groups;
    default: return -1;
  }
}

void encode(int32_t codec, const float *values, int64_t count, uint64_t seed, uint8_t *wire, float *residual) {
  switch (codec) {
    case LAKH_C3_CODEC_NONE: std::memcpy(wire, values, static_cast<size_t>(count) * 4); return;
    case LAKH_C3_CODEC_BF16: return encode_bf16(values, count, static_cast<uint32_t>(seed ^ (seed >> 32)), wire, residual);
    case LAKH_C3_CODEC_INT8: return encode_groups<false>(values, count, wire, residual);
    case LAKH_C3_CODEC_INT4: return encode_groups<true>(values, count, wire, residual);
    default: return;
  }
}

void decode(int32_t codec, const uint8_t *wire, int64_t count, float *values, bool add) {
  switch (codec) {
    case LAKH_C3_CODEC_NONE:
    case LAKH_C3_CODEC_BF16:
      for (int64_t i = 0; i < count; ++i) {
        float x;
        if (codec == LAKH_C3_CODEC_NONE) {
          std::memcpy(&x, wire + 4 * i, 4);
        } else {
          uint16_t bits;
          std::memcpy(&bits, wire + 2 * i, 2);
          x = from_bf16(bits);
        }
        values[i] = add ? values[i] + x : x;
      }
      return;
    case LAKH_C3_CODEC_INT8: return decode_groups<false>(wire, count, values, add);
    case LAKH_C3_CODEC_INT4: return decode_groups<true>(wire, count, values, add);
    default: return;
  }
}

}  // namespace lakh
