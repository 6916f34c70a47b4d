// Attention over a paged cache, norms, rotary positions and the gate of the feed-forward. Compiled with
// -fassociative-math, so that sums become vector code; vector_kernels_avx2.cpp compiles this file again. Without
// containers: their code would be shared with files for other CPUs.
#include "vector_kernels.h"

#include "vector_math.h"

#ifndef LAKH_VECTOR_KERNELS
#define LAKH_VECTOR_KERNELS portable_vector_kernels
#define LAKH_CPU_RUNS_THEM true
#endif

namespace lakh {
namespace {

constexpr int64_t kKeysTogether = 4;
constexpr int64_t kKeysAhead = 8;  // keys that are asked for before they are used
constexpr int64_t kLineBytes = 64;
constexpr int kVectors = kFloats == 8 ? 2 : 4;  // of a value, whose sums stay in registers: AVX2 has 16 of them, others 32

// Keys or values of one head: float32, or int8 with a scale for each slot.
template <class Number>
struct Cached {
  const Number* numbers;
  const float* scales;  // null: float32

  float scale(int64_t slot) const { return sizeof(Number) == sizeof(float) ? 1.0f : scales[slot]; }
};

// Asks for the numbers of one slot: a step reads them once, between the weights of two layers, so that they come from
// memory each time.
template <class Number>
inline __attribute__((always_inline)) void prefetch(const Number* numbers, int64_t size) {
  const char* const first = reinterpret_cast<const char*>(numbers);
  for (int64_t at = 0; at < size * int64_t(sizeof(Number)); at += kLineBytes) __builtin_prefetch(first + at);
}

// q[h] . key for 4 keys and H heads: a key is loaded once for all heads, a query once for all keys.
template <int H, class Number>
inline __attribute__((always_inline)) void score_keys(const float* q, int64_t size, const Number* const* keys,
                                                      Quad* sums) {
  Floats parts[H][kKeysTogether];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
    for (int s = 0; s < kKeysTogether; ++s) parts[h][s] = Floats{};
  }
  int64_t d = 0;
  for (; d + kFloats <= size; d += kFloats) {
    Floats key[kKeysTogether];
#pragma GCC unroll 4
    for (int s = 0; s < kKeysTogether; ++s) key[s] = load(keys[s] + d);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const Floats query = load(q + h * size + d);
#pragma GCC unroll 4
      for (int s = 0; s < kKeysTogether; ++s) parts[h][s] += query * key[s];
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
    sums[h] = totals(parts[h]);
    for (int64_t rest = d; rest < size; ++rest) {
      const Quad key = {float(keys[0][rest]), float(keys[1][rest]), float(keys[2][rest]), float(keys[3][rest])};
      sums[h] += q[h * size + rest] * key;
    }
  }
}

// scores[h * length + s] = q[h] . key s, for H heads. Where they are in memory, asks for keys ahead and for the values.
template <int H, class Number>
inline __attribute__((always_inline)) void score(const float* q, int64_t size, Cached<Number> keys,
                                                 Cached<Number> values, bool is_in_memory, const int64_t* slots,
                                                 int64_t length, float factor, float* scores) {
  const auto ask = [&](int64_t from) {
    for (int64_t s = from; s < from + kKeysTogether && s < length; ++s) prefetch(keys.numbers + slots[s] * size, size);
  };
  for (int64_t s = 0; is_in_memory && s < kKeysAhead; s += kKeysTogether) ask(s);
  for (int64_t s = 0; s < length; s += kKeysTogether) {
    const int64_t count = length - s < kKeysTogether ? length - s : kKeysTogether;
    const Number* own[kKeysTogether];
    // The last keys are computed as 4, some of them several times, so that every key has the same order of additions.
    for (int i = 0; i < kKeysTogether; ++i) own[i] = keys.numbers + slots[s + (i < count ? i : count - 1)] * size;
    if (is_in_memory) {
      ask(s + kKeysAhead);
      for (int i = 0; i < count; ++i) prefetch(values.numbers + slots[s + i] * size, size);
    }
    Quad sums[H], factors = {};
    score_keys<H>(q, size, own, sums);
    for (int i = 0; i < kKeysTogether; ++i) factors[i] = factor * keys.scale(slots[s + (i < count ? i : count - 1)]);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const Quad found = sums[h] * factors;
      if (count == kKeysTogether) {
        memcpy(scores + h * length + s, &found, sizeof found);
      } else {
        for (int i = 0; i < count; ++i) scores[h * length + s + i] = found[i];
      }
    }
  }
}

