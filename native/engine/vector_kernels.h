// The parts of a layer that are not products with weights, for one token. Each result depends on nothing but its own
// token, so that a token has the same bits alone and beside others. One implementation for each instruction set.
#pragma once

#include <stdint.h>

namespace lakh {

constexpr int64_t kGroup = 32;  // columns that share a scale
constexpr int kMaxHeads = 4;  // query heads that read a key together

// Keys and values of one head: slots x size, float32, or int8 with a scale for each slot.
struct CachedHead {
  const void* keys;
  const float* key_scales;  // null: float32
  const void* values;
  const float* value_scales;
  bool is_in_memory = true;  // no token before has brought them into the cache of this core
};

// How scores become weights (lakh_engine_scores).
struct Scores {
  float scale, bound;
  const float* sinks;  // of the query heads of one key head; null: none
};

struct VectorKernels {
  // out = softmax(q . keys) values of the `share` query heads of one key head. scores: kMaxHeads x length.
  void (*attend)(const CachedHead& cached, const Scores& how, const float* q, int64_t share, int64_t size,
                 const int64_t* slots, int64_t length, float* out, float* scores);
  // out = x / rms(x) * weight; out may be x.
  void (*norm)(const float* x, const float* weight, int64_t size, float eps, float* out);
  // out = (x - mean) / deviation * weight + bias.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, int64_t size, float eps, float* out);
  // In place: number i of a head pairs with i + size / 2.
  void (*rotate)(float* x, const float* cos, const float* sin, int64_t size);
  // out = silu(gate) * up, where both = gate | up.
  void (*gate)(const float* both, int64_t ffn, float* out);
  // The same with GPT-OSS's bounds and slopes, where gate and up alternate in both.
  void (*clamped_gate)(const float* both, int64_t ffn, float* out);
  // GELU in its approximation by tanh.
  void (*gelu)(const float* x, int64_t size, float* out);
  // GELU by the error function, within 2e-7 of |x| + 1.
  void (*exact_gelu)(const float* x, int64_t size, float* out);
  // out = bound * tanh(x / bound); out may be x.
  void (*bound)(const float* x, float bound, int64_t size, float* out);
  // out = x + y, x * y; out may be one of them.
  void (*add)(const float* x, const float* y, int64_t size, float* out);
  void (*multiply)(const float* x, const float* y, int64_t size, float* out);
  void (*add_scaled)(float* x, const float* y, float scale, int64_t size);
  // x / scale to the nearest integer, where the largest magnitude becomes 127.
  void (*round)(const float* x, int64_t size, int8_t* values, float* scale);
  // The same in groups of 32 numbers, halves away from zero; `sums` and `offsets` as in Activations. The same bits on
  // every instruction set.
  void (*round_groups)(const float* x, int64_t num_groups, int8_t* values, float* scales, float* sums, int32_t* offsets);
};

const VectorKernels* portable_vector_kernels();
// Null where they were not compiled or this CPU does not have them.
const VectorKernels* avx2_vector_kernels();
const VectorKernels* avx512_vector_kernels();

// Those that lakh_engine_select chose.
const VectorKernels& selected_vectors();

}  // namespace lakh
