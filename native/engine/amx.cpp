// Kernels for AMX: products of tiles of 8-bit integers, for many tokens. A few tokens use the kernels for VNNI.
//
// A tile has 16 rows of 64 bytes, so one instruction could multiply 64 columns. Weights and activations have a scale for
// every 32 columns, and an instruction adds all its columns to one sum: a tile of tokens has 32 bytes in a row and a tile
// of weights 8 rows, half of what they hold. For 12 tokens and the 32 rows of a panel, a group of columns takes
//   1 load of 12 x 32 activations, 2 loads of 32 x 16 weights, 2 products, 2 stores of 12 x 16 sums to memory: a tile
//     cannot be moved to a vector register;
//   24 loads, conversions, scalings and additions of vectors of 16 sums (48 additions with minimums), as with VNNI.
// The 24 sums of float32 stay in registers. 16 tokens would need all 32 of them for 32 rows; with 16 rows at a time each
// tile of tokens would be loaded twice. The tiles of two groups are stored before the sums of the two groups before them
// are read again, so that the tile unit can compute while vectors are scaled. Not measured on a CPU with AMX.
// The integers are exact and the float32 operations are those of VNNI (vnni_panel.h), so that the results have the same
// bits.
#include "kernels.h"

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include "amx_permission.h"
#include "weight_panel.h"

namespace lakh {
namespace {

constexpr int kTogether = 12;  // tokens in a tile
// With 16 tokens tiles were slower than VNNI, with 256 they were not (docs/explanation/log.md, 2026-11-19).
constexpr int64_t kFewestTokens = 4 * kTogether;

// What LDTILECFG reads. Tiles 0 to 3 are sums, 4 and 5 tokens, 6 and 7 weights.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, kGroup, kGroup, 64, 64};
  uint8_t rows[16] = {kTogether, kTogether, kTogether, kTogether, kTogether, kTogether, kGroup / 4, kGroup / 4};
};
constexpr TileShapes kShapes;
static_assert(sizeof kShapes == 64, "the size of LDTILECFG's operand");

// The tiles of a thread. Released after use: a thread with tiles has 8 KiB more to save when it is interrupted.
class Tiles {
 public:
  Tiles() { _tile_loadconfig(&kShapes); }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
};

// The sums of products of a group: two halves of the panel, tokens, rows.
typedef int32_t GroupSums[2][kTogether][kHalfRows];

// One group. The numbers of tiles are constants of the instructions: an even group and the odd one after it have their own.
#define LAKH_MULTIPLY_TILES(first, second, tokens, x, stride, weights, to)   \
  do {                                                                       \
    _tile_zero(first);                                                       \
    _tile_zero(second);                                                      \
    _tile_loadd(tokens, x, stride);                                          \
    _tile_loadd(6, weights, kPanelRows * 4);                                 \
    _tile_dpbssd(first, tokens, 6);                                          \
    _tile_loadd(7, (weights) + kHalfRows * 4, kPanelRows * 4);               \
    _tile_dpbssd(second, tokens, 7);                                         \
    _tile_stored(first, (to)[0], kHalfRows * sizeof(int32_t));               \
    _tile_stored(second, (to)[1], kHalfRows * sizeof(int32_t));              \
  } while (false)

// Adds the scaled sums of group g.
template <bool kHasMinimum>
inline __attribute__((always_inline)) void add_scaled(const GroupSums& dots, Panel panel, int64_t g, int64_t groups,
                                                      const Activations& x, int64_t token, __m512 (&sums)[kTogether][2]) {
  const int64_t row = g * kPanelRows;
  const __m512 scales[] = {_mm512_load_ps(panel.scales + row), _mm512_load_ps(panel.scales + row + kHalfRows)};
  __m512 minimums[2] = {};
  if (kHasMinimum) {
    for (int half = 0; half < 2; ++half) minimums[half] = _mm512_load_ps(panel.minimums + row + half * kHalfRows);
  }
#pragma GCC unroll 12
  for (int t = 0; t < kTogether; ++t) {
    const int64_t at = (token + t) * groups + g;
    const __m512 scale = _mm512_set1_ps(x.scales[at]);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(dots[half][t]));
      sums[t][half] = _mm512_fmadd_ps(dot, _mm512_mul_ps(scales[half], scale), sums[t][half]);
      if (kHasMinimum) sums[t][half] = _mm512_fmadd_ps(minimums[half], _mm512_set1_ps(x.sums[at]), sums[t][half]);
    }
  }
}

