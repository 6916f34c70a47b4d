#if BITS == 8
// The activations x of products of 8 bits: PARTS numbers of e5m2 for each, of which each is the remainder of those before it, times
// part_scale. Three parts of 3 bits (and their signs) hold the 8 bits of bf16 exactly. A part of x is a row of bytes, 0 past the end,
// in which the 16-byte units of 1,024 bytes are swizzled as tensor cores read them: 8 rows of 128 bytes.

__device__ __forceinline__ void store_parts(u32 x, int part_bytes, int column, float (&values)[8]) {
  const u32 to = x + (column ^ (column >> 7 & 7) << 4);
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    u32 words[2];
#pragma unroll
    for (int w = 0; w < 2; w++) {
      const u32 low = to_e5m2s(values[4 * w], values[4 * w + 1]), high = to_e5m2s(values[4 * w + 2], values[4 * w + 3]);
      words[w] = low | high << 16;
    }
    store_shared2(to + part * part_bytes, words);
#pragma unroll
    for (int i = 0; i < 8; i++) {  // a number of e5m2 is the upper byte of one of f16
      const u32 bits = words[i / 4] << 8 * (3 - i % 4) >> 16;
      values[i] = (values[i] - from_f16(bits & 0xff00)) * part_scale(part);
    }
  }
}

// The activations that all blocks published.
template <class P>
__device__ void load_activations(const Pair* from, u32 round, u32* x) {
  constexpr int K = P::K, N = (K / 8 + THREADS - 1) / THREADS;
  u32 bits[N][4];
  acquire(from, K / 2, round, bits);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int column = 8 * (threadIdx.x + i * THREADS);
    float values[8];
#pragma unroll
    for (int w = 0; w < 4; w++) values[2 * w] = column < K ? low(bits[i][w]) : 0, values[2 * w + 1] = column < K ? high(bits[i][w]) : 0;
    if (column < P::X_BYTES) store_parts((u32)__cvta_generic_to_shared(x), P::X_BYTES, column, values);
  }
  fence_copies();  // tensor cores see them
  sync_warps();
}

// A row times the gains of the norm; returns the scale that its products must still be multiplied with.
__device__ float load_normed(const Row& row, const Row& gains, u32* x, float* squares) {
  float mine = 0;
#pragma unroll
  for (int i = 0; i < ROW_PARTS; i++) {
    const int column = 8 * (threadIdx.x + i * THREADS);
    float values[8];
#pragma unroll
    for (int w = 0; w < 4; w++) {
      const float a = column < WIDTH ? low(row.bits[i][w]) : 0, b = column < WIDTH ? high(row.bits[i][w]) : 0;
      mine += a * a + b * b;
      values[2 * w] = a * low(gains.bits[i][w]), values[2 * w + 1] = b * high(gains.bits[i][w]);
    }
    if (column < Qkv::X_BYTES) store_parts((u32)__cvta_generic_to_shared(x), Qkv::X_BYTES, column, values);
  }
  fence_copies();
  return norm_scale(mine, squares);
}
#endif
