// The activations x in shared memory. For weights of 16 bits: two arrays, with two numbers in 32 bits. The first has the numbers rounded
// to the type of x, the second the remainders. Published activations have no remainders. For weights of 4 bits: groups of integers
// (3_multiply_4.cu). With WGMMA: 4_activations_wgmma.cu.

// A thread's part of WIDTH numbers of bf16.
struct Row {
  u32 bits[(WIDTH / 2 / PAIRS + THREADS - 1) / THREADS][PAIRS];
};
constexpr int ROW_PARTS = sizeof(Row) / sizeof(u32) / PAIRS;

__device__ __forceinline__ Row read_row(const u16* from) {
  Row row;
#pragma unroll
  for (int i = 0; i < ROW_PARTS; i++) {
    const int at = PAIRS * (threadIdx.x + i * THREADS);
#if BITS == 16
    const uint2 two = at < WIDTH / 2 ? *(const uint2*)((const u32*)from + at) : make_uint2(0, 0);
    row.bits[i][0] = two.x, row.bits[i][1] = two.y;
#else
    const uint4 four = at < WIDTH / 2 ? *(const uint4*)((const u32*)from + at) : make_uint4(0, 0, 0, 0);
    row.bits[i][0] = four.x, row.bits[i][1] = four.y, row.bits[i][2] = four.z, row.bits[i][3] = four.w;
#endif
  }
  return row;
}

// After x was written. With 4 bits a warp reads only what it wrote itself, and does not wait for others.
__device__ __forceinline__ void sync_x() {
  if (BITS == 4) __syncwarp();
  else sync_warps();
}

// Of a warp's numbers.
__device__ __forceinline__ void store_squares(float mine, float* squares) {
  mine = warp_sum(mine);
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = mine;
}

// The scale of a norm, by which the sums of its product must be multiplied; after all warps have multiplied.
__device__ __forceinline__ float norm_scale(const float* squares) {
  float all = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) all += squares[w];
  // Large numbers and NaN are published as almost 2^81 (2_ready_flags.cu), and their squares overflow.
  if (BITS < 16 && !(all < __int_as_float(0x7f800000))) return __int_as_float(0x7fc00000);
  return rsqrtf(all / WIDTH + NORM_EPS);
}

#if BITS == 16 && !WGMMA
// Two numbers: each rounded, and the remainder.
__device__ __forceinline__ void store_pair(u32* x, int k, int pair, float a, float b) {
  const u32 a_high = to_bf16(a), b_high = to_bf16(b);
  x[pair] = a_high | b_high << 16;
  x[k / 2 + pair] = to_bf16(a - low(a_high)) | to_bf16(b - low(b_high)) << 16;
}

// The activations that all blocks published.
template <class P>
__device__ void load_activations(const Ring& ring, const Pair* from, u32 round, u32* x) {
  constexpr int K = P::K, N = (K / 4 + THREADS - 1) / THREADS;
  u32 bits[N][2];
  acquire(ring, from, K / 2, round, bits);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int pair = 2 * (threadIdx.x + i * THREADS);
    if (pair < K / 2) x[pair] = bits[i][0], x[pair + 1] = bits[i][1], x[K / 2 + pair] = x[K / 2 + pair + 1] = 0;
  }
  sync_x();
}

// A row times the gains of the norm; `norm_scale` is still to be applied.
__device__ void load_normed(const Row& row, const Row& gains, u32* x, float* squares) {
  float mine = 0;
#pragma unroll
  for (int i = 0; i < ROW_PARTS; i++) {
    const int pair = 2 * (threadIdx.x + i * THREADS);
#pragma unroll
    for (int w = 0; w < 2; w++) {
      const float a = low(row.bits[i][w]), b = high(row.bits[i][w]);
      mine += a * a + b * b;
      if (pair < WIDTH / 2) store_pair(x, WIDTH, pair + w, a * low(gains.bits[i][w]), b * high(gains.bits[i][w]));
    }
  }
  store_squares(mine, squares);
  sync_x();
}
#endif

