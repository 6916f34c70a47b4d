// Products of a matrix with the activations x. Each block has a share of the rows. One warp besides the WARPS loads the weights of
// all layers of a step, in the order of their use and independent of what the others wait for: they pass through a ring buffer in shared
// memory, so memory is not idle while blocks wait for each other's flags. It keeps few loads in flight: with more, the flags,
// which take the same path, arrive late.

// A row of 16 or 8 bits is its numbers. 8 bits have a float32 scale for each row, in an array of its own. A row of 4 bits is its
// numbers n, each for scale * (n - 8), then a float16 scale for every 32 of them, padded to 16 bytes. Eight numbers share 32 bits:
// numbers 0, 2, 4, 6 are the low half's quarters, 1, 3, 5, 7 the high half's.

// LINES: the rows that are divided over blocks, in multiples of ALIGN. A line is one row, or with TWO also the row LINES below it.
template <int LINES, int K_, int ALIGN = 1, bool TWO = false>
struct Matmul {
  static constexpr int K = K_, VALUE_BYTES = K * BITS / 8;
  static constexpr int ROW_BYTES = BITS == 4 ? VALUE_BYTES + (K / 16 + 15) / 16 * 16 : VALUE_BYTES;
  // Rows of 8 and 4 bits are padded in shared memory, so that the eight rows that a warp reads at once lie in different banks.
  static constexpr int PADDED_BYTES = BITS == 16 ? ROW_BYTES : ROW_BYTES + (4 * BITS + 128 - ROW_BYTES % 128) % 128;
  static constexpr int FIT = CHUNK_BYTES / PADDED_BYTES;
  static constexpr int CHUNK_ROWS = FIT >= 8 ? 8 : FIT >= 4 ? 4 : FIT >= 2 ? 2 : 1;
  static constexpr int GROUP_ROWS = 16 / CHUNK_ROWS <= SLOTS ? 16 : 8 / CHUNK_ROWS <= SLOTS ? 8 : 4;  // of 8 and 4 bits
  static constexpr int MAX_LINES = (LINES / ALIGN + BLOCKS - 1) / BLOCKS * ALIGN;
  static constexpr int MAX_ROWS = (MAX_LINES * (TWO ? 2 : 1) + 3) / 4 * 4;
  static_assert(PADDED_BYTES <= CHUNK_BYTES && K % (8 * WARPS) == 0 && LINES % ALIGN == 0, "this shape cannot be divided over blocks");
  static_assert(ROW_BYTES % 16 == 0, "bulk copies need multiples of 16 bytes");

  static __device__ constexpr u32 chunks_in(int bytes) {
    const int chunks = (bytes + CHUNK_ROWS * ROW_BYTES / 2) / (CHUNK_ROWS * ROW_BYTES);
    return chunks < 1 ? 1 : chunks > SLOTS ? SLOTS : chunks;
  }
  // This block's share; its rows are numbered from 0, with TWO the second rows of all lines after the first ones.
  static __device__ int first() { return (u32)(LINES / ALIGN) * blockIdx.x / BLOCKS * ALIGN; }
  static __device__ int lines() { return (u32)(LINES / ALIGN) * (blockIdx.x + 1) / BLOCKS * ALIGN - first(); }
  static __device__ int rows() { return lines() * (TWO ? 2 : 1); }
  static __device__ int chunks() { return (rows() + CHUNK_ROWS - 1) / CHUNK_ROWS; }
  static __device__ u64 global_row(int layer, int local) {
    return (u64)layer * (LINES * (TWO ? 2 : 1)) + first() + local + (local < lines() ? 0 : LINES - lines());
  }
  static __device__ const char* row(const char* w, int layer, int local) { return w + global_row(layer, local) * ROW_BYTES; }
};

typedef Matmul<QUERIES + 2 * KEYS, WIDTH> Qkv;
typedef Matmul<WIDTH, QUERIES, 2> Out;
typedef Matmul<FFN, WIDTH, 2, true> GateUp;
typedef Matmul<WIDTH, FFN, 2> Down;
typedef Matmul<NUM_IDS, WIDTH> Head;

constexpr int MAX_ROWS =
    max_of(max_of(Qkv::MAX_ROWS, Out::MAX_ROWS), max_of(max_of(GateUp::MAX_ROWS, Down::MAX_ROWS), Head::MAX_ROWS));

// --- the ring ---

