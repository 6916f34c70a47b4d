// Attention over the paged cache.
#pragma once

#include "lakh_engine.h"

namespace lakh {

// Rows of queries: token after token, `stride` numbers apart.
struct Queries {
  const float* numbers;
  int64_t stride, heads, size;
};

// `layer`: its keys and values. out: num x heads x size.
void attend(const lakh_engine_cache& layer, const lakh_engine_places& places, const lakh_engine_scores& how,
            const Queries& q, int64_t kv_heads, float* out);

// The keys and values of a layer, given those of the first.
lakh_engine_cache layer_of(const lakh_engine_cache& cache, int64_t layer, int64_t kv_heads, int64_t size);

// Writes a key or a value, rounded where the cache has scales.
void store(void* numbers, float* scales, int64_t slot, const float* x, int64_t size);

bool fits(const lakh_engine_cache& cache, const lakh_engine_places& places, int64_t heads, int64_t kv_heads);

}  // namespace lakh
