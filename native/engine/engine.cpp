// The C ABI: rounds activations, picks the kernels and shares row blocks between threads.
#include <string.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <string>
#include <vector>

#include "kernels.h"
#include "lakh_engine.h"
#include "products.h"
#include "workers.h"

namespace lakh {
namespace {

constexpr int kMaxThreads = 64;
constexpr int64_t kPartBytes = 32 << 10;  // of weights, at least: smaller parts cost more to share than to compute
constexpr int64_t kPartBlocks = kPanelBlocks;  // a part has a multiple of this number of row blocks, or is the last one

struct Scratch {
  std::vector<int8_t> values;
  std::vector<float> scales;
  std::vector<float> sums;
  std::vector<int32_t> offsets;
};

// What one thread computes without a break.
struct Part {
  Product product;
  StoredMatrix matrix;
  Range blocks, tokens;
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
    for (auto* found : {amx_kernels(), vnni_kernels(), avx_vnni_kernels(), avx2_kernels(), dotprod_kernels(),
                        portable_kernels()}) {
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
  return {x, scratch.values.data(), scratch.scales.data(), scratch.sums.data(), scratch.offsets.data()};
}

// The activations from this token on.
Activations from_token(const Activations& all, int64_t token, int64_t columns, int64_t groups) {
  const float* const numbers = all.numbers + token * columns;
  if (all.values == nullptr) return {numbers, nullptr, nullptr, nullptr, nullptr};
  const int64_t at = token * groups;
  return {numbers, all.values + at * kGroup, all.scales + at, all.sums + at, all.offsets + at};
}

Product product_of(const Kernels& kernels, const lakh_engine_piece& piece) {
  if (piece.bits == 32) return kernels.bits_32;
  return piece.bits == 4 ? kernels.bits_4 : piece.minimums != nullptr ? kernels.bits_8_minimum : kernels.bits_8;
}

// The rows of an expert; those of every expert fill whole blocks.
StoredMatrix matrix_of(const lakh_engine_piece& piece, int64_t columns, int64_t expert) {
  const int64_t groups = columns / kGroup, blocks = (piece.rows + kBlockRows - 1) / kBlockRows;
  const int64_t stored = piece.bits == 32 ? (blocks + kPanelBlocks - 1) / kPanelBlocks * kPanelBlocks : blocks;
  const int64_t first = expert * stored * kBlockRows;  // row
  const auto* const values = static_cast<const uint8_t*>(piece.values) + first * columns * piece.bits / 8;
  const auto shifted = [&](const uint16_t* halves) { return halves == nullptr ? nullptr : halves + first * groups; };
  return {values, shifted(piece.scales), shifted(piece.minimums), piece.rows, columns, groups, 0, 0};
}

}  // namespace

void run_on_threads(int num_parts, const std::function<void(int)>& part) {
  auto& only = engine();
  std::lock_guard<std::mutex> lock(only.mutex);
  only.workers.run(num_parts, part);
}

bool is_known(const lakh_engine_piece& piece, int64_t columns) {
  if (piece.rows < 0) return false;
  if (piece.bits == 32) return true;
  if (columns % kGroup != 0 || piece.scales == nullptr) return false;
  return piece.bits == 8 || (piece.bits == 4 && piece.minimums != nullptr);
}

bool multiply(const std::vector<Factor>& factors, int64_t columns, const float* x, int64_t num, float* y) {
  if (columns <= 0) return false;
  bool is_rounded = false;
  for (const auto& factor : factors) {
    for (int64_t i = 0; i < factor.num_pieces; ++i) {
      if (!is_known(factor.pieces[i], columns)) return false;
      is_rounded |= factor.pieces[i].bits != 32;
    }
  }
  auto& engine = lakh::engine();
  std::lock_guard<std::mutex> lock(engine.mutex);
  const int64_t groups = columns / kGroup;
  Activations activations = {x, nullptr, nullptr, nullptr, nullptr};
  if (is_rounded) activations = round_activations(engine, x, num, groups);
  auto& parts = engine.parts;
  parts.clear();
  for (const auto& factor : factors) {
    int64_t rows = 0, first = 0;
    for (int64_t i = 0; i < factor.num_pieces; ++i) rows += factor.pieces[i].rows;
    for (int64_t i = 0; i < factor.num_pieces; first += factor.pieces[i++].rows) {
      const auto& piece = factor.pieces[i];
      StoredMatrix w = matrix_of(piece, columns, factor.expert);
      w.first_row = first, w.stride = rows;
      const int64_t blocks = (piece.rows + kBlockRows - 1) / kBlockRows;
      const int64_t wanted = kPartBytes / (columns * kBlockRows * piece.bits / 8);
      const int64_t part_blocks = std::max<int64_t>((wanted + kPartBlocks - 1) / kPartBlocks, 1) * kPartBlocks;
      const Product product = product_of(*engine.kernels, piece);
      for (int64_t block = 0; block < blocks; block += part_blocks) {
        parts.push_back({product, w, {block, std::min(block + part_blocks, blocks)}, factor.tokens});
      }
    }
  }
  engine.workers.run(int(parts.size()), [&](int number) {
    const Part& part = parts[number];
    const auto& [first, last] = part.tokens;
    const Activations own = from_token(activations, first, columns, groups);
    part.product(part.matrix, part.blocks, own, last - first, y + first * part.matrix.stride);
  });
  return true;
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

LAKH_EXPORT const char* lakh_engine_selected(void) { return lakh::engine().kernels->name; }

LAKH_EXPORT int lakh_engine_set_threads(int count) {
  auto& engine = lakh::engine();
  std::lock_guard<std::mutex> lock(engine.mutex);
  const int workers = std::min(std::max(count, 1), lakh::kMaxThreads) - 1;
  if (workers != engine.workers.count()) engine.workers.resize(workers);
  return workers + 1;
}

LAKH_EXPORT int lakh_engine_matmul(const lakh_engine_piece* pieces, int64_t num_pieces, int64_t columns, const float* x,
                                   int64_t num, float* y) {
  if (num < 0) return -1;
  return lakh::multiply({{pieces, num_pieces, {0, num}}}, columns, x, num, y) ? 0 : -1;
}
}
