// Products with weights of 4 bits: of 8-bit integers, on tensor cores that multiply 16 rows of 32 numbers with 8 columns.
//
// x is stored for them (`store_eight` in 4_activations.cu): groups of 32 integers X of 16 bits, each for scale * X, as two bytes with
// X = 256 * high + low. Masks make bytes of the weights n: the low halves of the bytes of 32 bits are numbers 0, 4, 1, 5 of eight, and
// the high halves are numbers 2, 6, 3, 7, times 16. Their sums are added as integers, the first ones times 16; 8 times the sum of X is
// subtracted for n - 8.
//
// A lane reads all 128 bits of a group of weights at once, so the four lanes of a row have different groups, with different scales.
// Therefore the 8 columns of a product are high and low of these four groups, with 0 for the numbers of other lanes: the two sums that
// a lane gets of each row are those of its own group.

#if BITS == 4
// A tile is 256 columns of 16 rows: two groups of each lane, of rows `line` and 8 + `line`.
constexpr int TILE_GROUPS = 8, LANE_GROUPS = 2;

// Of a group in x: numbers 0, 4, 1, 5 of its four eights, then 2, 6, 3, 7; of the high bytes, then of the low ones. After all groups:
// for each the scale of 16 X, and what `scaled` adds.
constexpr int GROUP_WORDS = 16;
struct GroupScale {
  float scale, offset;
};
constexpr float START = 12582912.0f;  // 1.5 * 2^23: the bits of START + i are the bits of START plus i, for |i| < 2^22

// Integer sums of high and low bytes, which started at START.
__device__ __forceinline__ float scaled(int high, int low, const GroupScale& of) {
  return __int_as_float(low) * of.scale + (__int_as_float(high) * (256 * of.scale) + of.offset);
}

// What a lane has of x in a tile: one of the columns of products, if that belongs to its groups, and the scales of its groups.
struct Activations {
  u32 bytes[LANE_GROUPS][2][4];
  GroupScale scales[LANE_GROUPS];

  __device__ __forceinline__ void load(const u32* x, int lane, int group, int groups) {
    const int column = lane / 4;
    const bool is_inside = group < groups, has_column = is_inside && column / 2 == lane % 4;
#pragma unroll
    for (int g = 0; g < LANE_GROUPS; g++) {
      const u32 at = (u32)__cvta_generic_to_shared(x + (group + g) * GROUP_WORDS + column % 2 * 8);
#pragma unroll
      for (int part = 0; part < 2; part++) {
        u32* to = bytes[g][part];
        to[0] = to[1] = to[2] = to[3] = 0;
        if (has_column) load_shared4(to, at + 16 * part);
      }
      scales[g] = is_inside ? ((const GroupScale*)(x + groups * GROUP_WORDS))[group + g] : GroupScale{0, 0};
    }
  }
};

// What a lane has of a tile of weights.
struct Tile {
  u32 bits[2][LANE_GROUPS][4];  // of both rows
  u32 scales[2];                // of both rows: two of f16

  __device__ __forceinline__ void multiply(const Activations& x, float (&sums)[2]) const {
#pragma unroll
    for (int g = 0; g < LANE_GROUPS; g++) {
      const u32 *above = bits[0][g], *below = bits[1][g];
      constexpr int START_BITS = 0x4b400000, ZEROS[4] = {}, STARTS[4] = {START_BITS, START_BITS, START_BITS, START_BITS};
      int sixteenths[4], wholes[4];
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const u32 LOW = 0x0f0f0f0fu, HIGH = 0xf0f0f0f0u, *of_low = x.bytes[g][0], *of_high = x.bytes[g][1];
        multiply_u8(sixteenths, above[j] & LOW, below[j] & LOW, above[j + 1] & LOW, below[j + 1] & LOW, of_low[j], of_low[j + 1],
                    j ? sixteenths : ZEROS);
        multiply_u8(wholes, above[j] & HIGH, below[j] & HIGH, above[j + 1] & HIGH, below[j + 1] & HIGH, of_high[j], of_high[j + 1],
                    j ? wholes : STARTS);
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int high = 16 * sixteenths[2 * half] + wholes[2 * half];
        const int low = 16 * sixteenths[2 * half + 1] + wholes[2 * half + 1];
        sums[half] += from_f16(scales[half] >> 16 * g) * scaled(high, low, x.scales[g]);
      }
    }
  }
};

// A lane's tiles, of one group of rows or two; a warp has every WARPS-th of a row, TIMES in all, one after the other: with more at once
// registers spill, and a step of 1.2B on an H200 takes 0.361 ms instead of 0.350.
template <class P>
struct Weights {
  static constexpr int GROUPS = P::K / 32, TILES = (GROUPS + TILE_GROUPS - 1) / TILE_GROUPS, TIMES = (TILES + WARPS - 1) / WARPS;
  static constexpr int AT_ONCE = TIMES == 1 && P::MAX_LINES > P::ALIGN ? 2 : 1;  // groups of rows
  static constexpr bool IS_EVEN = GROUPS % (TILE_GROUPS * WARPS) == 0;           // every warp has TIMES whole tiles
  static_assert(P::GROUP_CHUNKS <= SLOTS, "the scales of a row are in its last chunk");
  Tile tiles[AT_ONCE];
  int thread;       // what depends on it is computed once for a product
  u32 bits, scales;  // where those of a tile lie, if a group of rows is one chunk: in bytes from its slot