// The products of a panel with 12 tokens.
template <bool kHasMinimum>
void multiply(Panel panel, const StoredMatrix& w, int64_t block, const Activations& x, int64_t token, float* y) {
  alignas(64) GroupSums dots[4];  // of the two groups whose tiles are stored, and of the two before
  __m512 sums[kTogether][2];
#pragma GCC unroll 12
  for (int t = 0; t < kTogether; ++t) sums[t][0] = sums[t][1] = _mm512_setzero_ps();
  const int64_t groups = w.groups, stride = groups * kGroup;
  const auto values = [&](int64_t g) { return x.values + (token * groups + g) * kGroup; };
  const auto weights = [&](int64_t g) { return panel.values + g * kPanelGroupBytes; };
  for (int64_t g = 0; g < groups + 2; g += 2) {
    if (g < groups) LAKH_MULTIPLY_TILES(0, 1, 4, values(g), stride, weights(g), dots[g % 4]);
    if (g + 1 < groups) LAKH_MULTIPLY_TILES(2, 3, 5, values(g + 1), stride, weights(g + 1), dots[g % 4 + 1]);
    if (g == 0) continue;
    const int64_t before = g - 2;
    add_scaled<kHasMinimum>(dots[before % 4], panel, before, groups, x, token, sums);
    if (before + 1 < groups) add_scaled<kHasMinimum>(dots[before % 4 + 1], panel, before + 1, groups, x, token, sums);
  }
  alignas(64) float rows[kTogether][kPanelRows];
#pragma GCC unroll 12
  for (int t = 0; t < kTogether; ++t) _mm512_store_ps(rows[t], sums[t][0]), _mm512_store_ps(rows[t] + kHalfRows, sums[t][1]);
  for (int t = 0; t < kTogether; ++t) {
    store_panel_rows(_mm512_load_ps(rows[t]), _mm512_load_ps(rows[t] + kHalfRows), block, w, token + t, y);
  }
}

template <int kBits, bool kHasMinimum>
void for_tiles(const StoredMatrix& w, Range blocks, const Activations& x, int64_t num_tokens, float* y) {
  static thread_local PanelMemory memory;
  const Panel panel = memory.panel(w.groups);
  const StoredMatrix own = rows_until(w, blocks.last);
  const Tiles tiles;
  for (int64_t block = blocks.first; block < blocks.last; block += kPanelBlocks) {
    unpack<kBits, kHasMinimum, 0>(w, block, blocks.last, panel);
    asm volatile("" ::: "memory");  // GCC does not know that a tile is loaded from memory
    // The last tokens are 12, too: some are computed twice, to the same bits.
    for (int64_t n = 0; n < num_tokens; n += kTogether) {
      multiply<kHasMinimum>(panel, own, block, x, n + kTogether < num_tokens ? n : num_tokens - kTogether, y);
    }
  }
}

template <int kBits, bool kHasMinimum>
void product(const StoredMatrix& w, Range blocks, const Activations& x, int64_t num_tokens, float* y) {
  static const Kernels& vnni = *vnni_kernels();
  const Product few = kBits == 4 ? vnni.bits_4 : kHasMinimum ? vnni.bits_8_minimum : vnni.bits_8;
  (num_tokens < kFewestTokens ? few : for_tiles<kBits, kHasMinimum>)(w, blocks, x, num_tokens, y);
}

}  // namespace

const Kernels* amx_kernels() {
  const Kernels* const vnni = vnni_kernels();
  if (vnni == nullptr || !has_amx_permission()) return nullptr;
  static const Kernels kernels = {"amx",      product<8, false>, product<8, true>, product<4, true>,
                                  vnni->bits_32, vnni->vectors};
  return &kernels;
}

}  // namespace lakh
#else
const lakh::Kernels* lakh::amx_kernels() { return nullptr; }
#endif
