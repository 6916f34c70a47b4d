// y = (a * a_scale) (b * b_scale)^T in bf16 for 8-bit integers, on the tensor cores of Hopper.
//
// a: N x K with a scale for each row, b: M x K, likewise; y: N x M. Sums are exact 32-bit integers.
//
// Two blocks of neighbouring rows of a form a cluster: they read the same rows of b, of which each loads half for both.
// One warp of a block loads tiles of 128 columns of a and b into a ring of STAGES; two groups of four warps multiply 64
// rows of a each with all rows of b, and write their results while the loads of the next tile are under way. Blocks stay
// for all tiles (persistent); tiles that run at the same time lie in GROUP rows of tiles, so that they share a and b in L2.

// Macros that must be defined: STAGES, GROUP; CLUSTER; ROWS, of a, of a block; COLUMNS, rows of b, which are those of the
// instruction; DEPTH, bytes, a row of the swizzled layout.

#define GROUPS (ROWS / 64)  // of four warps that multiply
#define LOADED (COLUMNS / CLUSTER)  // rows of b that a block loads
#define A_BYTES (ROWS * DEPTH)
#define STAGE_BYTES ((ROWS + COLUMNS) * DEPTH)
#define THREADS (128 * (GROUPS + 1))

__device__ __forceinline__ void exchange(u32& low, u32& high, int lane, int distance) {
  const bool upper = lane & distance;
  const u32 received = __shfl_xor_sync(~0u, upper ? low : high, distance);
  if (upper)
    low = received;
  else
    high = received;
}

// Of four lanes with four values each, lane i gets the i-th value of all.
__device__ __forceinline__ void transpose(u32 (&value)[4], int lane) {
  exchange(value[0], value[1], lane, 1);
  exchange(value[2], value[3], lane, 1);
  exchange(value[0], value[2], lane, 2);
  exchange(value[1], value[3], lane, 2);
}

// A pair of tiles, of both blocks of a cluster: its first row of a and of b.
__device__ __forceinline__ void place(int pair, int pairs_N, int tiles_M, int& n, int& m) {
  const int in_group = pair % (GROUP * tiles_M), first = pair / (GROUP * tiles_M) * GROUP;
  const int rows = min(pairs_N - first, GROUP);
  n = (first + in_group % rows) * CLUSTER * ROWS;
  m = in_group / rows * COLUMNS;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    int8_product(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const float* a_scale,
                 const float* b_scale, u16* y, int N, int M, int K) {
  extern __shared__ char shared[];
  const u32 barriers = (u32)__cvta_generic_to_shared(shared), ring = (barriers + 16 * STAGES + 1023) & ~1023u;
  const int thread = threadIdx.x, rank = blockIdx.x % CLUSTER, steps = (K + DEPTH - 1) / DEPTH;
  const int pairs_N = (N + CLUSTER * ROWS - 1) / (CLUSTER * ROWS), tiles_M = (M + COLUMNS - 1) / COLUMNS;
  const int pairs = pairs_N * tiles_M, first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
  auto loaded = [&](int stage) { return barriers + 16 * stage; };
  auto read = [&](int stage) { return barriers + 16 * stage + 8; };

  if (thread == 0) {
    for (int stage = 0; stage < STAGES; stage++) {
      init_barrier(loaded(stage), 1);
      init_barrier(read(stage), GROUPS * CLUSTER);  // b is written into both blocks
    }
    publish_barriers();
  }
  sync_cluster();

  int stage = 0, round = 0;
  auto next_stage = [&] {
    if (++stage == STAGES) stage = 0, round ^= 1;
  };
  if (thread / 128 == GROUPS) {
    keep_registers<40>();
    if (thread % 128 == 0) {
      for (int pair = first; pair < pairs; pair += stride) {
        int n, m;
        place(pair, pairs_N, tiles_M, n, m);
        for (int step = 0; step < steps; step++, next_stage()) {
          wait_barrier(read(stage), round ^ 1);
          expect_bytes(loaded(stage), STAGE_BYTES);
          const u32 to = ring + stage * STAGE_BYTES;
          load_tile(to, &a, step * DEPTH, n + rank * ROWS, loaded(stage));
          load_tile_for_all<CLUSTER>(to + A_BYTES + rank * LOADED * DEPTH, &b, step * DEPTH, m + rank * LOADED,
                                     loaded(stage));
        }
      }
    }
  } else {
    take_registers<232>();
    const int group = thread / 128, lane = thread % 32, part = lane % 4;
    int sum[128];
    auto release = [&](int of) {
      if (thread % 128 < CLUSTER) arrive_at(read(of), thread % 128);
    };
    for (int pair = first; pair < pairs; pair += stride) {
      int n, m;
      place(pair, pairs_N, tiles_M, n, m);
      int last = 0;
      for (int step = 0; step < steps; step++, next_stage()) {
        wait_barrier(loaded(stage), round);
        const u32 from = ring + stage * STAGE_BYTES;
        const u64 rows = descriptor(from + group * 64 * DEPTH), columns = descriptor(from + A_BYTES);
        begin_products();
#pragma unroll
        for (int k = 0; k < DEPTH / 32; k++) multiply(sum, rows + 2 * k, columns + 2 * k, step + k);
        commit_products();
        wait_products<1>();
        if (step) release(last);  // its products have ended
        last = stage;
      }
      wait_products<0>();
      release(last);

      // A lane has rows lane / 4 and 8 after it of the warp's 16, columns 2 (lane % 4) and the next of every 8.
      const int row = n + rank * ROWS + group * 64 + thread % 128 / 32 * 16 + lane / 4;
      const float upper = row < N ? a_scale[row] : 0.0f, lower = row + 8 < N ? a_scale[row + 8] : 0.0f;
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; j += 4) {
        u32 above[4], below[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int column = m + 8 * (j + i) + 2 * part, *at = sum + 4 * (j + i);
          const float2 scale = column < M ? *(const float2*)(b_scale + column) : make_float2(0.0f, 0.0f);
          above[i] = to_bf16s((float)at[0] * upper * scale.x, (float)at[1] * upper * scale.y);
          below[i] = to_bf16s((float)at[2] * lower * scale.x, (float)at[3] * lower * scale.y);
        }
        transpose(above, lane);
        transpose(below, lane);
        const int column = m + 8 * (j + part);
        u16* to = y + (u64)row * M + column;
        if (row < N && column < M) *(uint4*)to = make_uint4(above[0], above[1], above[2], above[3]);
        if (row + 8 < N && column < M) *(uint4*)(to + 8 * (u64)M) = make_uint4(below[0], below[1], below[2], below[3]);
      }
    }
  }
  sync_cluster();  // the other block still arrives at barriers here
}