// Softmax in place; the value's scale becomes part of the weight.
template <class Number>
inline __attribute__((always_inline)) void weigh(float* scores, int64_t length, float bound, const float* sink,
                                                 Cached<Number> values, const int64_t* slots) {
  if (bound > 0) {
    const float inverse = 1.0f / bound;
    for (int64_t s = 0; s < length; ++s) scores[s] = bound * fast_tanh(scores[s] * inverse);
  }
  float largest = largest_of(scores, length);
  if (sink != nullptr && largest < *sink) largest = *sink;
  float total = 0;
  for (int64_t s = 0; s < length; ++s) {
    const float e = fast_exp(scores[s] - largest);
    scores[s] = e;
    total += e;
  }
  if (sink != nullptr) total += fast_exp(*sink - largest);
  const float inverse = 1.0f / total;
  for (int64_t s = 0; s < length; ++s) scores[s] *= inverse;
  if (values.scales == nullptr) return;
  for (int64_t s = 0; s < length; ++s) scores[s] *= values.scales[slots[s]];
}

// The same for V vectors of numbers from `first` on, whose sums stay in registers.
template <int H, int V, class Number>
inline __attribute__((always_inline)) void combine_vectors(const float* weights, int64_t size, Cached<Number> values,
                                                           const int64_t* slots, int64_t length, int64_t first,
                                                           float* out) {
  Floats sums[H][V] = {};
  for (int64_t s = 0; s < length; ++s) {
    const Number* const value = values.numbers + slots[s] * size + first;
    Floats parts[V];
    for (int i = 0; i < V; ++i) parts[i] = load(value + kFloats * i);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const float weight = weights[h * length + s];
      for (int i = 0; i < V; ++i) sums[h][i] += weight * parts[i];
    }
  }
  for (int h = 0; h < H; ++h) memcpy(out + h * size + first, sums[h], sizeof sums[h]);
}

// out[h] = the weighted sum of values, for H heads.
template <int H, class Number>
inline __attribute__((always_inline)) void combine(const float* weights, int64_t size, Cached<Number> values,
                                                   const int64_t* slots, int64_t length, float* out) {
  int64_t first = 0;
  for (; first + kVectors * kFloats <= size; first += kVectors * kFloats) {
    combine_vectors<H, kVectors>(weights, size, values, slots, length, first, out);
  }
  for (; first + kFloats <= size; first += kFloats) {
    combine_vectors<H, 1>(weights, size, values, slots, length, first, out);
  }
  for (; first < size; ++first) {
    for (int h = 0; h < H; ++h) {
      float sum = 0;
      for (int64_t s = 0; s < length; ++s) sum += weights[h * length + s] * float(values.numbers[slots[s] * size + first]);
      out[h * size + first] = sum;
    }
  }
}

template <int H, class Number>
inline __attribute__((always_inline)) void attend_heads(const float* q, int64_t size, Cached<Number> keys,
                                                        Cached<Number> values, bool is_in_memory, const Scores& how,
                                                        int64_t head, const int64_t* slots, int64_t length, float* out,
                                                        float* scores) {
  score<H>(q, size, keys, values, is_in_memory, slots, length, how.scale, scores);
  for (int h = 0; h < H; ++h) {
    const float* const sink = how.sinks == nullptr ? nullptr : how.sinks + head + h;
    weigh(scores + h * length, length, how.bound, sink, values, slots);
  }
  combine<H>(scores, size, values, slots, length, out);
}

