// Products of a matrix with the activations x. Each block has a share of the rows. One warp besides the WARPS loads the weights of
// all layers of a step, in the order of their use and independent of what the others wait for: they pass through a ring buffer in shared
// memory, so memory is not idle while blocks wait for each other's flags. It keeps few loads in flight: with more, the flags,
// which take the same path, arrive late.

// A row of 16 or 8 bits is its numbers. 8 bits have a float32 scale for each row, in an array of its own. A row of 4 bits is its
// numbers n, each for scale * (n - 8), then a float16 scale for every 32 of them, padded to 16 bytes. Eight numbers share 32 bits:
// numbers 0, 2, 4, 6 are the low half's quarters, 1, 3, 5, 7 the high half's.

// LINES: the rows that are divided over blocks, in multiples of ALIGN. A line is one row, or with TWO also the row LINES below it.
template <int LINES, int K_, int ALIGN_ = 1, bool TWO = false>
struct Matmul {
  static constexpr int ALIGN = ALIGN_, GROUPS = (LINES + ALIGN - 1) / ALIGN;  // of lines
  static constexpr int K = K_, VALUE_BYTES = K * BITS / 8;
  static constexpr int ROW_BYTES = BITS == 4 ? VALUE_BYTES + (K / 16 + 15) / 16 * 16 : VALUE_BYTES;
#if WGMMA
  // A chunk has 8 rows (a group of lines), in CHUNK_GROUPS groups of 128 bytes (3_multiply_wgmma.cu).
  static constexpr int COLUMN_GROUPS = (ROW_BYTES + 127) / 128, CHUNK_GROUPS = CHUNK_BYTES / 1024;
  static constexpr int GROUP_CHUNKS = (COLUMN_GROUPS + CHUNK_GROUPS - 1) / CHUNK_GROUPS;
  static constexpr int FULL_BYTES = CHUNK_BYTES;
  static constexpr int X_BYTES = GROUP_CHUNKS * CHUNK_GROUPS * 128;  // of a part of x: whole chunks
  static_assert(TWO ? ALIGN == 4 && LINES % 4 == 0 : ALIGN == 8, "a chunk has 8 rows");
  static_assert(CHUNK_BYTES % 8192 == 0 && WARPS == 8, "two groups of four warps multiply 8 rows each");
#else
  // Rows of 4 bits are padded in shared memory, so that the eight rows that a warp reads at once lie in different banks.
  static constexpr int PADDED_BYTES = BITS == 16 ? ROW_BYTES : ROW_BYTES + (4 * BITS + 128 - ROW_BYTES % 128) % 128;
  static constexpr int FIT = CHUNK_BYTES / PADDED_BYTES;
  static constexpr int CHUNK_ROWS = FIT >= 8 ? 8 : FIT >= 4 ? 4 : FIT >= 2 ? 2 : 1;
  static constexpr int FULL_BYTES = CHUNK_ROWS * ROW_BYTES;
  static constexpr int GROUP_ROWS = 16 / CHUNK_ROWS <= SLOTS ? 16 : 8 / CHUNK_ROWS <= SLOTS ? 8 : 4;  // of 4 bits
  static_assert(PADDED_BYTES <= CHUNK_BYTES && LINES % ALIGN == 0, "this shape cannot be divided over blocks");
#endif
  static constexpr int MAX_LINES = (GROUPS + BLOCKS - 1) / BLOCKS * ALIGN;
  static constexpr int MAX_ROWS = (MAX_LINES * (TWO ? 2 : 1) + 3) / 4 * 4;
  static_assert(K % (8 * WARPS) == 0 && ROW_BYTES % 16 == 0, "bulk copies need multiples of 16 bytes");

