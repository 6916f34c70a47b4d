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
constexpr int64_t kTile = 16;  // numbers of a value whose sums stay in registers

// Keys or values of one head: float32, or int8 with a scale for each slot.
template <class Number>
struct Cached {
  const Number* numbers;
  const float* scales;  // null: float32

  float scale(int64_t slot) const { return scales == nullptr ? 1.0f : scales[slot]; }
};

// Asks for the numbers of one slot: a step reads them once, between the weights of two layers, so that they come from
// memory each time.
template <class Number>
inline __attribute__((always_inline)) void prefetch(const Number* numbers, int64_t size) {
  const char* const first = reinterpret_cast<const char*>(numbers);
  for (int64_t at = 0; at < size * int64_t(sizeof(Number)); at += kLineBytes) __builtin_prefetch(first + at);
}

// q[h] . key for S keys and H heads: a key is loaded once for all heads, a query once for all keys.
template <int H, int S, class Number>
inline __attribute__((always_inline)) void score_keys(const float* q, int64_t size, const Number* const* keys,
                                                      float sums[H][S]) {
  Floats parts[H][S] = {};
  int64_t d = 0;
  for (; d + kFloats <= size; d += kFloats) {
    Floats key[S];
    for (int s = 0; s < S; ++s) key[s] = load(keys[s] + d);
    for (int h = 0; h < H; ++h) {
      const Floats query = load(q + h * size + d);
      for (int s = 0; s < S; ++s) parts[h][s] += query * key[s];
    }
  }
  for (int h = 0; h < H; ++h) {
    for (int s = 0; s < S; ++s) {
      sums[h][s] = total(parts[h][s]);
      for (int64_t rest = d; rest < size; ++rest) sums[h][s] += q[h * size + rest] * float(keys[s][rest]);
    }
  }
}

// scores[h * length + s] = q[h] . key s, for H heads. Asks for the values on the way.
template <int H, class Number>
inline __attribute__((always_inline)) void score(const float* q, int64_t size, Cached<Number> keys,
                                                 Cached<Number> values, const int64_t* slots, int64_t length,
                                                 float factor, float* scores) {
  const auto ask = [&](int64_t from) {
    for (int64_t s = from; s < from + kKeysTogether && s < length; ++s) prefetch(keys.numbers + slots[s] * size, size);
  };
  for (int64_t s = 0; s < kKeysAhead; s += kKeysTogether) ask(s);
  int64_t s = 0;
  for (; s + kKeysTogether <= length; s += kKeysTogether) {
    ask(s + kKeysAhead);
    const Number* own[kKeysTogether];
    for (int i = 0; i < kKeysTogether; ++i) {
      own[i] = keys.numbers + slots[s + i] * size;
      prefetch(values.numbers + slots[s + i] * size, size);
    }
    float sums[H][kKeysTogether];
    score_keys<H, kKeysTogether>(q, size, own, sums);
    for (int h = 0; h < H; ++h) {
      for (int i = 0; i < kKeysTogether; ++i) scores[h * length + s + i] = sums[h][i] * (factor * keys.scale(slots[s + i]));
    }
  }
  for (; s < length; ++s) {
    const Number* const own[1] = {keys.numbers + slots[s] * size};
    float sums[H][1];
    score_keys<H, 1>(q, size, own, sums);
    for (int h = 0; h < H; ++h) scores[h * length + s] = sums[h][0] * (factor * keys.scale(slots[s]));
  }
}

// Softmax in place; the value's scale becomes part of the weight.
template <class Number>
inline __attribute__((always_inline)) void weigh(float* scores, int64_t length, Cached<Number> values,
                                                 const int64_t* slots) {
  float largest = scores[0];
  for (int64_t s = 1; s < length; ++s) largest = largest < scores[s] ? scores[s] : largest;
  float total = 0;
  for (int64_t s = 0; s < length; ++s) {
    const float e = fast_exp(scores[s] - largest);
    scores[s] = e;
    total += e;
  }
  const float inverse = 1.0f / total;
  for (int64_t s = 0; s < length; ++s) scores[s] *= inverse;
  if (values.scales == nullptr) return;
  for (int64_t s = 0; s < length; ++s) scores[s] *= values.scales[slots[s]];
}

