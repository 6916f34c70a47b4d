// The vector kernels for CPUs with AVX2: the same source, compiled for these instructions.
#include "vector_kernels.h"

#if defined(__AVX2__) && defined(__FMA__)
#define LAKH_VECTOR_KERNELS avx2_vector_kernels
#define LAKH_CPU_RUNS_THEM (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#include "vector_kernels.cpp"
#else
const lakh::VectorKernels* lakh::avx2_vector_kernels() { return nullptr; }
#endif