  // The first group of a lane in its warp's tile; it can be past the end.
  __device__ __forceinline__ int group(int tile) const {
    return (tile * WARPS + thread / 32) * TILE_GROUPS + thread % 4 * LANE_GROUPS;
  }
  // Where the 4 bytes at `at` of the lane's row begin, in bytes from a chunk of its columns.
  __device__ __forceinline__ u32 place(u32 at) const {
    const u32 line = thread % 32 / 4;
    return at / 128 % P::CHUNK_GROUPS * (128 * TILE_ROWS) + line * 128 + (at % 128 ^ line * 16);
  }
  // From the slot of the first chunk of a group of rows to that which has the byte `at`.
  static __device__ __forceinline__ u32 slot_of(const Ring& ring, u32 at) {
    const u32 slot = ring.at + at / 128 / P::CHUNK_GROUPS;
    return ring.slots + (slot < SLOTS ? slot : slot - SLOTS) * CHUNK_BYTES;
  }
  __device__ __forceinline__ u32 bits_at(int tile) const { return 16 * (IS_EVEN ? group(tile) : min(group(tile), GROUPS - LANE_GROUPS)); }
  __device__ __forceinline__ u32 scales_at(int tile) const { return P::VALUE_BYTES + bits_at(tile) / 8; }

  // A tile of the next group of rows, whose slots become free with the last one. Past the end x is 0, and the last weights are read.
  __device__ __forceinline__ void read(Ring& ring, Tile& to, int tile) {
    if (tile == 0)
#pragma unroll
      for (int i = 0; i < P::GROUP_CHUNKS; i++) ring.wait_next(i);
    u32 of_bits, of_scales;
    if (P::GROUP_CHUNKS == 1 && TIMES == 1) {
      const u32 slot = ring.slots + ring.at * CHUNK_BYTES;
      of_bits = slot + bits, of_scales = slot + scales;
    } else {
      of_bits = slot_of(ring, bits_at(tile)) + place(bits_at(tile));
      of_scales = slot_of(ring, scales_at(tile)) + place(scales_at(tile));
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      load_shared4(to.bits[half][0], of_bits + 1024 * half);
      load_shared4(to.bits[half][1], (of_bits ^ 16) + 1024 * half);
      load_shared(&to.scales[half], of_scales + 1024 * half);
    }
    if (tile + 1 < TIMES) return;
    __syncwarp();
    ring.release_next<P::GROUP_CHUNKS>(thread % 32 == 0);
  }
  // The first rows of this block, while x is awaited.
  __device__ void begin(Ring& ring) {
    thread = thread_index();
    bits = place(bits_at(0)), scales = place(scales_at(0));
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++)
      if (j < P::groups()) read(ring, tiles[j], 0);
  }
};

// sums[warp][row]: this block's rows, the tiles of this warp.
template <class P, bool REMAINDERS>
__device__ void multiply(Ring& ring, Weights<P>& w, const u32* x, float* sums) {
  typedef Weights<P> W;
  const int lane = w.thread % 32, line = lane / 4, groups = P::groups();
  const bool is_odd = lane % 2, is_upper = lane / 2 % 2;
  const int row = 8 * is_upper + line;  // whose sum the lane has in the end
  float* of_row = sums + w.thread / 32 * SUM_ROWS + P::local_row(0, row);
  Activations mine;
  if (W::TIMES == 1) mine.load(x, lane, w.group(0), W::GROUPS);
#pragma unroll 1
  for (int first = 0; first < groups; first += W::AT_ONCE) {
    float c[W::AT_ONCE][2] = {};
#pragma unroll 1
    for (int tile = 0; tile < W::TIMES; tile++) {
      if (W::TIMES > 1) mine.load(x, lane, w.group(tile), W::GROUPS);
      const bool is_last = tile == W::TIMES - 1;
#pragma unroll
      for (int j = 0; j < W::AT_ONCE; j++) {
        if (j && first + j >= groups) break;
        w.tiles[j].multiply(mine, c[j]);
        // What is read here arrives while other tiles are multiplied.
        if (!is_last || first + W::AT_ONCE + j < groups) w.read(ring, w.tiles[j], is_last ? 0 : tile + 1);
      }
    }
    // Over the four lanes of a row: of four sums each lane is left with one, of two the even lanes.
    float kept[2] = {c[0][0], c[0][1]};
    constexpr int SECOND = W::AT_ONCE - 1;
    if (SECOND)
#pragma unroll
      for (int half = 0; half < 2; half++)
        kept[half] = (is_odd ? c[SECOND][half] : c[0][half]) + __shfl_xor_sync(ALL, is_odd ? c[0][half] : c[SECOND][half], 1);
    float sum = (is_upper ? kept[1] : kept[0]) + __shfl_xor_sync(ALL, is_upper ? kept[0] : kept[1], 2);
    if (!SECOND) sum += __shfl_xor_sync(ALL, sum, 1);
    const int group = first + (SECOND && is_odd);
    if ((SECOND || !is_odd) && group < groups && row < P::group_rows(group)) of_row[group * P::ALIGN] = sum;
  }
  sync_warps();
}
#endif
