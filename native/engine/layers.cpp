// All layers of a decoder in one call, for the tokens of a prompt and of a decode step alike: one path, in which every
// token is computed in the same order of operations, whatever is beside it.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "lakh_engine.h"
#include "products.h"
#include "vector_kernels.h"
#include "workers.h"

namespace lakh {
namespace {

// Calls work(n) for every token.
template <class Work>
void for_each_token(int64_t num, const Work& work) {
  run_on_threads(int((num + kTileTokens - 1) / kTileTokens), [&](int tile) {
    for (int64_t n = tile * kTileTokens; n < std::min((tile + 1) * kTileTokens, num); ++n) work(n);
  });
}

int64_t number_bytes(const lakh_engine_cache& cache) { return cache.key_scales == nullptr ? sizeof(float) : 1; }

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
void attend(const lakh_engine_cache& layer, const lakh_engine_places& places, const lakh_engine_scores& how, int64_t heads,
            int64_t kv_heads, int64_t size, const float* q, int64_t q_stride, float* out) {
  const int64_t share = heads / kv_heads, tiles = (places.num + kTileTokens - 1) / kTileTokens;
  run_on_threads(int(kv_heads * tiles), [&](int part) {
    thread_local std::vector<float> scores;
    const int64_t head = part / tiles, first = part % tiles * kTileTokens;
    const int64_t at = head * layer.capacity, bytes = at * size * number_bytes(layer);
    const bool has_scales = layer.key_scales != nullptr;
    CachedHead cached = {static_cast<const char*>(layer.keys) + bytes, has_scales ? layer.key_scales + at : nullptr,
                               static_cast<const char*>(layer.values) + bytes,
                               has_scales ? layer.value_scales + at : nullptr};
    const Scores own_scores = {how.scale, how.bound, how.sinks == nullptr ? nullptr : how.sinks + head * share};
    for (int64_t n = first; n < std::min(first + kTileTokens, places.num); ++n) {
      const int64_t length = places.lengths[n], own = head * share * size;
      if (int64_t(scores.size()) < kMaxHeads * length) scores.resize(2 * kMaxHeads * length);
      selected_vectors().attend(cached, own_scores, q + n * q_stride + own, share, size, places.slots + places.starts[n],
                                length, out + n * heads * size + own, scores.data());
      cached.is_in_memory = false;
    }
  });
}

// One row of an embedding as float32.
void take_row(const lakh_engine_piece& table, int64_t columns, int64_t row, float* out) {
  if (table.bits == 32) {
    const auto* const from = static_cast<const float*>(table.values) + row / kPanelRows * kPanelRows * columns + row % kPanelRows;
    for (int64_t column = 0; column < columns; ++column) out[column] = from[column * kPanelRows];
    return;
  }
  const int64_t groups = columns / kGroup;
  const int64_t at = row % kBlockRows, group_bytes = kGroup * table.bits;
  for (int64_t g = 0; g < groups; ++g, out += kGroup) {
    const int64_t group = row / kBlockRows * groups + g, of_row = group * kBlockRows + at;
    const uint8_t* const values = static_cast<const uint8_t*>(table.values) + group * group_bytes + at * 4;
    const float scale = from_half(table.scales[of_row]);
    const float minimum = table.minimums == nullptr ? 0.0f : from_half(table.minimums[of_row]);
    for (int64_t column = 0; column < kGroup; ++column) {
      const int64_t quad = column % (4 * table.bits) / 4, stored = values[quad * 4 * kBlockRows + column % 4];
      const int64_t number = table.bits == 8 ? int8_t(stored) : column < kGroup / 2 ? stored & 15 : stored >> 4;
      out[column] = float(number) * scale + minimum;
    }
  }
}

bool fits(const lakh_engine_cache& cache, const lakh_engine_places& places, int64_t heads, int64_t kv_heads) {
  if (kv_heads <= 0 || heads <= 0 || heads % kv_heads != 0 || places.num < 0) return false;
  if ((cache.key_scales == nullptr) != (cache.value_scales == nullptr)) return false;
  return std::all_of(places.lengths, places.lengths + places.num, [](int64_t length) { return length > 0; });
}

bool fits(const lakh_engine_model& model) {
  return model.size % 2 == 0 && (model.embedding.bits == 32 || model.width % kGroup == 0) &&
         rows_of(model.qkv) == (model.heads + 2 * model.kv_heads) * model.size && rows_of(model.o) == model.width &&
         rows_of(model.gate_up) == 2 * model.ffn && rows_of(model.down) == model.width;
}

// The activations of a step, kept from one step to the next.
struct Activity {
  std::vector<float> residual, normed, qkv, attention, both, inner;

  void reserve(const lakh_engine_model& model, int64_t num) {
    const auto grow = [num](std::vector<float>& numbers, int64_t size) {
      if (int64_t(numbers.size()) < num * size) numbers.resize(num * size);
    };
    grow(residual, model.width), grow(normed, model.width), grow(attention, model.heads * model.size);
    grow(qkv, (model.heads + 2 * model.kv_heads) * model.size), grow(both, 2 * model.ffn), grow(inner, model.ffn);
  }
};

class Step {
 public:
  Step(const lakh_engine_model& model, const lakh_engine_cache& cache, const lakh_engine_places& places, Activity& activity)
      : model_(model), cache_(cache), places_(places), activity_(activity), vectors_(selected_vectors()) {}

  void embed(const int64_t* ids) {
    for_each_token(places_.num, [&](int64_t n) {
      take_row(model_.embedding, model_.width, ids[n], &activity_.residual[n * model_.width]);
    });
  }

