// Kernels for AVX-512 VNNI. A few tokens read the row blocks as they are stored; many tokens share panels (vnni_panel.h).
#include "kernels.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__F16C__)
#include "float_product.h"
#include "vnni_dots.h"
#include "vnni_panel.h"

namespace lakh {
namespace {

constexpr int64_t kPanelTokens = 12;  // fewer cost less than unpacking

template <class Dots, int kBits, bool kHasMinimum>
void product(const StoredMatrix& w, Range blocks, const Activations& x, int64_t num_tokens, float* y) {
  const auto few = for_tokens<RowBlock<Dots, kBits, kHasMinimum>>, many = for_panels<kBits, kHasMinimum>;
  (num_tokens < kPanelTokens ? few : many)(w, blocks, x, num_tokens, y);
}

}  // namespace

const Kernels* vnni_kernels() {
  static const Kernels kernels = {"vnni", product<Dots8, 8, false>, product<Dots8, 8, true>,
                                  product<Dots4, 4, true>, multiply_floats, avx512_vector_kernels()};
  const bool has = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl") &&
                   __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("f16c") &&
                   avx512_vector_kernels() != nullptr;
  return has ? &kernels : nullptr;
}

}  // namespace lakh
#else
const lakh::Kernels* lakh::vnni_kernels() { return nullptr; }
#endif
