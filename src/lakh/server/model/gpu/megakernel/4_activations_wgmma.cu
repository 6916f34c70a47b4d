#if WGMMA
// The activations x of products of four warps: PARTS numbers for each, of which each is the remainder of those before it, times
// part_scale. With 8 bits three parts of e5m2, of 3 bits and their signs, hold the 8 bits of bf16 exactly; with 16 bits two parts of
// bf16 hold 16 bits. A part of x is a row of bytes, 0 past the end, in which the 16-byte units of 1,024 bytes are swizzled as tensor
// cores read them: 8 rows of 128 bytes.

constexpr int NUMBERS = 2 * PAIRS;  // of a thread at once: 8 bytes of each part
static_assert(NUMBERS * BITS == 64, "a thread has the numbers of the pairs that it reads");

// `values` become what is left of them.
template <int COUNT>
__device__ __forceinline__ void store_parts(u32 x, int part_bytes, int at, float (&values)[NUMBERS]) {
  const u32 to = x + (at ^ (at >> 7 & 7) << 4);
#pragma unroll
  for (int part = 0; part < COUNT; part++) {
    u32 words[2];
#if BITS == 16
#pragma unroll
    for (int w = 0; w < 2; w++) {
      words[w] = to_bf16s(values[2 * w], values[2 * w + 1]);
      values[2 * w] -= low(words[w]), values[2 * w + 1] -= high(words[w]);
    }
#else
#pragma unroll
    for (int w = 0; w < 2; w++) {
      const u32 low = to_e5m2s(values[4 * w], values[4 * w + 1]), high = to_e5m2s(values[4 * w + 2], values[4 * w + 3]);
      words[w] = low | high << 16;
    }
#pragma unroll
    for (int i = 0; i < NUMBERS; i++) {  // a number of e5m2 is the upper byte of one of f16
      const u32 bits = words[i / 4] << 8 * (3 - i % 4) >> 16;
      values[i] = (values[i] - from_f16(bits & 0xff00)) * part_scale(part);
    }
#endif
    store_shared2(to + part * part_bytes, words);
  }
}

// The activations that all blocks published.
template <class P>
__device__ void load_activations(const Ring& ring, const Pair* from, u32 round, u32* x) {
  constexpr int N = (P::K / NUMBERS + THREADS - 1) / THREADS;
  u32 bits[N][PAIRS];
  acquire(ring, from, P::K / 2, round, bits);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int at = 8 * (threadIdx.x + i * THREADS);
    const bool is_inside = at < P::ROW_BYTES;
    float values[NUMBERS];
#pragma unroll
    for (int w = 0; w < PAIRS; w++) values[2 * w] = is_inside ? low(bits[i][w]) : 0, values[2 * w + 1] = is_inside ? high(bits[i][w]) : 0;
    if (at < P::X_BYTES) store_parts<parts_of(false)>((u32)__cvta_generic_to_shared(x), P::X_BYTES, at, values);
  }
  fence_copies();  // tensor cores see them
  sync_x();
}

// A row times the gains of the norm; `norm_scale` is still to be applied.
__device__ void load_normed(const Row& row, const Row& gains, u32* x, float* squares) {
  float mine = 0;
#pragma unroll
  for (int i = 0; i < ROW_PARTS; i++) {
    const int at = 8 * (threadIdx.x + i * THREADS);
    const bool is_inside = at < Qkv::ROW_BYTES;
    float values[NUMBERS];
#pragma unroll
    for (int w = 0; w < PAIRS; w++) {
      const float a = is_inside ? low(row.bits[i][w]) : 0, b = is_inside ? high(row.bits[i][w]) : 0;
      mine += a * a + b * b;
      values[2 * w] = a * low(gains.bits[i][w]), values[2 * w + 1] = b * high(gains.bits[i][w]);
    }
    if (at < Qkv::X_BYTES) store_parts<parts_of(true)>((u32)__cvta_generic_to_shared(x), Qkv::X_BYTES, at, values);
  }
  store_squares(mine, squares);
  fence_copies();
  sync_x();
}
#endif
