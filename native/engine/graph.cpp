// A decoder as a graph of nodes, for prompts and decode steps alike: one path, in which every token is computed in the
// same order of operations, whatever is beside it.
#include <algorithm>
#include <cmath>
#include <vector>

#include "attention.h"
#include "kernels.h"
#include "lakh_engine.h"
#include "products.h"
#include "vector_kernels.h"
#include "workers.h"

namespace lakh {
namespace {

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

// The buffers of a step, kept from one step to the next.
struct Buffers {
  std::vector<float> numbers, heads_in, heads_out;
  std::vector<int64_t> firsts;

  void reserve(const lakh_engine_graph& graph, int64_t num) {
    constexpr int64_t kLine = 16;  // numbers
    firsts.assign(graph.num_buffers + 1, 0);
    for (int64_t i = 0; i < graph.num_buffers; ++i) {
      firsts[i + 1] = firsts[i] + (num * graph.buffers[i] + kLine - 1) / kLine * kLine;
    }
    if (int64_t(numbers.size()) < firsts.back()) numbers.resize(firsts.back());
  }
};

void top(const float* scores, int64_t count, int64_t k, int64_t* indices) {
  for (int64_t i = 0; i < k; ++i) {
    int64_t best = -1;
    for (int64_t e = 0; e < count; ++e) {
      if (std::find(indices, indices + i, e) != indices + i) continue;
      if (best < 0 || scores[e] > scores[best]) best = e;
    }
    indices[i] = best;
  }
}

void limit_groups(const float* scores, int64_t count, int64_t groups, int64_t kept, float* out) {
  const int64_t size = count / groups;
  const auto best = [&](int64_t group) {  // the sum of the two largest
    const float* const own = scores + group * size;
    float first = std::max(own[0], own[1]), second = std::min(own[0], own[1]);
    for (int64_t i = 2; i < size; ++i) {
      second = std::max(second, std::min(first, own[i]));
      first = std::max(first, own[i]);
    }
    return first + second;
  };
  for (int64_t group = 0; group < groups; ++group) {
    const float mine = best(group);
    int64_t before = 0;
    for (int64_t other = 0; other < groups; ++other) {
      const float theirs = best(other);
      before += theirs > mine || (theirs == mine && other < group);
    }
    for (int64_t i = group * size; i < (group + 1) * size; ++i) out[i] = before < kept ? scores[i] : -INFINITY;
  }
}

void softmax(const float* x, int64_t size, float* out) {
  const float largest = *std::max_element(x, x + size);
  float total = 0;
  for (int64_t i = 0; i < size; ++i) total += out[i] = std::exp(x[i] - largest);
  for (int64_t i = 0; i < size; ++i) out[i] /= total;
}

class Step {
 public:
  Step(const lakh_engine_graph& graph, const lakh_engine_cache& cache, const lakh_engine_places& places, Buffers& buffers)
      : graph_(graph), cache_(cache), places_(places), buffers_(buffers), vectors_(selected_vectors()) {}

  void embed(const int64_t* ids) {
    for_each_tile([&](int64_t n) { take_row(graph_.embedding, width(), ids[n], buffer(graph_.first) + n * width()); });
  }

  bool run() {
    bool is_known = true;
    for (int64_t i = 0; i < graph_.num_nodes && is_known;) {
      const lakh_engine_node& node = graph_.nodes[i];
      if (node.kind == LAKH_ENGINE_ATTEND) {
        attend_cache(node);
      } else if (node.kind == LAKH_ENGINE_PRODUCT) {
        const auto& weights = *static_cast<const lakh_engine_matrices*>(node.weights);
        is_known = lakh::multiply({{weights.pieces, weights.num_pieces, {0, places_.num}}}, node.whole[0],
                                  buffer(node.in[0].buffer), places_.num, buffer(node.out.buffer));
      } else if (node.kind == LAKH_ENGINE_HEAD_PRODUCTS) {
        is_known = multiply_heads(node);
      } else if (node.kind == LAKH_ENGINE_EXPERTS) {
        const auto& experts = *static_cast<const lakh_engine_experts*>(node.weights);
        const auto* const indices = reinterpret_cast<const int64_t*>(buffer(node.in[1].buffer));
        is_known = lakh_engine_run_experts(&experts, buffer(node.in[0].buffer), places_.num, node.whole[0], indices,
                                           buffer(node.in[2].buffer), buffer(node.out.buffer)) == 0;
      } else {
        int64_t last = i + 1;  // nodes that need nothing of other tokens run together
        while (last < graph_.num_nodes && graph_.nodes[last].kind < LAKH_ENGINE_ATTEND) ++last;
        for_each_tile([&](int64_t n) {
          for (int64_t own = i; own < last; ++own) compute(graph_.nodes[own], n);
        });
        i = last;
        continue;
      }
      ++i;
    }
    return is_known;
  }

