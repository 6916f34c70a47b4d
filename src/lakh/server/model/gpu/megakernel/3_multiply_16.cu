// Products with weights of 16 bits, each of one warp.

#if BITS == 16 && !WGMMA
// Tensor cores multiply 16 rows of 16 numbers with 8 columns. The order of the numbers in a row does not matter as long as x has the
// same order, so a lane reads eight contiguous numbers for two products.
__device__ __forceinline__ void multiply_tile(float* c, const u32* above, const u32* below, const u32* x) {
  multiply_bf16(c, above[0], below[0], above[1], below[1], x[0], x[1]);
}

// The 16 rows of a product are four rows of the matrix in four groups of 32 columns each; its 8 columns are x in the same four groups,
// its high and its low parts. Of the 16 x 8 sums those of equal groups count.

// The sums of the groups are on a diagonal: lanes 0, 5, 10 and 15 (rows 0 and 2), and 16, 21, 26 and 31 (rows 1 and 3).
__device__ __forceinline__ void store_sums(const float* c, float* sums) {
  float upper = c[0] + c[1], lower = c[2] + c[3];
#pragma unroll
  for (int off = 5; off <= 10; off += 5)
    upper += __shfl_xor_sync(ALL, upper, off), lower += __shfl_xor_sync(ALL, lower, off);
  if (threadIdx.x % 16 == 0) sums[0] = upper, sums[2] = lower;
}

template <class P>
struct Weights {
  __device__ void begin(const Ring&) {}  // not with 16 bits: registers spill
};

// sums[warp][row]: this block's rows, this warp's columns, which are every WARPS-th tile of 128. x always has remainders here.
template <class P, bool REMAINDERS>
__device__ void multiply(Ring& ring, Weights<P>&, const u32* x, float* sums) {
  constexpr int TILES = (P::K + 127) / 128, TIMES = (TILES + WARPS - 1) / WARPS;
  constexpr bool IS_EVEN = P::K % (128 * WARPS) == 0;  // every warp has TIMES whole tiles
  constexpr int STEP = P::CHUNK_ROWS < 4 ? P::CHUNK_ROWS : 4;  // rows of one chunk among four
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows = P::rows();
  const int upper = lane / 16, col = lane / 4 % 4 * 32 + lane % 4 * 8;  // a lane reads rows upper and 2 + upper
  u32 mine[TIMES][4];
#pragma unroll
  for (int i = 0; i < TIMES; i++) {
    const int here = (i * WARPS + warp) * 128 + lane / 8 * 32 + lane % 4 * 8;
    mine[i][0] = mine[i][1] = mine[i][2] = mine[i][3] = 0;
    if (here < P::K) load_shared4(mine[i], (u32)__cvta_generic_to_shared(x + (lane / 4 % 2 * P::K + here) / 2));
  }
  sums += warp * SUM_ROWS + upper;
  ring.set_quiet(0);
  float c[4];
  for (int row = 0; row < rows; row += 4) {
#pragma unroll
    for (int r = row; r < row + 4; r += STEP)
      if (r < rows) ring.wait_full(ring.chunk + r / P::CHUNK_ROWS);
    u32 w[2][TIMES][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int r = row + 2 * half + upper;  // data past the last row is read and ignored
      const u32 at = ring.slots + ring.slot(ring.chunk + r / P::CHUNK_ROWS) * CHUNK_BYTES + r % P::CHUNK_ROWS * P::ROW_BYTES;
#pragma unroll
      for (int i = 0; i < TIMES; i++) {
        const int here = (i * WARPS + warp) * 128 + col;
        w[half][i][0] = w[half][i][1] = w[half][i][2] = w[half][i][3] = 0;
        if (IS_EVEN || here < P::K) load_shared4(w[half][i], at + here * 2);
      }
    }
    if (row) store_sums(c, sums + row - 4);  // of the previous rows, while these are loading
    float other[4] = {};
    c[0] = c[1] = c[2] = c[3] = 0;
#pragma unroll
    for (int i = 0; i < TIMES; i++) {
      multiply_tile(c, w[0][i], w[1][i], mine[i]);
      multiply_tile(other, w[0][i] + 2, w[1][i] + 2, mine[i] + 2);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) c[i] += other[i];
    __syncwarp();
    if (lane == 0)
#pragma unroll
      for (int r = row; r < row + 4; r += STEP)  // a chunk is released with its last row
        if (r < rows && (r % P::CHUNK_ROWS + 4 >= P::CHUNK_ROWS || row + 4 >= rows)) ring.release_slot(ring.chunk + r / P::CHUNK_ROWS);
  }
  if (rows) store_sums(c, sums + (rows - 1) / 4 * 4);
  ring.chunk += P::chunks();
  sync_warps();
  ring.set_quiet(1);
}
#endif
