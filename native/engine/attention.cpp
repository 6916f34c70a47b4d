// Attention over the paged cache: a token is computed in the same order of operations, whatever is beside it.
#include "attention.h"

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "vector_kernels.h"
#include "workers.h"

namespace lakh {
namespace {

int64_t number_bytes(const lakh_engine_cache& cache) { return cache.key_scales == nullptr ? sizeof(float) : 1; }

}  // namespace

// The keys and values of a layer, given those of the first.
lakh_engine_cache layer_of(const lakh_engine_cache& cache, int64_t layer, int64_t kv_heads, int64_t size) {
  const int64_t slots = layer * kv_heads * cache.capacity, bytes = slots * size * number_bytes(cache);
  lakh_engine_cache own = cache;
  own.keys = static_cast<char*>(cache.keys) + bytes;
  own.values = static_cast<char*>(cache.values) + bytes;
  if (cache.key_scales != nullptr) own.key_scales += slots, own.value_scales += slots;
  return own;
}

void store(void* numbers, float* scales, int64_t slot, const float* x, int64_t size) {
  if (scales == nullptr) {
    std::copy(x, x + size, static_cast<float*>(numbers) + slot * size);
  } else {
    selected_vectors().round(x, size, static_cast<int8_t*>(numbers) + slot * size, scales + slot);
  }
}

// A part is a key head and a tile of tokens, so that its keys and values stay in the cache of a core.
void attend(const lakh_engine_cache& layer, const lakh_engine_places& places, const lakh_engine_scores& how,
            const Queries& q, int64_t kv_heads, float* out) {
  const int64_t size = q.size, share = q.heads / kv_heads, tiles = (places.num + kTileTokens - 1) / kTileTokens;
  run_on_threads(int(kv_heads * tiles), [&](int part) {
    thread_local std::vector<float> scores;
    const int64_t head = part / tiles, first = part % tiles * kTileTokens;
    const int64_t at = head * layer.capacity, bytes = at * size * number_bytes(layer);
    const bool has_scales = layer.key_scales != nullptr;
    CachedHead cached = {static_cast<const char*>(layer.keys) + bytes, has_scales ? layer.key_scales + at : nullptr,
                         static_cast<const char*>(layer.values) + bytes, has_scales ? layer.value_scales + at : nullptr};
    const Scores own_scores = {how.scale, how.bound, how.sinks == nullptr ? nullptr : how.sinks + head * share};
    for (int64_t n = first; n < std::min(first + kTileTokens, places.num); ++n) {
      const int64_t all = places.lengths[n];
      int64_t length = how.window > 0 ? std::min(how.window, all) : all;
      if (how.window < 0) length = (all - 1) % -how.window + 1;  // those of its chunk
      const int64_t own = head * share * size;
      if (int64_t(scores.size()) < kMaxHeads * length) scores.resize(2 * kMaxHeads * length);
      selected_vectors().attend(cached, own_scores, q.numbers + n * q.stride + own, share, size,
                                places.slots + places.starts[n] + all - length, length, out + n * q.heads * size + own,
                                scores.data());
      cached.is_in_memory = false;
    }
  });
}

bool fits(const lakh_engine_cache& cache, const lakh_engine_places& places, int64_t heads, int64_t kv_heads) {
  if (kv_heads <= 0 || heads <= 0 || heads % kv_heads != 0 || places.num < 0) return false;
  if ((cache.key_scales == nullptr) != (cache.value_scales == nullptr)) return false;
  const auto is_slot = [&](int64_t slot) { return slot >= 0 && slot < cache.capacity; };
  for (int64_t n = 0; n < places.num; ++n) {
    if (places.lengths[n] <= 0 || places.starts[n] < 0) return false;
    const int64_t* const slots = places.slots + places.starts[n];
    if (!std::all_of(slots, slots + places.lengths[n], is_slot)) return false;
  }
  return true;
}

}  // namespace lakh

extern "C" __attribute__((visibility("default"))) int lakh_engine_attend(
    const lakh_engine_cache* layer, const lakh_engine_places* places, const lakh_engine_scores* scores, int64_t heads,
    int64_t kv_heads, int64_t size, const float* q, float* out) {
  if (!lakh::fits(*layer, *places, heads, kv_heads)) return -1;
  lakh::attend(*layer, *places, *scores, {q, heads * size, heads, size}, kv_heads, out);
  return 0;
}
