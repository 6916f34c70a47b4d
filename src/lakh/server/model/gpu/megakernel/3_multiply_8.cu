// Products with weights of 8 bits, which are converted to f16.

#if BITS == 8
// Eight weights of a row.
struct Packed {
  u32 bits[2] = {};

  __device__ __forceinline__ void read(u32 at) { load_shared2(bits, at); }
  __device__ __forceinline__ void unpack(u32* to) const {
#pragma unroll
    for (int i = 0; i < 2; i++) e4m3_to_f16s(to + 2 * i, bits[i]);
  }
};

// Of f16.
__device__ __forceinline__ void multiply_tile(float* c, const u32* above, const u32* below, const u32* x) {
  multiply_f16(c, above[0], below[0], above[1], below[1], x[0], x[1]);
}

// What a lane has of a group of rows: of rows `line` and 8 + `line`, its columns in BATCH tiles of 32, which are every WARPS-th.
template <class P>
struct Weights {
  static constexpr int TILES = P::K / 32, TIMES = (TILES + WARPS - 1) / WARPS, ROWS = P::GROUP_ROWS;
  static constexpr int BATCH = TIMES < MAX_BATCH ? TIMES : MAX_BATCH;
  static constexpr bool IS_EVEN = TILES % WARPS == 0 && TIMES % BATCH == 0;  // every warp has whole batches of tiles
  Packed above[BATCH], below[BATCH];

  __device__ __forceinline__ void load(const Ring& ring, const RowGroup<P>& in_ring, int first) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, line = lane / 4;
    // Data past the last row is read and ignored.
    const u32 upper = in_ring.address(ring, line % ROWS), lower = in_ring.address(ring, (8 + line) % ROWS), mine_at = lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const u32 tile = (first + i) * WARPS + warp, here = IS_EVEN ? tile : min(tile, (u32)TILES - 1);  // past the end x is 0
      const u32 at = 32 * here + mine_at;
      if (ROWS >= 8 || line < ROWS) above[i].read(upper + at);
      if (ROWS == 16) below[i].read(lower + at);
    }
  }
  __device__ void begin(const Ring& ring) {  // the first rows of this block
    if (!P::rows()) return;
    const RowGroup<P> in_ring(ring, 0);
    in_ring.wait(ring, P::rows());
    load(ring, in_ring, 0);
  }
};

// Sums as with 16 bits. Instructions limit the speed here: the 16 rows of a product are rows of the matrix, and its columns x and its
// remainders (six are 0), so no sums cross lanes.
template <class P, bool REMAINDERS>
__device__ void multiply(Ring& ring, Weights<P>& w, const u32* x, float* sums) {
  typedef Weights<P> W;
  constexpr int BATCH = W::BATCH;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, line = lane / 4, rows = P::rows();
  const u32 x_at = (u32)__cvta_generic_to_shared(x) + (line % 2 * P::K + lane % 4 * 8) * 2;
  u32 mine[BATCH][4];  // 0 past the end
  auto load_x = [&](int first) {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int tile = (first + i) * WARPS + warp;
      mine[i][0] = mine[i][1] = mine[i][2] = mine[i][3] = 0;
      if (line < (REMAINDERS ? 2 : 1) && (W::IS_EVEN || tile < W::TILES)) load_shared4(mine[i], x_at + 64 * tile);
    }
  };
  if (W::TIMES == BATCH) load_x(0);
  sums += warp * MAX_ROWS;
  ring.set_busy(1);
#pragma unroll 1
  for (int row = 0; row < rows; row += W::ROWS) {
    const RowGroup<P> in_ring(ring, row);
    if (row) in_ring.wait(ring, rows - row);
    float c[2][4] = {}, other[2][4] = {};
#pragma unroll 1
    for (int first = 0; first < W::TIMES; first += BATCH) {
      if (W::TIMES > BATCH) load_x(first);
      if (row || first) w.load(ring, in_ring, first);
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        u32 wide[2][4];
        w.above[i].unpack(wide[0]), w.below[i].unpack(wide[1]);
        multiply_tile(c[i % 2], wide[0], wide[1], mine[i]);
        multiply_tile(other[i % 2], wide[0] + 2, wide[1] + 2, mine[i] + 2);
      }
    }
    in_ring.release(ring, rows - row);
    if (lane % 4 == 0) {  // the products with x and its remainders
#pragma unroll
      for (int k = 0; k < 4; k++) c[0][k] += c[1][k] + (other[0][k] + other[1][k]);
      if (line < W::ROWS && row + line < rows) sums[row + line] = c[0][0] + c[0][1];
      if (W::ROWS == 16 && row + 8 + line < rows) sums[row + 8 + line] = c[0][2] + c[0][3];
    }
  }
  ring.chunk += P::chunks();
  sync_warps();
  ring.set_busy(0);
}
#endif

