#if WGMMA
// Products of four warps: tensor cores read the weights from shared memory as they are, and x as PARTS numbers: e4m3 and e5m2 with 8
// bits, bf16 and bf16 with 16.
//
// A chunk of weights is 8 rows of CHUNK_GROUPS groups of 128 or 64 columns, copied by one instruction: for each group of columns 8 rows
// of 128 bytes, swizzled. In GateUp these are 4 rows of gates and the 4 rows of up that belong to them.
//
// A product of four warps (wgmma) has 64 rows: the 8 rows of the chunk in 8 groups of columns. Its columns are the same 8 groups of x,
// for each part of x. Of the 64 x 8 sums of a part those of equal groups count: warp w has groups 2 w and 2 w + 1, and of them the
// lanes with lane % 4 == w hold row lane / 4. Two teams of four warps take every second group of 8 rows each.

constexpr int MAX_AT_ONCE = 6;  // groups of 8 rows whose sums a team has in registers

// Published activations are numbers of bf16, so they have no remainders with 16 bits.
__device__ constexpr int parts_of(bool remainders) { return BITS == 16 && !remainders ? 1 : PARTS; }

// Of the remainders that follow a part of x. In e5m2, what rounding leaves of 3 bits, and after the second part of 4 more, is so much
// smaller.
__device__ constexpr float part_scale(int part) { return BITS == 16 ? 1 : part ? 16 : 8; }

template <int SUMS>
__device__ __forceinline__ void multiply_parts(float (&sum)[SUMS], u64 rows, u64 columns, int adds) {
#if BITS == 16
  multiply_bf16(sum, rows, columns, adds);
#else
  multiply_e4m3_e5m2(sum, rows, columns, adds);
#endif
}

// The same number in all lanes: the compiler knows that it is the same, so it computes descriptors once for a warp.
__device__ __forceinline__ u32 of_first_lane(u32 number) { return __shfl_sync(ALL, number, 0); }

// The descriptor of a place `bytes` further on. Only 32 bits of it change.
__device__ __forceinline__ u64 further(u64 descriptor, u32 bytes) {
  return (descriptor & 0xffffffff00000000ull) | ((u32)descriptor + bytes / 16);
}

template <class P>
struct Weights {
  __device__ void begin(const Ring&) {}  // tensor cores read them where they are
};

// sums[warp][row]: this block's rows, the groups of columns of this warp. x is in the layout of `store_parts`.
template <class P, bool REMAINDERS>
__device__ void multiply(Ring& ring, Weights<P>&, const u32* x, float* sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, groups = P::groups();
  const int team = of_first_lane(threadIdx.x / 128);
  constexpr int SUMS = 4 * parts_of(REMAINDERS), MAX_GROUPS = (P::MAX_LINES / P::ALIGN + TEAMS - 1) / TEAMS;
  constexpr int AT_ONCE = MAX_GROUPS < MAX_AT_ONCE ? MAX_GROUPS : MAX_AT_ONCE;
  const u64 x_tile = descriptor((u32)__cvta_generic_to_shared(x), P::X_BYTES);
  sums += warp * SUM_ROWS;

  auto store = [&](const float (&sum)[SUMS], int group) {
    float all = 0;
#pragma unroll
    for (int part = parts_of(REMAINDERS) - 1; part >= 0; part--)
      all = all / part_scale(part) + (sum[4 * part] + sum[4 * part + 3]);
    if (lane % 4 == warp && lane / 4 < P::group_rows(group)) sums[P::local_row(group, lane / 4)] = all;
  };

  ring.set_quiet(0);
#pragma unroll 1
  for (int first = team; first < groups; first += TEAMS * AT_ONCE) {
    float sum[AT_ONCE][SUMS];  // not read before all products have ended: else the compiler ends each before it starts the next
    bool is_first = true;
    u32 last = 0;  // the chunk whose products are under way
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int group = first + TEAMS * j;
      if (j && group >= groups) break;
#pragma unroll 1
      for (int i = 0; i < P::GROUP_CHUNKS; i++) {
        const u32 n = of_first_lane(ring.chunk + chunk_of<P>(group, i)), x_at = of_first_lane(i * P::CHUNK_GROUPS * 128);
        ring.wait_full(n);
        const u64 rows = descriptor(ring.slots + ring.slot(n) * CHUNK_BYTES), columns = further(x_tile, x_at);
        begin_products();
#pragma unroll
        for (int tile = 0; tile < P::CHUNK_GROUPS / 8; tile++)
#pragma unroll
          for (int k = 0; k < 4; k++)
            multiply_parts(sum[j], further(rows, 8192 * tile + 32 * k), further(columns, 1024 * tile + 32 * k),
                           tile + k ? 1 : i);
        commit_products();
        if (!is_first) {
          wait_products<1>();
          if (lane == 0) ring.release_slot(last);
        }
        last = n, is_first = false;
      }
    }
    wait_products<0>(sum);
    if (lane == 0) ring.release_slot(last);
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++)
      if (first + TEAMS * j < groups) store(sum[j], first + TEAMS * j);
  }
  ring.chunk += P::chunks();
  sync_warps();
  ring.set_quiet(1);
}
#endif