  // The sum of the residual stream and `added` (null: nothing), normalized.
  void norm(int64_t number, const float* added) {
    for_each_token(places_.num, [&](int64_t n) {
      float* const x = &activity_.residual[n * model_.width];
      if (added != nullptr) vectors_.add(x, added + n * model_.width, model_.width);
      vectors_.norm(x, model_.norms + number * model_.width, model_.width, model_.eps, &activity_.normed[n * model_.width]);
    });
  }

  // Biases, norms of heads and rotary positions; stores keys and values.
  void place(int64_t layer, const lakh_engine_cache& cache) {
    const int64_t size = model_.size, heads = model_.heads, kv_heads = model_.kv_heads, row = (heads + 2 * kv_heads) * size;
    for_each_token(places_.num, [&](int64_t n) {
      float* const qkv = &activity_.qkv[n * row];
      if (model_.qkv_bias != nullptr) vectors_.add(qkv, model_.qkv_bias + layer * row, row);
      const int64_t position = places_.lengths[n] - 1, slot = places_.slots[places_.starts[n] + position];
      for (int64_t h = 0; h < heads + kv_heads; ++h) {
        if (model_.head_norms != nullptr) {
          const float* const weight = model_.head_norms + (2 * layer + (h < heads ? 0 : 1)) * size;
          vectors_.norm(qkv + h * size, weight, size, model_.eps, qkv + h * size);
        }
        vectors_.rotate(qkv + h * size, model_.cos + position * (size / 2), model_.sin + position * (size / 2), size);
      }
      for (int64_t h = 0; h < kv_heads; ++h) {
        const int64_t at = h * cache.capacity;
        store(cache.keys, cache.key_scales, at + slot, qkv + (heads + h) * size, size);
        store(cache.values, cache.value_scales, at + slot, qkv + (heads + kv_heads + h) * size, size);
      }
    });
  }

  bool run() {
    const int64_t queries = model_.heads * model_.size;
    bool is_known = true;
    const auto multiply = [&](const lakh_engine_matrices& matrices, int64_t layer, int64_t columns,
                              const std::vector<float>& x, std::vector<float>& y) {
      const auto* const pieces = matrices.pieces + layer * matrices.num_pieces;
      is_known &= lakh_engine_matmul(pieces, matrices.num_pieces, columns, x.data(), places_.num, y.data()) == 0;
    };
    Activity& own = activity_;
    for (int64_t layer = 0; layer < model_.layers && is_known; ++layer) {
      const lakh_engine_cache cache = layer_of(cache_, layer, model_.kv_heads, model_.size);
      norm(2 * layer, layer == 0 ? nullptr : own.normed.data());
      multiply(model_.qkv, layer, model_.width, own.normed, own.qkv);
      place(layer, cache);
      const int64_t row = queries + 2 * model_.kv_heads * model_.size;
      const lakh_engine_scores plain = {1.0f / std::sqrt(float(model_.size)), 0.0f, nullptr};
      attend(cache, places_, plain, model_.heads, model_.kv_heads, model_.size, own.qkv.data(), row, own.attention.data());
      multiply(model_.o, layer, queries, own.attention, own.normed);
      norm(2 * layer + 1, own.normed.data());
      multiply(model_.gate_up, layer, model_.width, own.normed, own.both);
      for_each_token(places_.num, [&](int64_t n) {
        vectors_.gate(&own.both[n * 2 * model_.ffn], model_.ffn, &own.inner[n * model_.ffn]);
      });
      multiply(model_.down, layer, model_.ffn, own.inner, own.normed);
    }
    norm(2 * model_.layers, own.normed.data());
    return is_known;
  }

 private:
  const lakh_engine_model& model_;
  const lakh_engine_cache& cache_;
  const lakh_engine_places& places_;
  Activity& activity_;
  const VectorKernels& vectors_;
};

}  // namespace
}  // namespace lakh

extern "C" {

#define LAKH_EXPORT __attribute__((visibility("default")))

LAKH_EXPORT int lakh_engine_attend(const lakh_engine_cache* layer, const lakh_engine_places* places,
                                   const lakh_engine_scores* scores, int64_t heads, int64_t kv_heads, int64_t size,
                                   const float* q, float* out) {
  if (!lakh::fits(*layer, *places, heads, kv_heads)) return -1;
  lakh::attend(*layer, *places, *scores, heads, kv_heads, size, q, heads * size, out);
  return 0;
}

LAKH_EXPORT int lakh_engine_forward(const lakh_engine_model* model, const lakh_engine_cache* cache,
                                    const lakh_engine_places* places, const int64_t* ids, int64_t num_scored,
                                    const int64_t* scored, float* logits) {
  if (!lakh::fits(*cache, *places, model->heads, model->kv_heads) || !lakh::fits(*model)) return -1;
  const auto is_known = [&](int64_t id) { return id >= 0 && id < model->embedding.rows; };
  if (!std::all_of(ids, ids + places->num, is_known)) return -1;
  thread_local lakh::Activity activity;
  activity.reserve(*model, places->num);
  lakh::Step step(*model, *cache, *places, activity);
  step.embed(ids);
  if (!step.run()) return -1;
  for (int64_t i = 0; i < num_scored; ++i) {  // `scored` is in order: row i is not behind the row that it gets
    const float* const from = &activity.normed[scored[i] * model->width];
    std::copy(from, from + model->width, &activity.normed[i * model->width]);
  }
  return lakh_engine_matmul(&model->head, 1, model->width, activity.normed.data(), num_scored, logits);
}
}
