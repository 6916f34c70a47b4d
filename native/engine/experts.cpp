// The experts of a layer: products with the matrices of those experts only that have tokens.
#include <algorithm>
#include <vector>

#include "lakh_engine.h"
#include "products.h"
#include "vector_kernels.h"
#include "workers.h"

namespace lakh {
namespace {

// The choices of all tokens, sorted by expert.
struct Choices {
  std::vector<int64_t> places;  // of choice k of token n: its row among the sorted ones
  std::vector<Factor> gate_up, down;

  void sort(const lakh_engine_experts& experts, const int64_t* numbers, int64_t num) {
    std::vector<int64_t> next(experts.count + 1);
    for (int64_t i = 0; i < num; ++i) ++next[numbers[i] + 1];
    gate_up.clear(), down.clear();
    for (int64_t e = 0; e < experts.count; ++e) {
      const Range rows = {next[e], next[e] + next[e + 1]};
      next[e + 1] = rows.last;
      if (rows.first == rows.last) continue;
      gate_up.push_back({experts.gate_up.pieces, experts.gate_up.num_pieces, rows, e});
      down.push_back({experts.down.pieces, experts.down.num_pieces, rows, e});
    }
    places.resize(num);
    for (int64_t i = 0; i < num; ++i) places[i] = next[numbers[i]]++;
  }
};

struct Buffers {
  std::vector<float> x, both, inner, y;
};

}  // namespace
}  // namespace lakh

extern "C" __attribute__((visibility("default"))) int lakh_engine_run_experts(const lakh_engine_experts* experts,
                                                                              const float* x, int64_t num, int64_t top_k,
                                                                              const int64_t* numbers, const float* weights,
                                                                              float* y) {
  using namespace lakh;
  const int64_t width = experts->width, ffn = experts->ffn, rows = num * top_k;
  const auto is_known = [&](int64_t number) { return number >= 0 && number < experts->count; };
  if (num < 0 || rows_of(experts->gate_up) != 2 * ffn || rows_of(experts->down) != width) return -1;
  if (!std::all_of(numbers, numbers + rows, is_known)) return -1;
  thread_local Choices choices;
  thread_local Buffers buffers;
  Choices& chosen = choices;  // of the caller: threads that share the work have their own
  Buffers& own = buffers;
  chosen.sort(*experts, numbers, rows);
  own.x.resize(rows * width), own.y.resize(rows * width), own.both.resize(rows * 2 * ffn), own.inner.resize(rows * ffn);
  for (int64_t i = 0; i < rows; ++i) {
    const float* const from = x + i / top_k * width;
    std::copy(from, from + width, &own.x[chosen.places[i] * width]);
  }
  if (!multiply(chosen.gate_up, width, own.x.data(), rows, own.both.data())) return -1;
  const auto& vectors = selected_vectors();
  run_on_threads(int(chosen.gate_up.size()), [&](int number) {
    const Factor& factor = chosen.gate_up[number];
    for (int64_t row = factor.tokens.first; row < factor.tokens.last; ++row) {
      float* const both = &own.both[row * 2 * ffn];
      if (experts->gate_up_bias == nullptr) {
        vectors.gate(both, ffn, &own.inner[row * ffn]);
      } else {
        vectors.add(both, experts->gate_up_bias + factor.expert * 2 * ffn, 2 * ffn, both);
        vectors.clamped_gate(both, ffn, &own.inner[row * ffn]);
      }
    }
  });
  if (!multiply(chosen.down, ffn, own.inner.data(), rows, own.y.data())) return -1;
  std::fill(y, y + num * width, 0.0f);
  for (int64_t i = 0; i < rows; ++i) {
    vectors.add_scaled(y + i / top_k * width, &own.y[chosen.places[i] * width], weights[i], width);
  }
  return 0;
}
