// The C ABI: rounds activations, picks the kernels and shares row blocks between threads.
#include <string.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <string>
#include <vector>

#include "kernels.h"
#include "lakh_engine.h"
#include "workers.h"

namespace lakh {
namespace {

constexpr int kMaxThreads = 64;
constexpr int64_t kPartBytes = 32 << 10;  // of weights, at least: smaller parts cost more to share than to compute
constexpr int64_t kPartBlocks = 4;        // a part has a multiple of this number of row blocks, or is the last one

struct Scratch {
  std::vector<int8_t> values;
  std::vector<float> scales;
  std::vector<float> sums;
  std::vector<int32_t> offsets;
};

// What one thread computes without a break.
struct Part {
  Product product;
  QuantizedMatrix matrix;
  Range blocks;
};

struct Engine {
  std::mutex mutex;
  Workers workers;
  Scratch scratch;
  std::vector<Part> parts;
  std::vector<const Kernels*> available;
  const Kernels* kernels;
  std::string names;

  Engine() {
    for (auto* found : {vnni_kernels(), avx2_kernels(), dotprod_kernels(), portable_kernels()}) {
      if (found == nullptr) continue;
      available.push_back(found);
      names += (names.empty() ? "" : " ") + std::string(found->name);
    }
    kernels = available.front();
  }
};

Engine& engine() {
  static Engine* const only = new Engine;  // never destroyed: its threads end with the process, also after a fork
  return *only;
}

Activations round_activations(Engine& engine, const float* x, int64_t num, int64_t groups) {
  auto& scratch = engine.scratch;
  if (int64_t(scratch.scales.size()) < num * groups) {
    scratch.values.resize(num * groups * kGroup), scratch.scales.resize(num * groups);
    scratch.sums.resize(num * groups), scratch.offsets.resize(num * groups);
  }
  engine.workers.run(int((num + kTileTokens - 1) / kTileTokens), [&](int tile) {
    const int64_t first = tile * kTileTokens * groups, last = std::min((tile + 1) * kTileTokens, num) * groups;
    engine.kernels->vectors->round_groups(x + first * kGroup, last - first, &scratch.values[first * kGroup],
                                          &scratch.scales[first], &scratch.sums[first], &scratch.offsets[first]);
  });
  return {scratch.values.data(), scratch.scales.data(), scratch.sums.data(), scratch.offsets.data()};
}

}  // namespace

void run_on_threads(int num_parts, const std::function<void(int)>& part) {
  auto& only = engine();
  std::lock_guard<std::mutex> lock(only.mutex);
  only.workers.run(num_parts, part);
}

const VectorKernels& selected_vectors() { return *engine().kernels->vectors; }

}  // namespace lakh

extern "C" {

#define LAKH_EXPORT __attribute__((visibility("default")))

LAKH_EXPORT int lakh_engine_abi(void) { return LAKH_ENGINE_ABI; }

LAKH_EXPORT const char* lakh_engine_kernels(void) { return lakh::engine().names.c_str(); }

LAKH_EXPORT int lakh_engine_select(const char* name) {
  auto& engine = lakh::engine();
  std::lock_guard<std::mutex> lock(engine.mutex);
  for (auto* found : engine.available) {
    if (strcmp(found->name, name) != 0) continue;
    engine.kernels = found;
    return 0;
  }
  return -1;
}

LAKH_EXPORT int lakh_engine_set_threads(int count) {
  auto& engine = lakh::engine();
  std::lock_guard<std::mutex> lock(engine.mutex);
  const int workers = std::min(std::max(count, 1), lakh::kMaxThreads) - 1;
  if (workers != engine.workers.count()) engine.workers.resize(workers);
  return workers + 1;
}

LAKH_EXPORT int lakh_engine_matmul(const lakh_engine_piece* pieces, int64_t num_pieces, int64_t columns, const float* x,
                                   int64_t num, float* y) {
  using namespace lakh;
  if (columns <= 0 || columns % kGroup != 0 || num < 0) return -1;
  int64_t rows = 0;
  for (int64_t i = 0; i < num_pieces; ++i) {
    const auto& piece = pieces[i];
    const bool is_known = piece.bits == 8 || (piece.bits == 4 && piece.minimums != nullptr);
    if (!is_known || piece.rows < 0) return -1;
    rows += piece.rows;
  }
  auto& engine = lakh::engine();
  std::lock_guard<std::mutex> lock(engine.mutex);
  const int64_t groups = columns / kGroup;
  const Activations activations = round_activations(engine, x, num, groups);
  auto& parts = engine.parts;
  parts.clear();
  for (int64_t i = 0, first = 0; i < num_pieces; first += pieces[i++].rows) {
    const auto& piece = pieces[i];
    const QuantizedMatrix w = {static_cast<const uint8_t*>(piece.values), piece.scales, piece.minimums, piece.rows, groups,
                               first, rows};
    const auto* kernels = engine.kernels;
    const Product product =
        piece.bits == 4 ? kernels->bits_4 : piece.minimums != nullptr ? kernels->bits_8_minimum : kernels->bits_8;
    const int64_t blocks = (piece.rows + kBlockRows - 1) / kBlockRows;
    const int64_t wanted = kPartBytes / (columns * kBlockRows * piece.bits / 8);
    const int64_t part_blocks = std::max<int64_t>((wanted + kPartBlocks - 1) / kPartBlocks, 1) * kPartBlocks;
    for (int64_t block = 0; block < blocks; block += part_blocks) {
      parts.push_back({product, w, {block, std::min(block + part_blocks, blocks)}});
    }
  }
  engine.workers.run(int(parts.size()), [&](int number) {
    const Part& part = parts[number];
    part.product(part.matrix, part.blocks, activations, num, y);
  });
  return 0;
}
}
