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
// A tile is 256 columns of a row: two groups of each lane.
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

// What a lane has of a group of rows: of rows `line` and 8 + `line`, its groups in BATCH tiles, which are every WARPS-th.
template <class P>
struct Weights {
  static constexpr int GROUPS = P::K / 32, TILES = (GROUPS + TILE_GROUPS - 1) / TILE_GROUPS, TIMES = (TILES + WARPS - 1) / WARPS;
  static constexpr int BATCH = TIMES < MAX_BATCH ? TIMES : MAX_BATCH, ROWS = P::GROUP_ROWS;
  static constexpr bool IS_EVEN = GROUPS % (TILE_GROUPS * WARPS * BATCH) == 0;  // every warp has whole batches of tiles
  static constexpr bool BEGINS = P::MAX_ROWS <= ROWS;  // reads weights while x is awaited; with more rows registers would spill
  u32 bits[BATCH][2][LANE_GROUPS][4];
  u32 scales[BATCH][2];

  // The first of the groups of a thread in its warp's tile i; it can be past the end.
  static __device__ __forceinline__ int group(int thread, int i) {
    return (i * WARPS + thread / 32) * TILE_GROUPS + thread % 4 * LANE_GROUPS;
  }
  __device__ __forceinline__ void load(const Ring& ring, const RowGroup<P>& in_ring, int thread, int first) {
    const int line = thread % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      // Data past the last row is read and ignored.
      const u32 at = in_ring.address(ring, (8 * half + line) % ROWS);
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const u32 here = IS_EVEN ? group(thread, first + i) : min(group(thread, first + i), GROUPS - LANE_GROUPS);  // past the end x is 0
#pragma unroll
        for (int g = 0; g < LANE_GROUPS; g++) load_shared4(bits[i][half][g], at + 16 * (here + g));
        load_shared(&scales[i][half], at + P::VALUE_BYTES + 2 * here);
      }
    }
  }
  __device__ void begin(const Ring& ring) {  // the first rows of this block
    if (!BEGINS || !P::rows()) return;
    const RowGroup<P> in_ring(ring, 0);
    in_ring.wait(ring, P::rows());
    load(ring, in_ring, thread_index(), 0);
  }
};

// What a lane has of x in a tile: one of the columns of products, if that belongs to its groups, and the scales of its groups.
struct Activations {
  u32 bytes[LANE_GROUPS][2][4];
  GroupScale scales[LANE_GROUPS];

  __device__ __forceinline__ void load(const u32* x, int thread, int group, int groups) {
    const int column = thread % 32 / 4;
    const bool is_inside = group < groups, has_column = is_inside && column / 2 == thread % 4;
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

// Sums as with 16 bits.
template <class P, bool REMAINDERS>
__device__ void multiply(Ring& ring, Weights<P>& w, const u32* x, float* sums) {
  typedef Weights<P> W;
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32, line = lane / 4, rows = P::rows();
  Activations mine[W::BATCH];
  auto load_x = [&](int first) {
#pragma unroll
    for (int i = 0; i < W::BATCH; i++) mine[i].load(x, thread, W::group(thread, first + i), W::GROUPS);
  };
  if (W::TIMES == W::BATCH) load_x(0);
  sums += warp * MAX_ROWS;
  ring.set_busy(1);
#pragma unroll 1
  for (int row = 0; row < rows; row += W::ROWS) {
    const RowGroup<P> in_ring(ring, row);
    if (!W::BEGINS || row) in_ring.wait(ring, rows - row);
    float c[2] = {};
#pragma unroll 1
    for (int first = 0; first < W::TIMES; first += W::BATCH) {
      if (W::TIMES > W::BATCH) load_x(first);
      if (!W::BEGINS || row || first) w.load(ring, in_ring, thread, first);
      if (first + W::BATCH >= W::TIMES) in_ring.release(ring, rows - row);  // registers have them
#pragma unroll
      for (int i = 0; i < W::BATCH; i++)
#pragma unroll
        for (int g = 0; g < LANE_GROUPS; g++) {
          const u32 *above = w.bits[i][0][g], *below = w.bits[i][1][g];
          constexpr int START_BITS = 0x4b400000, ZEROS[4] = {}, STARTS[4] = {START_BITS, START_BITS, START_BITS, START_BITS};
          int sixteenths[4], wholes[4];
#pragma unroll
          for (int j = 0; j < 4; j += 2) {
            const u32 LOW = 0x0f0f0f0fu, HIGH = 0xf0f0f0f0u, *of_low = mine[i].bytes[g][0], *of_high = mine[i].bytes[g][1];
            multiply_u8(sixteenths, above[j] & LOW, below[j] & LOW, above[j + 1] & LOW, below[j + 1] & LOW, of_low[j],
                        of_low[j + 1], j ? sixteenths : ZEROS);
            multiply_u8(wholes, above[j] & HIGH, below[j] & HIGH, above[j + 1] & HIGH, below[j + 1] & HIGH, of_high[j],
                        of_high[j + 1], j ? wholes : STARTS);
          }
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int high = 16 * sixteenths[2 * half] + wholes[2 * half];
            const int low = 16 * sixteenths[2 * half + 1] + wholes[2 * half + 1];
            c[half] += from_f16(w.scales[i][half] >> 16 * g) * scaled(high, low, mine[i].scales[g]);
          }
        }
    }
    // Over the four lanes of a row: those of even number get the first row's sum, the others the second's.
    const bool is_second = lane % 2;
    float sum = (is_second ? c[1] : c[0]) + __shfl_xor_sync(ALL, is_second ? c[0] : c[1], 1);
    sum += __shfl_xor_sync(ALL, sum, 2);
    const int of = 8 * is_second + line;
    if (lane % 4 < 2 && of < W::ROWS && row + of < rows) sums[row + of] = sum;
  }
  ring.chunk += P::chunks();
  sync_warps();
  ring.set_busy(0);
}
#endif