// The query heads of one key head, which read its keys and values together.
template <class Number>
void attend_cached(const CachedHead& cached, const Scores& how, const float* q, int64_t share, int64_t size,
                   const int64_t* slots, int64_t length, float* out, float* scores) {
  const Cached<Number> k = {static_cast<const Number*>(cached.keys), cached.key_scales};
  const Cached<Number> v = {static_cast<const Number*>(cached.values), cached.value_scales};
  const bool is_far = cached.is_in_memory;
  for (int64_t h = 0; h < share; h += kMaxHeads) {
    const float* const from = q + h * size;
    float* const to = out + h * size;
    switch (share - h < kMaxHeads ? share - h : kMaxHeads) {
      case 1: attend_heads<1>(from, size, k, v, is_far, how, h, slots, length, to, scores); break;
      case 2: attend_heads<2>(from, size, k, v, is_far, how, h, slots, length, to, scores); break;
      case 3: attend_heads<3>(from, size, k, v, is_far, how, h, slots, length, to, scores); break;
      default: attend_heads<4>(from, size, k, v, is_far, how, h, slots, length, to, scores); break;
    }
  }
}

void attend(const CachedHead& cached, const Scores& how, const float* q, int64_t share, int64_t size, const int64_t* slots,
            int64_t length, float* out, float* scores) {
  (cached.key_scales == nullptr ? attend_cached<float> : attend_cached<int8_t>)(cached, how, q, share, size, slots, length,
                                                                                out, scores);
}

void norm(const float* x, const float* weight, int64_t size, float eps, float* out) {
  float sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / __builtin_sqrtf(sum / float(size) + eps);
  for (int64_t i = 0; i < size; ++i) out[i] = x[i] * scale * weight[i];
}