// out[h] = the weighted sum of values, for H heads.
template <int H, class Number>
inline __attribute__((always_inline)) void combine(const float* weights, int64_t size, Cached<Number> values,
                                                   const int64_t* slots, int64_t length, float* out) {
  int64_t first = 0;
  for (; first + kTile <= size; first += kTile) {
    Floats sums[H][kTile / kFloats] = {};
    for (int64_t s = 0; s < length; ++s) {
      const Number* const value = values.numbers + slots[s] * size + first;
      Floats parts[kTile / kFloats];
      for (int i = 0; i < kTile / kFloats; ++i) parts[i] = load(value + kFloats * i);
      for (int h = 0; h < H; ++h) {
        const float weight = weights[h * length + s];
        for (int i = 0; i < kTile / kFloats; ++i) sums[h][i] += weight * parts[i];
      }
    }
    for (int h = 0; h < H; ++h) memcpy(out + h * size + first, sums[h], sizeof sums[h]);
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
                                                        Cached<Number> values, const int64_t* slots, int64_t length,
                                                        float* out, float* scores) {
  score<H>(q, size, keys, values, slots, length, 1.0f / __builtin_sqrtf(float(size)), scores);
  for (int h = 0; h < H; ++h) weigh(scores + h * length, length, values, slots);
  combine<H>(scores, size, values, slots, length, out);
}

// The query heads of one key head, which read its keys and values together.
template <class Number>
inline __attribute__((always_inline)) void attend_group(const float* q, int64_t share, int64_t size, Cached<Number> k,
                                                        Cached<Number> v, const int64_t* slots, int64_t length,
                                                        float* out, float* scores) {
  for (int64_t h = 0; h < share; h += kMaxHeads) {
    const float* const from = q + h * size;
    float* const to = out + h * size;
    switch (share - h < kMaxHeads ? share - h : kMaxHeads) {
      case 1: attend_heads<1>(from, size, k, v, slots, length, to, scores); break;
      case 2: attend_heads<2>(from, size, k, v, slots, length, to, scores); break;
      case 3: attend_heads<3>(from, size, k, v, slots, length, to, scores); break;
      default: attend_heads<4>(from, size, k, v, slots, length, to, scores); break;
    }
  }
}

template <class Number>
Cached<Number> keys_of(const CachedHead& cached) {
  return {static_cast<const Number*>(cached.keys), cached.key_scales};
}

template <class Number>
Cached<Number> values_of(const CachedHead& cached) {
  return {static_cast<const Number*>(cached.values), cached.value_scales};
}

void attend(const CachedHead& cached, const float* q, int64_t share, int64_t size, const int64_t* slots, int64_t length,
            float* out, float* scores) {
  if (cached.key_scales == nullptr) {
    attend_group<float>(q, share, size, keys_of<float>(cached), values_of<float>(cached), slots, length, out, scores);
  } else {
    attend_group<int8_t>(q, share, size, keys_of<int8_t>(cached), values_of<int8_t>(cached), slots, length, out, scores);
  }
}

void norm(const float* x, const float* weight, int64_t size, float eps, float* out) {
  float sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / __builtin_sqrtf(sum / float(size) + eps);
  for (int64_t i = 0; i < size; ++i) out[i] = x[i] * scale * weight[i];
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

void add(float* x, const float* y, int64_t size) {
  for (int64_t i = 0; i < size; ++i) x[i] += y[i];
}

void round(const float* x, int64_t size, int8_t* values, float* scale) {
  float largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    const float magnitude = x[i] < 0 ? -x[i] : x[i];
    largest = largest < magnitude ? magnitude : largest;
  }
  *scale = largest / 127.0f;
  const float inverse = *scale > 0 ? 1.0f / *scale : 0.0f;
  for (int64_t i = 0; i < size; ++i) {
    float scaled = x[i] * inverse;  // the inverse of a tiny scale is infinite
    scaled = scaled < -127.0f ? -127.0f : scaled > 127.0f ? 127.0f : scaled;
    values[i] = int8_t(__builtin_rintf(scaled));
  }
}

}  // namespace

const VectorKernels* LAKH_VECTOR_KERNELS() {
  static constexpr VectorKernels kernels = {attend, norm, rotate, gate, add, round};
  return LAKH_CPU_RUNS_THEM ? &kernels : nullptr;
}

}  // namespace lakh
