// Whether the sizes of a graph fit together: a step trusts them.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "lakh_engine.h"
#include "products.h"

namespace lakh {
namespace {

class Check {
 public:
  explicit Check(const lakh_engine_graph& graph) : graph_(graph), limits_(std::max<int64_t>(graph.num_buffers, 0)) {}

  bool accepts_all() {
    const int64_t width = is_buffer(graph_.first) ? graph_.buffers[graph_.first] : -1;
    if (width <= 0 || !is_buffer(graph_.last) || graph_.buffers[graph_.last] != width) return false;
    if (std::any_of(graph_.buffers, graph_.buffers + graph_.num_buffers, [](int64_t size) { return size <= 0; })) return false;
    if (graph_.rotary <= 0 || graph_.rotary % 2 != 0) return false;
    if (graph_.layers <= 0 || graph_.kv_heads <= 0 || graph_.size <= 0) return false;
    if (!is_matrix(graph_.embedding, width) || !is_matrix(graph_.head, width)) return false;
    return std::all_of(graph_.nodes, graph_.nodes + graph_.num_nodes, [&](const auto& node) {
      const auto is_named = [&](const auto& operand) { return operand.buffer < graph_.num_buffers; };
      const bool is_right = is_named(node.out) && std::all_of(node.in, node.in + 3, is_named) && writes_once(node) && accepts(node);
      if (is_right && node.out.buffer >= 0) limits_[node.out.buffer] = node.kind == LAKH_ENGINE_TOP ? node.whole[0] : 0;
      return is_right;
    });
  }

 private:
  bool is_buffer(int64_t number) const { return number >= 0 && number < graph_.num_buffers; }

  static bool is_matrix(const lakh_engine_piece& piece, int64_t columns) {
    return piece.rows > 0 && piece.values != nullptr && is_known(piece, columns);
  }

  bool has(const lakh_engine_operand& operand, int64_t first, int64_t second, int64_t third) const {
    if (operand.buffer < 0) return operand.numbers != nullptr;
    if (!is_buffer(operand.buffer) || operand.offset < 0) return false;
    const int64_t counts[] = {first, second, third};
    int64_t left = graph_.buffers[operand.buffer] - 1 - operand.offset;  // places behind the last number
    for (int i = 0; i < 3; ++i) {
      const int64_t stride = operand.strides[i];
      if (counts[i] <= 0 || stride < 0 || left < 0) return false;
      if (stride > 0 && counts[i] - 1 > left / stride) return false;
      left -= (counts[i] - 1) * stride;
    }
    return left >= 0;
  }

  // A row whose numbers are side by side.
  bool has_row(const lakh_engine_operand& operand, const lakh_engine_node& node, int64_t size) const {
    return operand.strides[2] == 1 && has(operand, node.sizes[0], node.sizes[1], size);
  }

  bool has_indices(const lakh_engine_operand& operand, int64_t count) const {
    return is_buffer(operand.buffer) && operand.offset == 0 && graph_.buffers[operand.buffer] == times(2, count);
  }

  // Indices that a node before has written, of one of `limit` numbers.
  bool has_indices_below(const lakh_engine_operand& operand, int64_t count, int64_t limit) const {
    return has_indices(operand, count) && limits_[operand.buffer] > 0 && limits_[operand.buffer] <= limit;
  }

  bool is_whole(const lakh_engine_operand& operand, int64_t size) const {
    return is_buffer(operand.buffer) && operand.offset == 0 && graph_.buffers[operand.buffer] == size;
  }

  // Each number of the result has its own place, so that the sizes are not larger than the buffer.
  static bool writes_once(const lakh_engine_node& node) {
    if (node.kind >= LAKH_ENGINE_STORE) return true;
    for (int i = 0; i < 3; ++i) {
      if (node.sizes[i] > 1 && node.out.strides[i] <= 0) return false;
    }
    return true;
  }

  static bool is_one_row(const lakh_engine_node& node) { return node.sizes[0] == 1 && node.sizes[1] == 1; }

  bool is_table(int64_t table) const { return table >= 0 && table < graph_.tables; }

  bool is_layer(int64_t layer) const { return layer >= 0 && layer < graph_.layers; }