  static __device__ constexpr u32 chunks_in(int bytes) {
    const int chunks = (bytes + FULL_BYTES / 2) / FULL_BYTES;
    return chunks < 1 ? 1 : chunks > SLOTS ? SLOTS : chunks;
  }
  // This block's share; its rows are numbered from 0, with TWO the second rows of all lines after the first ones.
  static __device__ int first() { return (u32)GROUPS * block_index() / BLOCKS * ALIGN; }
  static __device__ int lines() {
    const int end = (u32)GROUPS * (block_index() + 1) / BLOCKS * ALIGN;
    return (LINES % ALIGN ? min(end, LINES) : end) - first();  // the last group may be smaller
  }
  static __device__ int rows() { return lines() * (TWO ? 2 : 1); }
  static __device__ u32 bytes() { return rows() * ROW_BYTES; }
#if WGMMA
  static __device__ int groups() { return (lines() + ALIGN - 1) / ALIGN; }
  static __device__ int group_rows(int group) { return TWO ? 8 : min(8, lines() - group * 8); }
  static __device__ int local_row(int group, int row) { return group * ALIGN + row % ALIGN + (TWO && row >= ALIGN ? lines() : 0); }
  static __device__ int chunks() { return groups() * GROUP_CHUNKS; }
  // The first row of a group of lines, as the tensor map counts rows.
  static __device__ int map_row(int layer, int group) { return layer * (LINES * (TWO ? 2 : 1)) + first() + group * ALIGN; }
#else
  static __device__ int chunks() { return (rows() + CHUNK_ROWS - 1) / CHUNK_ROWS; }
#endif
  static __device__ u64 global_row(int layer, int local) {
    return (u64)layer * (LINES * (TWO ? 2 : 1)) + first() + local + (local < lines() ? 0 : LINES - lines());
  }
  static __device__ const char* row(const char* w, int layer, int local) { return w + global_row(layer, local) * ROW_BYTES; }
};

#if WGMMA
typedef Matmul<QUERIES + 2 * KEYS, WIDTH, 8> Qkv;
typedef Matmul<WIDTH, QUERIES, 8> Out;
typedef Matmul<FFN, WIDTH, 4, true> GateUp;
typedef Matmul<WIDTH, FFN, 8> Down;
typedef Matmul<NUM_IDS, WIDTH, 8> Head;
#else
typedef Matmul<QUERIES + 2 * KEYS, WIDTH> Qkv;
typedef Matmul<WIDTH, QUERIES, 2> Out;
typedef Matmul<FFN, WIDTH, 2, true> GateUp;
typedef Matmul<WIDTH, FFN, 2> Down;
typedef Matmul<NUM_IDS, WIDTH> Head;
#endif

constexpr int MAX_ROWS =
    max_of(max_of(Qkv::MAX_ROWS, Out::MAX_ROWS), max_of(max_of(GateUp::MAX_ROWS, Down::MAX_ROWS), Head::MAX_ROWS));

// --- the ring ---

constexpr int CHUNK_WARPS = WGMMA ? 4 : WARPS;  // that read a chunk; each has a sum of its own for a row

struct Ring {
  u32 slots, full, empty;  // in shared memory: SLOTS chunks, and for each a barrier for "loaded" and one for "its warps are done"
  u32 busy;                // in shared memory: whether the warps are multiplying
  u32 loaded;              // in shared memory: bytes of this step whose loads have begun
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
      init_barrier(empty + s * 8, CHUNK_WARPS);
    }
    set_busy(0);
    store_shared_volatile(loaded, 0);
    publish_barriers();
    fence_copies();
  }
};

#if !WGMMA
template <class P>
__device__ void load_weights(Ring& ring, u32& loaded, u64 policy, const char* w, int layer) {
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
    loaded += (end - begin) * P::ROW_BYTES;
    store_shared_volatile(ring.loaded, loaded);
  }
}
#endif

// --- into L2 ---

// Weights that do not fit into the ring wait in L2. These requests return nothing to the SM, so memory is busy while blocks wait for
// flags, and the flags do not arrive late.
struct Prefetch {
  u32 bytes;  // asked for, of this step