  // The logits of these tokens; `scored` ascends, so row i is not behind the row that it gets.
  bool score(int64_t num_scored, const int64_t* scored, float* logits) {
    float* const hidden = buffer(graph_.last);
    for (int64_t i = 0; i < num_scored; ++i) {
      const float* const from = hidden + scored[i] * width();
      std::copy(from, from + width(), hidden + i * width());
    }
    if (lakh_engine_matmul(&graph_.head, 1, width(), hidden, num_scored, logits) != 0) return false;
    if (graph_.logit_bound > 0) {
      const int64_t rows = graph_.head.rows;
      run_on_threads(int(num_scored), [&](int i) {
        vectors_.bound(logits + i * rows, graph_.logit_bound, rows, logits + i * rows);
      });
    }
    return true;
  }

 private:
  int64_t width() const { return graph_.buffers[graph_.first]; }
  float* buffer(int64_t number) const { return buffers_.numbers.data() + buffers_.firsts[number]; }

  template <class Work>
  void for_each_tile(const Work& work) {
    run_on_threads(int((places_.num + kTileTokens - 1) / kTileTokens), [&](int tile) {
      for (int64_t n = tile * kTileTokens; n < std::min((tile + 1) * kTileTokens, places_.num); ++n) work(n);
    });
  }

  // The row of a token in two outer dims.
  float* row(const lakh_engine_operand& operand, int64_t n, int64_t i = 0, int64_t j = 0) const {
    const int64_t at = operand.offset + i * operand.strides[0] + j * operand.strides[1];
    if (operand.buffer < 0) return const_cast<float*>(operand.numbers) + at;  // only read
    return buffer(operand.buffer) + n * graph_.buffers[operand.buffer] + at;
  }

  const int64_t* indices(const lakh_engine_operand& operand, int64_t n) const {
    return reinterpret_cast<const int64_t*>(row(operand, n));
  }

  void compute(const lakh_engine_node& node, int64_t n) {
    if (node.kind == LAKH_ENGINE_STORE) return store_token(node, n);
    for (int64_t i = 0; i < node.sizes[0]; ++i) {
      for (int64_t j = 0; j < node.sizes[1]; ++j) {
        const float* in[3];
        for (int k = 0; k < 3; ++k) in[k] = row(node.in[k], n, i, j);
        float* const out = row(node.out, n, i, j);
        if (node.kind < LAKH_ENGINE_RMS_NORM) {
          compute_numbers(node, in, out);
        } else {
          compute_row(node, n, in, out);
        }
      }
    }
  }

  void compute_numbers(const lakh_engine_node& node, const float* const* in, float* out) {
    const int64_t size = node.sizes[2], to = node.out.strides[2];
    const int64_t from = node.in[0].strides[2], from_1 = node.in[1].strides[2];
    const bool is_dense = to == 1 && from == 1 && (from_1 == 1 || node.kind > LAKH_ENGINE_DIVIDE);
    const auto each = [&](const auto& compute) {
      for (int64_t i = 0; i < size; ++i) out[i * to] = compute(in[0][i * from], in[1] + i * from_1);
    };
    const float factor = float(node.real);
    switch (node.kind) {
      case LAKH_ENGINE_ADD:
        if (is_dense) return vectors_.add(in[0], in[1], size, out);
        return each([](float a, const float* b) { return a + *b; });
      case LAKH_ENGINE_MULTIPLY:
        if (is_dense) return vectors_.multiply(in[0], in[1], size, out);
        return each([](float a, const float* b) { return a * *b; });
      case LAKH_ENGINE_DIVIDE: return each([](float a, const float* b) { return a / *b; });
      case LAKH_ENGINE_SCALE: return each([&](float a, const float*) { return a * factor; });
      case LAKH_ENGINE_COPY:
        if (is_dense) return void(std::copy(in[0], in[0] + size, out));
        return each([](float a, const float*) { return a; });
      case LAKH_ENGINE_SIGMOID: return each([](float a, const float*) { return 1 / (1 + std::exp(-a)); });
      case LAKH_ENGINE_GELU: return vectors_.gelu(in[0], size, out);
      default: return vectors_.exact_gelu(in[0], size, out);
    }
  }

  void compute_row(const lakh_engine_node& node, int64_t n, const float* const* in, float* out) {
    const int64_t size = node.sizes[2], half = graph_.rotary / 2;
    const auto at_position = [&](const float* tables, int64_t table) {
      return tables + (table * graph_.positions + places_.lengths[n] - 1) * half;
    };
    switch (node.kind) {
      case LAKH_ENGINE_RMS_NORM: return vectors_.norm(in[0], in[1], size, float(node.real), out);
      case LAKH_ENGINE_LAYER_NORM: return vectors_.layer_norm(in[0], in[1], in[2], size, float(node.real), out);
      case LAKH_ENGINE_GATE: return vectors_.gate(in[0], size, out);
      case LAKH_ENGINE_ROTATE:
        std::copy(in[0], in[0] + size, out);
        return vectors_.rotate(out, at_position(graph_.cos, node.whole[0]), at_position(graph_.sin, node.whole[0]), size);
      case LAKH_ENGINE_SOFTMAX: return softmax(in[0], size, out);
      case LAKH_ENGINE_SUM: *out = 0; for (int64_t i = 0; i < size; ++i) *out += in[0][i]; return;
      case LAKH_ENGINE_TOP: return top(in[0], node.whole[0], size, const_cast<int64_t*>(indices(node.out, n)));
      case LAKH_ENGINE_LIMIT_GROUPS: return limit_groups(in[0], size, node.whole[0], node.whole[1], out);
      case LAKH_ENGINE_GATHER:
        for (int64_t i = 0; i < size; ++i) out[i] = in[0][indices(node.in[1], n)[i]];
        return;
      case LAKH_ENGINE_SCATTER:
        for (int64_t i = 0; i < size; ++i) out[indices(node.in[0], n)[i]] = in[1][i];
        return;
      case LAKH_ENGINE_COPY_POSITION: {
        const float* const from = in[0] + (places_.lengths[n] - 1) * size;
        return void(std::copy(from, from + size, out));
      }
      default:
        const float* const from = at_position(node.whole[0] == 0 ? graph_.cos : graph_.sin, node.whole[1]);
        for (int64_t i = 0; i < size; ++i) out[i] = from[i % half];
    }
  }

