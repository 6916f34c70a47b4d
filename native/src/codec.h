// Codecs for slow links: float32 to fewer bits, in groups of 32 elements.
//
//   bf16   2 bytes per element, stochastic rounding: unbiased, so large sums do not drift
//   int8   a bf16 scale and 32 signed bytes: 8.5 bits per element
//   int4   a bf16 scale and 16 bytes of two values each (the even element in the low half): 4.5 bits per element
//
// Every operation is one IEEE operation in a fixed order, so that another implementation (a GPU kernel) can produce the
// same bytes. With a residual (error feedback) the values are x + residual, and the encoding error is stored in it.
// A group with a NaN or an infinity decodes to NaN.
#ifndef LAKH_CODEC_H
#define LAKH_CODEC_H

#include <cstdint>

namespace lakh {

constexpr int64_t kGroup = 32;

int64_t codec_bytes(int32_t codec, int64_t count);  // -1 for an unknown codec
void encode(int32_t codec, const float *values, int64_t count, uint64_t seed, uint8_t *wire, float *residual);
void decode(int32_t codec, const uint8_t *wire, int64_t count, float *values, bool add);

}  // namespace lakh
#endif
