// Products of a matrix with the activations x. Each block has a share of the rows. One warp besides the WARPS loads the weights of
// all layers of a step, in the order of their use and independent of what the others wait for: they pass through a ring buffer in shared
// memory, so memory is not idle while blocks wait for each other's flags. It keeps few loads in flight: with more, the flags,
// which take the same path, arrive late.

// A row of 16 or 8 bits is its numbers. 8 bits have a float32 scale for each row, in an array of its own. A row of 4 bits is its
// numbers n, each for scale * (n - 8), then a float16 scale for every 32 of them, padded to 16 bytes. Eight numbers share 32 bits:
// numbers 0, 2, 4, 6 are the low half's quarters, 1, 3, 5, 7 the high half's.

// TILED: a chunk is rows of groups of 128 bytes, copied by one instruction. In each group the 16-byte units of row r are at
// their places exclusive-or r % 8, as wgmma reads them, so eight rows that a warp reads at once lie in different banks.
#define TILED (WGMMA || BITS == 4)
constexpr int TILE_ROWS = WGMMA ? 8 : 16;

// LINES: the rows that are divided over blocks, in multiples of ALIGN. A line is one row, or with TWO also the row LINES below it.
template <int LINES, int K_, int ALIGN_ = 1, bool TWO = false>
struct Matmul {
  static constexpr int ALIGN = ALIGN_, GROUPS = (LINES + ALIGN - 1) / ALIGN;  // of lines
  static constexpr int K = K_, VALUE_BYTES = K * BITS / 8;
  static constexpr int ROW_BYTES = BITS == 4 ? VALUE_BYTES + (K / 16 + 15) / 16 * 16 : VALUE_BYTES;
#if TILED
  // A chunk has TILE_ROWS rows (a group of lines), in CHUNK_GROUPS groups of 128 bytes.
  static constexpr int COLUMN_GROUPS = (ROW_BYTES + 127) / 128, CHUNK_GROUPS = CHUNK_BYTES / (128 * TILE_ROWS);
  static constexpr int GROUP_CHUNKS = (COLUMN_GROUPS + CHUNK_GROUPS - 1) / CHUNK_GROUPS;
  static constexpr int FULL_BYTES = CHUNK_BYTES;
  static constexpr int X_BYTES = GROUP_CHUNKS * CHUNK_GROUPS * 128;  // of a part of x, with WGMMA: whole chunks
  static_assert(TWO ? ALIGN == TILE_ROWS / 2 && LINES % ALIGN == 0 : ALIGN == TILE_ROWS, "a chunk has whole groups of lines");
  static_assert(CHUNK_BYTES % 1024 == 0, "the banks of a row depend on its place in 1,024 bytes");
#else
  static constexpr int FIT = CHUNK_BYTES / ROW_BYTES, CHUNK_ROWS = FIT >= 8 ? 8 : FIT >= 4 ? 4 : FIT >= 2 ? 2 : 1;
  static constexpr int FULL_BYTES = CHUNK_ROWS * ROW_BYTES;
  static_assert(ROW_BYTES <= CHUNK_BYTES && LINES % ALIGN == 0, "this shape cannot be divided over blocks");
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
#if TILED
  static __device__ int groups() { return (lines() + ALIGN - 1) / ALIGN; }
  static __device__ int group_rows(int group) { return TWO ? TILE_ROWS : min(TILE_ROWS, lines() - group * TILE_ROWS); }
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

#if TILED
constexpr int OF_ROWS = TILE_ROWS, OF_WIDTH = TILE_ROWS, OF_GATES = TILE_ROWS / 2;  // multiples
#else
constexpr int OF_ROWS = 1, OF_WIDTH = 2, OF_GATES = 2;
#endif
typedef Matmul<QUERIES + 2 * KEYS, WIDTH, OF_ROWS> Qkv;
typedef Matmul<WIDTH, QUERIES, OF_WIDTH> Out;
typedef Matmul<FFN, WIDTH, OF_GATES, true> GateUp;
typedef Matmul<WIDTH, FFN, OF_WIDTH> Down;
typedef Matmul<NUM_IDS, WIDTH, OF_ROWS> Head;

constexpr int MAX_ROWS =
    max_of(max_of(Qkv::MAX_ROWS, Out::MAX_ROWS), max_of(max_of(GateUp::MAX_ROWS, Down::MAX_ROWS), Head::MAX_ROWS));
// Of a warp: those of a product, then those of Out and Down, which are written while others may still be read.
constexpr int SUM_ROWS = MAX_ROWS + Out::MAX_ROWS;