  void store_token(const lakh_engine_node& node, int64_t n) {
    const lakh_engine_cache own = layer_of(cache_, node.whole[0], graph_.kv_heads, graph_.size);
    const int64_t slot = places_.slots[places_.starts[n] + places_.lengths[n] - 1];
    for (int64_t h = 0; h < graph_.kv_heads; ++h) {
      const int64_t at = h * cache_.capacity + slot;
      store(own.keys, own.key_scales, at, row(node.in[0], n, 0, h), graph_.size);
      store(own.values, own.value_scales, at, row(node.in[1], n, 0, h), graph_.size);
    }
  }

  void attend_cache(const lakh_engine_node& node) {
    const auto& how = *static_cast<const lakh_engine_scores*>(node.weights);
    const lakh_engine_cache own = layer_of(cache_, node.whole[0], graph_.kv_heads, graph_.size);
    const Queries queries = {row(node.in[0], 0), graph_.buffers[node.in[0].buffer], node.sizes[1], node.sizes[2]};
    attend(own, places_, how, queries, graph_.kv_heads, buffer(node.out.buffer));
  }

  // The parts of all tokens are sorted by head, as the tokens of experts are by expert.
  bool multiply_heads(const lakh_engine_node& node) {
    const auto& weights = *static_cast<const lakh_engine_matrices*>(node.weights);
    const int64_t num = places_.num, heads = node.whole[1], columns = node.whole[0], rows = rows_of(weights);
    const float* x = buffer(node.in[0].buffer);
    float* y = buffer(node.out.buffer);
    std::vector<Factor> factors;
    for (int64_t h = 0; h < heads; ++h) factors.push_back({weights.pieces, weights.num_pieces, {h * num, (h + 1) * num}, h});
    if (num == 1) return lakh::multiply(factors, columns, x, heads, y);
    auto &sorted = buffers_.heads_in, &found = buffers_.heads_out;
    sorted.resize(std::max<size_t>(sorted.size(), num * heads * columns));
    found.resize(std::max<size_t>(found.size(), num * heads * rows));
    for (int64_t i = 0; i < num * heads; ++i) {
      std::copy(x + i * columns, x + (i + 1) * columns, &sorted[(i % heads * num + i / heads) * columns]);
    }
    if (!lakh::multiply(factors, columns, sorted.data(), num * heads, found.data())) return false;
    for (int64_t i = 0; i < num * heads; ++i) {
      const float* const from = &found[(i % heads * num + i / heads) * rows];
      std::copy(from, from + rows, y + i * rows);
    }
    return true;
  }

  const lakh_engine_graph& graph_;
  const lakh_engine_cache& cache_;
  const lakh_engine_places& places_;
  Buffers& buffers_;
  const VectorKernels& vectors_;
};

}  // namespace
}  // namespace lakh

extern "C" __attribute__((visibility("default"))) int lakh_engine_forward(
    const lakh_engine_graph* graph, const lakh_engine_cache* cache, const lakh_engine_places* places, const int64_t* ids,
    int64_t num_scored, const int64_t* scored, float* logits) {
  if (!lakh::fits(*cache, *places, graph->kv_heads, graph->kv_heads)) return -1;
  const auto is_known = [&](int64_t id) { return id >= 0 && id < graph->embedding.rows; };
  const auto is_position = [&](int64_t length) { return length <= graph->positions; };
  if (!std::all_of(ids, ids + places->num, is_known)) return -1;
  if (!std::all_of(places->lengths, places->lengths + places->num, is_position)) return -1;
  for (int64_t i = 0; i < num_scored; ++i) {
    if (scored[i] <= (i == 0 ? -1 : scored[i - 1]) || scored[i] >= places->num) return -1;
  }
  thread_local lakh::Buffers buffers;
  buffers.reserve(*graph, places->num);
  lakh::Step step(*graph, *cache, *places, buffers);
  step.embed(ids);
  return step.run() && step.score(num_scored, scored, logits) ? 0 : -1;
}