  bool accepts(const lakh_engine_node& node) const {
    const int64_t size = node.sizes[2], first = node.whole[0];
    const auto& [x, y, z] = node.in;
    const bool has_out = node.out.buffer >= 0 && has_row(node.out, node, size);
    switch (node.kind) {
      case LAKH_ENGINE_ADD:
      case LAKH_ENGINE_MULTIPLY:
      case LAKH_ENGINE_DIVIDE:
        if (!has(y, node.sizes[0], node.sizes[1], size)) return false;
        [[fallthrough]];
      case LAKH_ENGINE_SCALE:
      case LAKH_ENGINE_COPY:
      case LAKH_ENGINE_SIGMOID:
        return node.out.buffer >= 0 && has(node.out, node.sizes[0], node.sizes[1], size) &&
               has(x, node.sizes[0], node.sizes[1], size);
      case LAKH_ENGINE_LAYER_NORM:
        if (!has_row(z, node, size)) return false;
        [[fallthrough]];
      case LAKH_ENGINE_RMS_NORM: return has_out && has_row(x, node, size) && has_row(y, node, size);
      case LAKH_ENGINE_GATE: return has_out && has_row(x, node, 2 * size);
      case LAKH_ENGINE_ROTATE: return has_out && has_row(x, node, size) && size == graph_.rotary && is_table(first);
      case LAKH_ENGINE_GELU:
      case LAKH_ENGINE_EXACT_GELU:
      case LAKH_ENGINE_SOFTMAX: return has_out && has_row(x, node, size);
      case LAKH_ENGINE_SUM: return node.out.buffer >= 0 && has_row(node.out, node, 1) && has_row(x, node, size);
      case LAKH_ENGINE_TOP: return is_one_row(node) && has_indices(node.out, size) && size <= first && has_row(x, node, first);
      case LAKH_ENGINE_LIMIT_GROUPS: {
        const int64_t kept = node.whole[1];
        return is_one_row(node) && has_out && has_row(x, node, size) && first > 0 && size % first == 0 && size >= 2 * first &&
               kept > 0 && kept <= first;
      }
      case LAKH_ENGINE_GATHER: return is_one_row(node) && has_out && has_row(x, node, first) && has_indices_below(y, size, first);
      case LAKH_ENGINE_SCATTER:
        return is_one_row(node) && node.out.buffer >= 0 && has_row(node.out, node, first) && has_indices_below(x, size, first) &&
               has_row(y, node, size);
      case LAKH_ENGINE_COPY_ROTARY: return has_out && size == graph_.rotary && is_table(node.whole[1]);
      case LAKH_ENGINE_COPY_POSITION:
        return is_one_row(node) && has_out && x.buffer < 0 && x.numbers != nullptr && x.offset == 0 && first >= graph_.positions;
      case LAKH_ENGINE_STORE:
        return is_layer(first) && node.sizes[0] == 1 && node.sizes[1] == graph_.kv_heads && size == graph_.size &&
               has_row(x, node, size) && has_row(y, node, size);
      case LAKH_ENGINE_ATTEND:
        return is_layer(first) && node.weights != nullptr && node.sizes[0] == 1 && size == graph_.size &&
               graph_.kv_heads > 0 && node.sizes[1] % graph_.kv_heads == 0 && x.buffer >= 0 && x.strides[1] == size &&
               has_row(x, node, size) && is_whole(node.out, times(node.sizes[1], size));
      case LAKH_ENGINE_PRODUCT:
        return node.weights != nullptr && is_whole(x, first) && is_whole(node.out, rows(node));
      case LAKH_ENGINE_HEAD_PRODUCTS:
        return node.weights != nullptr && is_whole(x, times(first, node.whole[1])) &&
               is_whole(node.out, times(rows(node), node.whole[1]));
      case LAKH_ENGINE_EXPERTS: {
        if (node.weights == nullptr || first <= 0) return false;
        const auto& experts = *static_cast<const lakh_engine_experts*>(node.weights);
        return experts.count > 0 && experts.ffn > 0 && is_whole(x, experts.width) && is_whole(node.out, experts.width) &&
               has_indices_below(y, first, experts.count) && is_whole(z, first) &&
               rows_of(experts.gate_up) == times(2, experts.ffn) && rows_of(experts.down) == experts.width;
      }
      default: return false;
    }
  }

  // The product of two sizes; -1 if one is none.
  static int64_t times(int64_t one, int64_t other) {
    int64_t found;
    return one > 0 && other > 0 && !__builtin_mul_overflow(one, other, &found) ? found : -1;
  }

  static int64_t rows(const lakh_engine_node& node) {
    return rows_of(*static_cast<const lakh_engine_matrices*>(node.weights));
  }

  const lakh_engine_graph& graph_;
  std::vector<int64_t> limits_;  // of the indices in each buffer; 0: other numbers
};

}  // namespace
}  // namespace lakh

extern "C" __attribute__((visibility("default"))) int lakh_engine_check(const lakh_engine_graph* graph) {
  return lakh::Check(*graph).accepts_all() ? 0 : -1;
}
