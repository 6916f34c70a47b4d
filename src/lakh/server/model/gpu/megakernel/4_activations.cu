// The activations x in shared memory: two arrays, with two numbers in 32 bits. The first has the numbers rounded to the type of x, the
// second the remainders. Published activations have no remainders.

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

#if BITS == 16
// Two numbers: each rounded, and the remainder.
__device__ __forceinline__ void store_pair(u32* x, int k, int pair, float a, float b) {
  const u32 a_high = to_x(a), b_high = to_x(b);
  x[pair] = a_high | b_high << 16;
  x[k / 2 + pair] = to_x(a - from_x(a_high)) | to_x(b - from_x(b_high)) << 16;
}

// The activations that all blocks published.
template <int K>
__device__ void load_activations(const Pair* from, u32 round, u32* x) {
  constexpr int N = (K / 4 + THREADS - 1) / THREADS;
  u32 bits[N][2];
  acquire(from, K / 2, round, bits);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int pair = 2 * (threadIdx.x + i * THREADS);
    if (pair < K / 2) x[pair] = bits[i][0], x[pair + 1] = bits[i][1], x[K / 2 + pair] = x[K / 2 + pair + 1] = 0;
  }
  sync_warps();
}

// A row times the gains of the norm; returns the scale that its products must still be multiplied with.
__device__ float load_normed(const Row& row, const Row& gains, u32* x, float* squares) {
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
  mine = warp_sum(mine);
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = mine;
  sync_warps();
  float all = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) all += squares[w];
  return rsqrtf(all / WIDTH + NORM_EPS);
}

#else
__device__ __forceinline__ void store4(u32* to, const u32* from) { *(uint4*)to = make_uint4(from[0], from[1], from[2], from[3]); }

// Two published numbers of bf16 in the type of x.
__device__ __forceinline__ u32 to_x_pair(u32 two) { return to_x(low(two)) | to_x(high(two)) << 16; }

// The activations that all blocks published.
template <int K>
__device__ void load_activations(const Pair* from, u32 round, u32* x) {
  constexpr int N = (K / 8 + THREADS - 1) / THREADS;
  u32 bits[N][4];
  acquire(from, K / 2, round, bits);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int pair = 4 * (threadIdx.x + i * THREADS);
#pragma unroll
    for (int w = 0; w < 4; w++) bits[i][w] = to_x_pair(bits[i][w]);
    if (pair < K / 2) store4(x + pair, bits[i]);
  }
  sync_warps();
}

// A row times the gains of the norm; returns the scale that its products must still be multiplied with.
__device__ float load_normed(const Row& row, const Row& gains, u32* x, float* squares) {
  float mine = 0;
#pragma unroll
  for (int i = 0; i < ROW_PARTS; i++) {
    const int pair = 4 * (threadIdx.x + i * THREADS);
    u32 rounded[4], remainders[4];
#pragma unroll
    for (int w = 0; w < 4; w++) {
      float a = low(row.bits[i][w]), b = high(row.bits[i][w]);
      if (pair < WIDTH / 2) mine += a * a + b * b;
      a *= low(gains.bits[i][w]), b *= high(gains.bits[i][w]);
      const u32 a_x = to_x(a), b_x = to_x(b);
      rounded[w] = a_x | b_x << 16;
      remainders[w] = to_x(a - from_x(a_x)) | to_x(b - from_x(b_x)) << 16;
    }
    if (pair < WIDTH / 2) store4(x + pair, rounded), store4(x + WIDTH / 2 + pair, remainders);
  }
  mine = warp_sum(mine);
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = mine;
  sync_warps();
  float all = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) all += squares[w];
  return all < __int_as_float(0x7f800000) ? rsqrtf(all / WIDTH + NORM_EPS) : __int_as_float(0x7fc00000);
}
#endif