struct Ring {
  u32 slots, full, empty;  // in shared memory: SLOTS chunks, and for each a barrier for "loaded" and one for "all warps are done"
  u32 busy;                // in shared memory: whether the warps are multiplying
  u32 chunk;               // the next chunk, counted over all layers of a step

  __device__ u32 slot(u32 n) const { return n % SLOTS; }
  __device__ static void wait(u32 barrier, u32 turn) { wait_barrier_unbounded(barrier, turn & 1); }
  __device__ void wait_full(u32 n) const { wait(full + slot(n) * 8, n / SLOTS); }
  __device__ void wait_empty(u32 n) const {
    if (n >= SLOTS) wait(empty + slot(n) * 8, n / SLOTS - 1);
  }
  __device__ void release_slot(u32 n) const { arrive(empty + slot(n) * 8); }
  __device__ void set_busy(u32 value) const {
    if (threadIdx.x == 0) store_shared_volatile(busy, value);
  }
  __device__ bool is_busy() const { return load_shared_volatile(busy); }
  __device__ void begin() {  // by one thread
    for (u32 s = 0; s < SLOTS; s++) {
      init_barrier(full + s * 8, 1);
      init_barrier(empty + s * 8, WARPS);
    }
    set_busy(0);
    publish_barriers();
    fence_copies();
  }
};

template <class P>
__device__ void load_weights(Ring& ring, u64 policy, const char* w, int layer) {
  const int rows = P::rows(), lines = P::lines();
ROLLED
  for (int begin = 0; begin < rows; begin += P::CHUNK_ROWS) {
    const int end = min(begin + P::CHUNK_ROWS, rows);
    const u32 n = ring.chunk++, full = ring.full + ring.slot(n) * 8;
    ring.wait_empty(n);
    const u32 ahead = ring.is_busy() ? P::chunks_in(BUSY_BYTES) : P::chunks_in(IDLE_BYTES);
    if (n >= ahead) ring.wait_full(n - ahead);
    expect_bytes(full, (end - begin) * P::ROW_BYTES);
ROLLED
    for (int from = begin; from < end;) {
      const int to = P::PADDED_BYTES > P::ROW_BYTES ? from + 1 : from < lines ? min(lines, end) : end;  // where rows are contiguous
      copy_bulk(ring.slots + ring.slot(n) * CHUNK_BYTES + (from - begin) * P::PADDED_BYTES, P::row(w, layer, from),
                (to - from) * P::ROW_BYTES, full, policy);
      from = to;
    }
  }
}

// --- multiplying ---

// Tensor cores multiply 16 rows of 16 numbers with 8 columns. The order of the numbers in a row does not matter as long as x has the
// same order, so a lane reads eight contiguous numbers for two products.
__device__ __forceinline__ void multiply_tile(float* c, const u32* above, const u32* below, const u32* x) {
#if BITS == 16
  multiply_bf16(c, above[0], below[0], above[1], below[1], x[0], x[1]);
#else
  multiply_f16(c, above[0], below[0], above[1], below[1], x[0], x[1]);
#endif
}

#if BITS == 16
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
  sums += warp * MAX_ROWS + upper;
  ring.set_busy(1);
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
  ring.set_busy(0);
}

#else
// Eight weights of a row.
struct Packed {
  u32 bits[BITS / 4] = {};

  __device__ __forceinline__ void read(u32 at) {
#if BITS == 8
    load_shared2(bits, at);
#else
    load_shared(bits, at);
#endif
  }
  __device__ __forceinline__ void unpack(u32* to) const {  // as pairs in the type of x
#if BITS == 8
#pragma unroll
    for (int i = 0; i < 2; i++) e4m3_to_f16s(to + 2 * i, bits[i]);
#else
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 two = bits[0] >> 8 * i, first = (two & 0x000f000fu) | 0x64006400u, second = (two & 0x00f000f0u) | 0x64006400u;
      to[2 * i] = subtract_f16s(first, 0x64086408u);                           // 1024 + n - 1032
      to[2 * i + 1] = multiply_add_f16s(second, 0x2c002c00u, 0xd480d480u);  // (1024 + 16 n) / 16 - 72
    }
#endif
  }
};

// What a lane has of a group of rows: of rows `line` and 8 + `line`, its columns in BATCH tiles of 32, which are every WARPS-th.
template <class P>
struct Weights {
  static constexpr int TILES = P::K / 32, TIMES = (TILES + WARPS - 1) / WARPS, ROWS = P::GROUP_ROWS;
  static constexpr int BATCH = TIMES < MAX_BATCH ? TIMES : MAX_BATCH;
  static constexpr bool IS_EVEN = TILES % WARPS == 0 && TIMES % BATCH == 0;  // every warp has whole batches of tiles
  Packed above[BATCH], below[BATCH];
  u16 scales[2][BATCH];

