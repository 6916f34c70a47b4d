// The kernels for CPUs with AVX-512: the same source, compiled for these instructions.
#include "vector_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define LAKH_VECTOR_KERNELS avx512_vector_kernels
#define LAKH_CPU_RUNS_THEM                                                          \
  (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&       \
   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma"))
#include "vector_kernels.cpp"
#else
const lakh::VectorKernels* lakh::avx512_vector_kernels() { return nullptr; }
#endif
