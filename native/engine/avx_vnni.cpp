// Kernels for CPUs with VNNI instructions of 256 bits and without AVX-512: Intel's for laptops and desktops since 2021.
#include "kernels.h"

#if defined(__AVXVNNI__) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <cpuid.h>

#include "float_product.h"
#include "vnni_dots.h"

namespace lakh {
namespace {

bool cpu_has_avx_vnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1) != 0;
}

}  // namespace

const Kernels* avx_vnni_kernels() {
  static const Kernels kernels = {"avx_vnni",
                                  for_tokens<RowBlock<Dots8, 8, false>>,
                                  for_tokens<RowBlock<Dots8, 8, true>>,
                                  for_tokens<RowBlock<Dots4, 4, true>>,
                                  multiply_floats,
                                  avx2_vector_kernels()};
  return avx2_kernels() != nullptr && cpu_has_avx_vnni() ? &kernels : nullptr;
}

}  // namespace lakh
#else
const lakh::Kernels* lakh::avx_vnni_kernels() { return nullptr; }
#endif