  // Waits until there is a place for the next `size` bytes; returns how many the loader has begun to load.
  __device__ u32 wait(const Ring& ring, u32 size, u32 last) {
    u32 loaded;
    for (;;) {
      loaded = load_shared_volatile(ring.loaded);
      if ((int)(bytes + size - loaded) <= AHEAD_BYTES || loaded == last) break;
      sleep_for<64>();
    }
    return loaded;
  }
};

constexpr int PIECE_BYTES = 16384;  // of a request: with less, the instructions limit the speed

#if !WGMMA
template <class P>
__device__ void prefetch_weights(const Ring& ring, Prefetch& ahead, const char* w, int layer, u32 last) {
  for (int first = 0; first < P::rows(); first += P::lines()) {  // rows that are contiguous
    const char* from = P::row(w, layer, first);
    const char* end = from + P::lines() * P::ROW_BYTES;
    for (; from < end; from += PIECE_BYTES) {
      const u32 size = min((int)(end - from), PIECE_BYTES);
      const u32 loaded = ahead.wait(ring, size, last);
      if ((int)(ahead.bytes + size - loaded) > AHEAD_BYTES) return;  // the step ends
      if (ahead.bytes + size > loaded) prefetch_bulk(from, size);
      ahead.bytes += size;
    }
  }
}
#endif

#if BITS == 4
// --- groups of rows ---

// Where GROUP_ROWS rows of 4 bits, which a warp multiplies at once, lie in the ring.
template <class P>
struct RowGroup {
  static constexpr int CHUNKS = P::GROUP_ROWS / P::CHUNK_ROWS;
  u32 slot, turn;  // of the first chunk

  __device__ __forceinline__ RowGroup(const Ring& ring, int row) {
    const u32 n = ring.chunk + row / P::CHUNK_ROWS;
    slot = n % SLOTS, turn = n / SLOTS;
  }
  __device__ __forceinline__ u32 slot_of(u32 chunk) const {
    return slot + chunk < SLOTS ? slot + chunk : slot + chunk - SLOTS;
  }
  __device__ __forceinline__ u32 address(const Ring& ring, int line) const {
    return ring.slots + slot_of(line / P::CHUNK_ROWS) * CHUNK_BYTES + line % P::CHUNK_ROWS * P::PADDED_BYTES;
  }
  __device__ __forceinline__ void wait(const Ring& ring, int rows) const {  // for the first `rows` of them
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
      if (i * P::CHUNK_ROWS < rows) Ring::wait(ring.full + slot_of(i) * 8, turn + (slot + i >= SLOTS));
  }
  __device__ __forceinline__ void release(const Ring& ring, int rows) const {
    __syncwarp();
    if (thread_index() % 32 == 0)
#pragma unroll
      for (int i = 0; i < CHUNKS; i++)
        if (i * P::CHUNK_ROWS < rows) arrive(ring.empty + slot_of(i) * 8);
  }
};
#endif

// --- the scales of rows ---

// The scales of this block's rows of 8 bits, of all layers, in shared memory; none for other weights.
constexpr int LAYER_SCALES = BITS == 8 ? Qkv::MAX_ROWS + Out::MAX_ROWS + GateUp::MAX_ROWS + Down::MAX_ROWS : 0;
constexpr int NUM_SCALES = BITS == 8 ? LAYERS * LAYER_SCALES + Head::MAX_ROWS : 0;

template <class P>
__device__ void load_scales(const float* from, int layers, float* to) {
  for (int r = threadIdx.x; BITS == 8 && r < P::rows(); r += THREADS)
#pragma unroll 8
    for (int layer = 0; layer < layers; layer++) to[layer * LAYER_SCALES + r] = from[P::global_row(layer, r)];
}

// A row's sum over the warps that multiplied it, with its scale.
__device__ __forceinline__ float sum_of(const float* sums, const float* scales, int row) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < CHUNK_WARPS; w++) sum += sums[w * MAX_ROWS + row];
  return BITS == 8 ? scales[row] * sum : sum;
}