  static __device__ __forceinline__ u32 address(const Ring& ring, int row) {  // where a row of this block lies in the ring
    return ring.slots + ring.slot(ring.chunk + row / P::CHUNK_ROWS) * CHUNK_BYTES + row % P::CHUNK_ROWS * P::PADDED_BYTES;
  }
  __device__ __forceinline__ void load(const Ring& ring, int row, int first, int rows) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, line = lane / 4;
    if (first == 0)
#pragma unroll
      for (int r = row; r < row + ROWS; r += P::CHUNK_ROWS)
        if (r < rows) ring.wait_full(ring.chunk + r / P::CHUNK_ROWS);
    // Data past the last row is read and ignored.
    const u32 upper = address(ring, row + line), lower = address(ring, row + 8 + line), mine_at = lane % 4 * BITS;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const u32 tile = (first + i) * WARPS + warp, here = IS_EVEN ? tile : min(tile, (u32)TILES - 1);  // past the end x is 0
      const u32 at = 4 * BITS * here + mine_at, scale_at = P::VALUE_BYTES + 2 * here;
      if (ROWS >= 8 || line < ROWS) above[i].read(upper + at);
      if (ROWS == 16) below[i].read(lower + at);
      if (BITS == 4) scales[0][i] = load_shared_u16(upper + scale_at), scales[1][i] = load_shared_u16(lower + scale_at);
    }
  }
  __device__ void begin(const Ring& ring) {  // the first rows of this block
    if (P::rows()) load(ring, 0, 0, P::rows());
  }
  __device__ static void release(const Ring& ring, int row, int rows) {
    __syncwarp();
    if (threadIdx.x % 32 == 0)
#pragma unroll
      for (int r = row; r < row + ROWS; r += P::CHUNK_ROWS)
        if (r < rows) ring.release_slot(ring.chunk + r / P::CHUNK_ROWS);
  }
};

// The same for 8 and 4 bits, where instructions limit the speed: the 16 rows of a product are rows of the matrix, and its columns
// x and its remainders (six are 0), so no sums cross lanes.
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
    float c[2][4] = {}, other[2][4] = {};
#pragma unroll 1
    for (int first = 0; first < W::TIMES; first += BATCH) {
      if (W::TIMES > BATCH) load_x(first);
      if (row || first) w.load(ring, row, first, rows);
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        u32 wide[2][4];
        w.above[i].unpack(wide[0]), w.below[i].unpack(wide[1]);
        if (BITS == 4) {
          float part[4] = {};  // of a group of 32 columns: scaled before it is added to others
          multiply_tile(part, wide[0], wide[1], mine[i]);
          multiply_tile(part, wide[0] + 2, wide[1] + 2, mine[i] + 2);
#pragma unroll
          for (int k = 0; k < 4; k++) c[i % 2][k] += from_f16(w.scales[k / 2][i]) * part[k];
        } else {
          multiply_tile(c[i % 2], wide[0], wide[1], mine[i]);
          multiply_tile(other[i % 2], wide[0] + 2, wide[1] + 2, mine[i] + 2);
        }
      }
    }
    W::release(ring, row, rows);
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

// The scales of this block's rows of 8 bits, of all layers, in shared memory; none for other weights.
constexpr int LAYER_SCALES = BITS == 8 ? Qkv::MAX_ROWS + Out::MAX_ROWS + GateUp::MAX_ROWS + Down::MAX_ROWS : 0;
constexpr int NUM_SCALES = BITS == 8 ? LAYERS * LAYER_SCALES + Head::MAX_ROWS : 0;

template <class P>
__device__ void load_scales(const float* from, int layers, float* to) {
  for (int r = threadIdx.x; BITS == 8 && r < P::rows(); r += THREADS)
#pragma unroll 8
    for (int layer = 0; layer < layers; layer++) to[layer * LAYER_SCALES + r] = from[P::global_row(layer, r)];
}

// A row's sum over all warps, with its scale.
__device__ __forceinline__ float sum_of(const float* sums, const float* scales, int row) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += sums[w * MAX_ROWS + row];
  return BITS == 8 ? scales[row] * sum : sum;
}
