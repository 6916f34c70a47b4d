// y = x w^T for the few tokens of a decode batch, on the tensor cores of Hopper.
//
// x: num_tokens x COLUMNS, w: NUM_ROWS x COLUMNS, both bf16; num_tokens is at most TOKENS (8, 16, 32, 64). A block
// computes ROWS rows of w for all tokens, over one of SPLITS parts of the columns, so that there are about as many blocks
// as SMs and each reads x seldom. Weights are the first operand of the product (64 rows for each of GROUPS groups of four
// warps, of which the last may be padding) and tokens the second.
//
// Programmatic dependent launch: a block loads the weights of its first STAGES steps before it waits for the kernel that
// writes x.
//
// OUTPUT 0: float32 sums of each part, SPLITS x num_tokens x NUM_ROWS, which the next kernel adds.
// OUTPUT 1: bf16, num_tokens x NUM_ROWS.
// OUTPUT 2: silu(gate) * up in bf16, num_tokens x NUM_ROWS / 2, where the first half of the rows are gates.
// With OUTPUT 1 and 2 there is one part.

#define THREADS (128 * GROUPS)
#define ROWS_AT_ONCE (THREADS / 8)  // that the threads copy; ROWS is a multiple
#define STEP 64  // columns: 128 bytes, a row of the swizzled layout
#define WEIGHT_BYTES (ROWS * 128)
#define STAGE_BYTES (WEIGHT_BYTES + TOKENS * 128)
#define STEPS (COLUMNS / STEP)
#define SUMS (TOKENS / 2)
#if OUTPUT == 2
#define TILE_ROWS (ROWS / 2)
#define OUT_ROWS (NUM_ROWS / 2)
#else
#define TILE_ROWS ROWS
#define OUT_ROWS NUM_ROWS
#endif
#define TILES ((OUT_ROWS + TILE_ROWS - 1) / TILE_ROWS)

// Where 16 bytes of a row of 128 lie: 8 rows of 128 bytes repeat (the 128-byte swizzle).
__device__ __forceinline__ u32 swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

extern "C" __global__ void __launch_bounds__(THREADS)
    batch_product(const char* x, const char* w, void* y, int num_tokens) {
  extern __shared__ char shared[];
  launch_dependents();
  const int thread = threadIdx.x, chunk = thread % 8;
  const int tile = blockIdx.x % TILES, split = blockIdx.x / TILES;
  const int first = STEPS * split / SPLITS, count = STEPS * (split + 1) / SPLITS - first;
  const u32 base = ((u32)__cvta_generic_to_shared(shared) + 1023) & ~1023u;

  auto weights_of = [&](int row) {
#if OUTPUT == 2  // of 16 rows the first 8 are gates and the others the same features of up: one thread gets both
    const int feature = tile * TILE_ROWS + row / 16 * 8 + row % 8;
    const int from = min(feature, OUT_ROWS - 1) + (row % 16 < 8 ? 0 : OUT_ROWS);
#else
    const int from = min(tile * TILE_ROWS + row, NUM_ROWS - 1);
#endif
    return w + ((u64)from * COLUMNS + (u64)first * STEP) * 2;
  };

  // A thread copies 16 bytes of each of some rows of w and tokens of x.
  const char* sources[ROWS / ROWS_AT_ONCE];
  u32 targets[ROWS / ROWS_AT_ONCE];
#pragma unroll
  for (int i = 0; i < ROWS / ROWS_AT_ONCE; i++) {
    const int row = thread / 8 + i * ROWS_AT_ONCE;
    sources[i] = weights_of(row) + chunk * 16;
    targets[i] = base + swizzled(row, chunk);
  }
  const char* tokens = x + (u64)first * STEP * 2 + chunk * 16;
  const u32 tokens_to = base + WEIGHT_BYTES + swizzled(thread / 8, chunk);  // rows of a thread are equal modulo 8

  auto load_weights = [&](int step, int slot) {
#pragma unroll
    for (int i = 0; i < ROWS / ROWS_AT_ONCE; i++)
      copy_async(targets[i] + slot * STAGE_BYTES, sources[i] + (u64)step * STEP * 2);
  };
  auto load_tokens = [&](int step, int slot) {
#pragma unroll
    for (int i = 0; i < TOKENS; i += ROWS_AT_ONCE)
      if (TOKENS % ROWS_AT_ONCE == 0 || i + thread / 8 < TOKENS)
        copy_async(tokens_to + slot * STAGE_BYTES + i * 128,
                   tokens + (u64)min(i + thread / 8, num_tokens - 1) * COLUMNS * 2 + (u64)step * STEP * 2);
  };

  // Every step has one group of copies for its weights and one for its tokens; later steps one for both.
#pragma unroll
  for (int step = 0; step < STAGES; step++) {
    if (step < count) load_weights(step, step);
    commit_copies();
  }
  wait_for_previous();
#pragma unroll
  for (int step = 0; step < STAGES; step++) {
    if (step < count) load_tokens(step, step);
    commit_copies();
  }

  float sum[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; i++) sum[i] = 0.0f;
  const int group = thread / 128;
  int slot = 0;  // step % STAGES
#pragma unroll 1
  for (int step = 0; step < count; step++) {
    if (step < STAGES)
      wait_copies<STAGES - 1>();
    else
      wait_copies<STAGES - 3>();
    fence_copies();
    __syncthreads();
    if (step >= 2 && step - 2 + STAGES < count) {  // all warps have multiplied step - 2: its stage is free
      const int free = slot < 2 ? slot - 2 + STAGES : slot - 2;
      load_weights(step - 2 + STAGES, free);
      load_tokens(step - 2 + STAGES, free);
    }
    commit_copies();
    const u32 stage = base + slot * STAGE_BYTES;
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    const u64 weights = descriptor(stage + group * 8192), columns = descriptor(stage + WEIGHT_BYTES);
    begin_products();
#pragma unroll
    for (int k = 0; k < STEP / 16; k++) multiply(sum, weights + 2 * k, columns + 2 * k);
    commit_products();
    wait_products<1>();
  }
  wait_products<0>();

  // Lane: rows lane / 4 and 8 after it of the warp's 16, tokens 2 (lane % 4) and the next of every 8.
  const int lane = thread % 32, warp = thread / 32;
#pragma unroll
  for (int j = 0; j < TOKENS / 8; j++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int token = 8 * j + lane % 4 * 2 + c;
      if (token >= num_tokens) continue;
      const float low = sum[4 * j + c], high = sum[4 * j + 2 + c];
#if OUTPUT == 2
      const int feature = tile * TILE_ROWS + warp * 8 + lane / 4;
      if (feature < OUT_ROWS && warp * 16 < ROWS)
        ((u16*)y)[(u64)token * OUT_ROWS + feature] = to_bf16(low / (1.0f + __expf(-low)) * high);
#else
      const int row = warp * 16 < ROWS ? tile * TILE_ROWS + warp * 16 + lane / 4 : NUM_ROWS;
#if OUTPUT == 0
      float* to = (float*)y + ((u64)split * num_tokens + token) * NUM_ROWS;
      if (row < NUM_ROWS) to[row] = low;
      if (row + 8 < NUM_ROWS) to[row + 8] = high;
#else
      u16* to = (u16*)y + (u64)token * NUM_ROWS;
      if (row < NUM_ROWS) to[row] = to_bf16(low);
      if (row + 8 < NUM_ROWS) to[row + 8] = to_bf16(high);
#endif
#endif
    }
}