void layer_norm(const float* x, const float* weight, const float* bias, int64_t size, float eps, float* out) {
  float total = 0, squares = 0;
  for (int64_t i = 0; i < size; ++i) total += x[i];
  const float mean = total / float(size);
  for (int64_t i = 0; i < size; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const float scale = 1.0f / __builtin_sqrtf(squares / float(size) + eps);
  for (int64_t i = 0; i < size; ++i) out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

void rotate(float* x, const float* cos, const float* sin, int64_t size) {
  float* const second = x + size / 2;
  for (int64_t i = 0; i < size / 2; ++i) {
    const float left = x[i], right = second[i];
    x[i] = left * cos[i] - right * sin[i];
    second[i] = right * cos[i] + left * sin[i];
  }
}

void gate(const float* both, int64_t ffn, float* out) {
  for (int64_t j = 0; j < ffn; ++j) out[j] = both[j] / (1.0f + fast_exp(-both[j])) * both[ffn + j];
}

void clamped_gate(const float* both, int64_t ffn, float* out) {
  constexpr float kLimit = 7.0f, kSlope = 1.702f;  // of the released GPT-OSS models
  for (int64_t j = 0; j < ffn; ++j) {
    float gate = both[2 * j], up = both[2 * j + 1];
    gate = gate > kLimit ? kLimit : gate;
    up = up < -kLimit ? -kLimit : up;
    up = up > kLimit ? kLimit : up;
    out[j] = (up + 1.0f) * gate / (1.0f + fast_exp(-kSlope * gate));
  }
}

// 0.5 * x * (1 + tanh(u)) as x times the sigmoid of 2 u, which loses no digits where tanh is near -1.
void gelu(const float* x, int64_t size, float* out) {
  constexpr float kDouble = -2.0f * 0.7978845608f;  // -2 sqrt(2 / pi)
  for (int64_t i = 0; i < size; ++i) {
    const float u = x[i] + 0.044715f * x[i] * x[i] * x[i];
    out[i] = x[i] / (1.0f + fast_exp(kDouble * u));
  }
}

// x times half of 1 + erf(x / sqrt(2)), the error function as in Abramowitz and Stegun 7.1.26: 1 - p(t) e^(-u^2) for u >= 0.
void exact_gelu(const float* x, int64_t size, float* out) {
  for (int64_t i = 0; i < size; ++i) {
    const float u = 0.70710678f * __builtin_fabsf(x[i]);
    const float t = 1.0f / (1.0f + 0.3275911f * u);
    float p = 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const float tail = 0.5f * p * t * fast_exp(-u * u);  // of the normal distribution, beyond |x|
    out[i] = x[i] * (x[i] < 0.0f ? tail : 1.0f - tail);
  }
}

void bound(const float* x, float bound, int64_t size, float* out) {
  const float inverse = 1.0f / bound;
  for (int64_t i = 0; i < size; ++i) out[i] = bound * fast_tanh(x[i] * inverse);
}

void add(const float* x, const float* y, int64_t size, float* out) {
  for (int64_t i = 0; i < size; ++i) out[i] = x[i] + y[i];
}

void multiply(const float* x, const float* y, int64_t size, float* out) {
  for (int64_t i = 0; i < size; ++i) out[i] = x[i] * y[i];
}

void add_scaled(float* x, const float* y, float scale, int64_t size) {
  for (int64_t i = 0; i < size; ++i) x[i] += scale * y[i];
}

// Of numbers so small that the inverse would be infinite, none: they become zeros.
inline __attribute__((always_inline)) float inverse_of(float scale) {
  constexpr float kSmallestNormal = 1.17549435e-38f;
  return scale >= kSmallestNormal ? 1.0f / scale : 0.0f;
}

// A NaN becomes -127: it has no integer. The scale keeps it, and so do products.
inline __attribute__((always_inline)) float clamp_scaled(float scaled) {
  scaled = scaled > -127.0f ? scaled : -127.0f;
  return scaled > 127.0f ? 127.0f : scaled;
}

void round(const float* x, int64_t size, int8_t* values, float* scale) {
  float largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    const float magnitude = x[i] < 0 ? -x[i] : x[i];
    largest = largest < magnitude ? magnitude : largest;
  }
  *scale = largest / 127.0f;
  const float inverse = inverse_of(*scale);
  for (int64_t i = 0; i < size; ++i) values[i] = int8_t(__builtin_rintf(clamp_scaled(x[i] * inverse)));
}

// Every loop is vector code: the largest magnitude is found in the bits, whose order is that of positive numbers.
inline __attribute__((always_inline)) void round_group(const float* x, int8_t* values, float* scale, float* sum,
                                                       int32_t* offset) {
  int32_t largest_bits = 0;
  for (int j = 0; j < kGroup; ++j) {
    int32_t bits;
    memcpy(&bits, x + j, sizeof bits);
    bits &= 0x7fffffff;
    largest_bits = largest_bits < bits ? bits : largest_bits;
  }
  float largest;
  memcpy(&largest, &largest_bits, sizeof largest);
  *scale = largest / 127.0f;
  const float inverse = inverse_of(*scale);
  int32_t rounded[kGroup];
  int32_t total = 0;
  for (int j = 0; j < kGroup; ++j) {
    const float scaled = clamp_scaled(x[j] * inverse);
    rounded[j] = int32_t(scaled + __builtin_copysignf(0.5f, scaled));
  }
  for (int j = 0; j < kGroup; ++j) total += rounded[j];
  for (int j = 0; j < kGroup; ++j) values[j] = int8_t(rounded[j]);
  *sum = *scale * float(total);
  *offset = -128 * total;
}

void round_groups(const float* x, int64_t num_groups, int8_t* values, float* scales, float* sums, int32_t* offsets) {
  for (int64_t g = 0; g < num_groups; ++g) round_group(x + g * kGroup, values + g * kGroup, scales + g, sums + g, offsets + g);
}

}  // namespace

const VectorKernels* LAKH_VECTOR_KERNELS() {
  static constexpr VectorKernels kernels = {attend,     norm,  layer_norm, rotate,   gate,       clamped_gate, gelu,
                                             exact_gelu, bound, add,        multiply, add_scaled, round,        round_groups};
  return LAKH_CPU_RUNS_THEM ? &kernels : nullptr;
}

}  // namespace lakh