#if BITS == 4
// Eight numbers, which begin with pair `pair`: a quarter of a group, whose other three are those of the neighbouring lanes.
template <int K>
__device__ __forceinline__ void store_eight(u32* x, int pair, const float (&numbers)[8]) {
  float largest = 1e-30f;
#pragma unroll
  for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(numbers[i]));
  largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 2));
  // A power of 2 that makes the largest X of the group at most 2^15 / 1.004 = 32,637, so that its high byte is at most 127.
  const u32 exponent = __float_as_uint(largest * 1.004f) >> 23;
  const float scale = __uint_as_float((exponent - 14) << 23), inverse = __uint_as_float((268 - exponent) << 23);
  u32 bits[8];  // the lowest 16 bits are X + 128: the high byte, which is rounded, and the low byte plus 128
#pragma unroll
  for (int i = 0; i < 8; i++) bits[i] = __float_as_uint(numbers[i] * inverse + (START + 128));
  u32 high[2], low[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {  // numbers 0, 4, 1, 5 and 2, 6, 3, 7
    const u32 first = __byte_perm(bits[2 * i], bits[2 * i + 4], 0x5140), second = __byte_perm(bits[2 * i + 1], bits[2 * i + 5], 0x5140);
    low[i] = __byte_perm(first, second, 0x5410) ^ 0x80808080u, high[i] = __byte_perm(first, second, 0x7632);
  }
  const int ones = 0x01010101;
  int sums = (__dp4a((int)high[0], ones, __dp4a((int)high[1], ones, 0)) << 16) + __dp4a((int)low[0], ones, __dp4a((int)low[1], ones, 0));
  sums += __shfl_xor_sync(ALL, sums, 1);
  sums += __shfl_xor_sync(ALL, sums, 2);
  if (pair >= K / 2) return;
  const int group = pair / 16, quarter = pair / 4 % 4;
  u32* to = x + group * GROUP_WORDS + quarter;
  to[0] = high[0], to[4] = high[1], to[8] = low[0], to[12] = low[1];
  if (quarter == 0) {
    const int sum_low = (short)sums, sum_high = (sums - sum_low) >> 16;
    const float by = scale / 16, offset = -256 * (START + 128 * sum_high) - (START + 128 * sum_low);
    ((GroupScale*)(x + K / 32 * GROUP_WORDS))[group] = {by, by * offset};
  }
}

// The activations that all blocks published.
template <class P>
__device__ void load_activations(const Ring& ring, const Pair* from, u32 round, u32* x) {
  constexpr int K = P::K, N = (K / 8 + THREADS - 1) / THREADS;
  u32 bits[N][4];
  acquire(ring, from, K / 2, round, bits);
  const int thread = thread_index();
#pragma unroll
  for (int i = 0; i < N; i++) {
    float numbers[8];
#pragma unroll
    for (int w = 0; w < 4; w++) numbers[2 * w] = low(bits[i][w]), numbers[2 * w + 1] = high(bits[i][w]);
    store_eight<K>(x, 4 * (thread + i * THREADS), numbers);
  }
  sync_x();
}

// A row times the gains of the norm; `norm_scale` is still to be applied.
__device__ void load_normed(const Row& row, const Row& gains, u32* x, float* squares) {
  float mine = 0;
  const int thread = thread_index();
#pragma unroll
  for (int i = 0; i < ROW_PARTS; i++) {
    const int pair = 4 * (thread + i * THREADS);
    float numbers[8];
#pragma unroll
    for (int w = 0; w < 4; w++) {
      const float a = low(row.bits[i][w]), b = high(row.bits[i][w]);
      if (pair < WIDTH / 2) mine += a * a + b * b;
      numbers[2 * w] = a * low(gains.bits[i][w]), numbers[2 * w + 1] = b * high(gains.bits[i][w]);
    }
    store_eight<WIDTH>(x, pair, numbers);
  }
  store_squares(mine, squares);
  sync_x();
}
#endif
