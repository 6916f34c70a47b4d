// Products of panels of 32 rows with many tokens on AVX-512 VNNI. The integers are exact and the float32 operations of a
// row are those of the row blocks (rows_256.h), so that the results have the same bits.
#pragma once

#include "weight_panel.h"

namespace lakh {
namespace {

// The products of a panel with T tokens. The 4 T sums of integers and floats stay in registers.
template <int kBits, bool kHasMinimum, int T>
void multiply(Panel panel, const StoredMatrix& w, int64_t block, const Activations& x, int64_t token, float* y) {
  __m512 sums[T][2];
  for (int t = 0; t < T; ++t) sums[t][0] = sums[t][1] = _mm512_setzero_ps();
  const uint8_t* values = panel.values;
  for (int64_t g = 0; g < w.groups; ++g) {
    __m512i dots[T][2];
    const int8_t* tokens[T];
    for (int t = 0; t < T; ++t) {
      const int64_t at = (token + t) * w.groups + g;
      tokens[t] = x.values + at * kGroup;
      dots[t][0] = dots[t][1] = kBits == 8 ? _mm512_set1_epi32(x.offsets[at]) : _mm512_setzero_si512();
    }
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad, values += kPanelRows * 4) {
      const __m512i first = _mm512_load_si512(values), second = _mm512_load_si512(values + 64);
      for (int t = 0; t < T; ++t) {
        int32_t q;
        memcpy(&q, tokens[t] + 4 * quad, sizeof q);
        const __m512i all = _mm512_set1_epi32(q);
        dots[t][0] = _mm512_dpbusd_epi32(dots[t][0], first, all);
        dots[t][1] = _mm512_dpbusd_epi32(dots[t][1], second, all);
      }
    }
    for (int half = 0; half < 2; ++half) {
      const int64_t at_rows = g * kPanelRows + half * kHalfRows;
      const __m512 scale = _mm512_load_ps(panel.scales + at_rows);
      for (int t = 0; t < T; ++t) {
        const int64_t at = (token + t) * w.groups + g;
        const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x.scales[at]));
        sums[t][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[t][half]), both, sums[t][half]);
        if (kHasMinimum) {
          const __m512 minimum = _mm512_load_ps(panel.minimums + at_rows);
          sums[t][half] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x.sums[at]), sums[t][half]);
        }
      }
    }
  }
  for (int t = 0; t < T; ++t) store_panel_rows(sums[t][0], sums[t][1], block, w, token + t, y);
}

template <int kBits, bool kHasMinimum>
void for_panels(const StoredMatrix& w, Range blocks, const Activations& x, int64_t num_tokens, float* y) {
  static thread_local PanelMemory memory;
  const Panel panel = memory.panel(w.groups);
  const StoredMatrix own = rows_until(w, blocks.last);
  for (int64_t block = blocks.first; block < blocks.last; block += kPanelBlocks) {
    unpack<kBits, kHasMinimum, 0x80>(w, block, blocks.last, panel);
    int64_t n = 0;
    for (; n + 6 <= num_tokens; n += 6) multiply<kBits, kHasMinimum, 6>(panel, own, block, x, n, y);
    switch (num_tokens - n) {
      case 5: multiply<kBits, kHasMinimum, 5>(panel, own, block, x, n, y); break;
      case 4: multiply<kBits, kHasMinimum, 4>(panel, own, block, x, n, y); break;
      case 3: multiply<kBits, kHasMinimum, 3>(panel, own, block, x, n, y); break;
      case 2: multiply<kBits, kHasMinimum, 2>(panel, own, block, x, n, y); break;
      case 1: multiply<kBits, kHasMinimum, 1>(panel, own, block, x, n, y); break;
      default: break;
    }
  }
}

}  // namespace
}  // namespace lakh
