// Reductions of a few sources into one or more destinations, element by element and in a fixed order.
//
// 16-bit floats are added in float32 and rounded once, so that every rank that folds the same sources in the same order
// gets identical bits. A destination may be one of the sources. Cost: one read of each source, one write of each
// destination.
#ifndef LAKH_REDUCE_H
#define LAKH_REDUCE_H

#include <cstddef>
#include <cstdint>

namespace lakh {

size_t element_bytes(int32_t dtype);  // 0 for an unknown type
bool reducible(int32_t dtype, int32_t op);

// destinations[k][i] = (sources[0][i] op sources[1][i] op ...) / divisor
void fold(int32_t dtype, int32_t op, void *const *destinations, int num_destinations, const void *const *sources,
          int num_sources, size_t count, int divisor);

float from_bf16(uint16_t bits);
uint16_t to_bf16(float value);  // round to nearest even; a NaN stays one

}  // namespace lakh
#endif
