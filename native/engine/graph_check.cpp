// Whether the sizes of a graph fit together: a step trusts them.
#include <algorithm>

#include "kernels.h"
#include "lakh_engine.h"
#include "products.h"

namespace lakh {
namespace {

class Check {
 public:
  explicit Check(const lakh_engine_graph& graph) : graph_(graph) {}

  bool accepts_all() const {
    const int64_t width = is_buffer(graph_.first) ? graph_.buffers[graph_.first] : -1;
    if (width <= 0 || !is_buffer(graph_.last) || graph_.buffers[graph_.last] != width) return false;
    if (graph_.rotary <= 0 || graph_.rotary % 2 != 0) return false;
    if (graph_.embedding.bits != 32 && width % kGroup != 0) return false;
    return std::all_of(graph_.nodes, graph_.nodes + graph_.num_nodes, [&](const auto& node) { return accepts(node); });
  }

 private:
  bool is_buffer(int64_t number) const { return number >= 0 && number < graph_.num_buffers; }

  bool has(const lakh_engine_operand& operand, int64_t first, int64_t second, int64_t third) const {
    if (operand.buffer < 0) return operand.numbers != nullptr;
    if (!is_buffer(operand.buffer) || operand.offset < 0) return false;
    const int64_t counts[] = {first, second, third};
    int64_t last = operand.offset;
    for (int i = 0; i < 3; ++i) {
      if (counts[i] <= 0 || operand.strides[i] < 0) return false;
      last += (counts[i] - 1) * operand.strides[i];
    }
    return last < graph_.buffers[operand.buffer];
  }

  // A row whose numbers are side by side.
  bool has_row(const lakh_engine_operand& operand, const lakh_engine_node& node, int64_t size) const {
    return operand.strides[2] == 1 && has(operand, node.sizes[0], node.sizes[1], size);
  }

  bool has_indices(const lakh_engine_operand& operand, int64_t count) const {
    return is_buffer(operand.buffer) && operand.offset == 0 && graph_.buffers[operand.buffer] == 2 * count;
  }

  bool is_whole(const lakh_engine_operand& operand, int64_t size) const {
    return is_buffer(operand.buffer) && operand.offset == 0 && graph_.buffers[operand.buffer] == size;
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
      case LAKH_ENGINE_GATHER: return is_one_row(node) && has_out && has_row(x, node, first) && has_indices(y, size);
      case LAKH_ENGINE_SCATTER:
        return is_one_row(node) && node.out.buffer >= 0 && has_row(node.out, node, first) && has_indices(x, size) &&
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
               has_row(x, node, size) && is_whole(node.out, node.sizes[1] * size);
      case LAKH_ENGINE_PRODUCT:
        return node.weights != nullptr && is_whole(x, first) && is_whole(node.out, rows(node));
      case LAKH_ENGINE_HEAD_PRODUCTS:
        return node.weights != nullptr && is_whole(x, first * node.whole[1]) &&
               is_whole(node.out, rows(node) * node.whole[1]);
      case LAKH_ENGINE_EXPERTS: {
        if (node.weights == nullptr || first <= 0) return false;
        const auto& experts = *static_cast<const lakh_engine_experts*>(node.weights);
        return is_whole(x, experts.width) && is_whole(node.out, experts.width) && has_indices(y, first) &&
               is_whole(z, first) && rows_of(experts.gate_up) == 2 * experts.ffn && rows_of(experts.down) == experts.width;
      }
      default: return false;
    }
  }

  static int64_t rows(const lakh_engine_node& node) {
    return rows_of(*static_cast<const lakh_engine_matrices*>(node.weights));
  }

  const lakh_engine_graph& graph_;
};

}  // namespace
}  // namespace lakh

extern "C" __attribute__((visibility("default"))) int lakh_engine_check(const lakh_engine_graph* graph) {
  return lakh::Check(*graph).accepts_all() ? 0 : -1;
}
