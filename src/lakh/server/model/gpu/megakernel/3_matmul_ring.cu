// The ring of chunks of weights in shared memory, and the loads into it.

constexpr int CHUNK_WARPS = WGMMA ? 4 : WARPS;  // that read a chunk; each has a sum of its own for a row
constexpr int TEAMS = WARPS / CHUNK_WARPS;      // groups of warps, each with chunks of its own

struct Ring {
  u32 slots, full, empty;  // in shared memory: SLOTS chunks, and for each a barrier for "loaded" and one for "its warps are done"
  u32 quiet;               // in shared memory: whether only few weights may be in flight
  u32 loaded;              // in shared memory: bytes of this step whose loads have begun
  u32 chunk;               // the next chunk, counted over all layers of a step
  u32 at, turn;            // with 4 bits instead: the slot of the next chunk, and how often it was used before

  __device__ u32 slot(u32 n) const { return n % SLOTS; }
  __device__ static void wait(u32 barrier, u32 turn) { wait_barrier_unbounded(barrier, turn & 1); }
  __device__ void wait_full(u32 n) const { wait(full + slot(n) * 8, n / SLOTS); }
  __device__ void wait_empty(u32 n) const {
    if (n >= SLOTS) wait(empty + slot(n) * 8, n / SLOTS - 1);
  }
  __device__ void release_slot(u32 n) const { arrive(empty + slot(n) * 8); }
  __device__ void wait_next(u32 i) const {  // for the next chunk but i
    const u32 slot = at + i;
    wait(full + (slot < SLOTS ? slot : slot - SLOTS) * 8, turn + (slot >= SLOTS));
  }
  template <int COUNT>
  __device__ void release_next(bool is_first_lane) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      if (is_first_lane) arrive(empty + at * 8);
      if (++at == SLOTS) at = 0, turn++;
    }
  }
  __device__ void set_quiet(u32 value) const {
    if (threadIdx.x == 0) store_shared_volatile(quiet, value);
  }
  __device__ void begin() {  // by one thread
    for (u32 s = 0; s < SLOTS; s++) {
      init_barrier(full + s * 8, 1);
      init_barrier(empty + s * 8, CHUNK_WARPS);
    }
    set_quiet(BITS != 4);
    store_shared_volatile(loaded, 0);
    publish_barriers();
    fence_copies();
  }
  // The place of the next chunk, as soon as it is free and few enough loads are in flight. P: the product that it is of.
  template <class P>
  __device__ u32 next_place() {
    const u32 n = chunk++;
    wait_empty(n);
    if (QUIET_BYTES == 0)
      while (load_shared_volatile(quiet)) sleep_for<32>();
    const u32 ahead = load_shared_volatile(quiet) ? P::chunks_in(QUIET_BYTES) : P::chunks_in(BUSY_BYTES);
    if (n >= ahead) wait_full(n - ahead);
    return slot(n);
  }
};

// Flags take the same path as weights, and arrive late if many are in flight. With 4 bits, few are while a block polls; with more bits,
// where memory is nearly busy, whenever it does not multiply (`multiply`): else products of other blocks wait for theirs.
template <class... Arguments>
__device__ __forceinline__ void acquire(const Ring& ring, Arguments&&... arguments) {
  if (BITS == 4) ring.set_quiet(1);
  acquire(static_cast<Arguments&&>(arguments)...);
  if (BITS == 4) ring.set_quiet(0);
}

#if TILED
// Where the chunks of a group of rows lie in the ring: those of the groups that teams multiply at the same time alternate.
template <class P>
__device__ __forceinline__ u32 chunk_of(int group, int i) {
  const int first = group / TEAMS * TEAMS, together = min(TEAMS, P::groups() - first);
  return first * P::GROUP_CHUNKS + i * together + group - first;
}

template <class P>
__device__ void load_weights(Ring& ring, u32& loaded, u64 policy, const TensorMap& map, int layer) {
  const int groups = P::groups();
#pragma unroll 1
  for (int first = 0; first < groups; first += TEAMS)
#pragma unroll 1
    for (int i = 0; i < P::GROUP_CHUNKS; i++)
#pragma unroll 1
      for (int group = first; group < min(first + TEAMS, groups); group++) {
        const u32 place = ring.next_place<P>(), full = ring.full + place * 8;
        expect_bytes(full, CHUNK_BYTES);  // columns and rows past the end are 0
        load_tile(ring.slots + place * CHUNK_BYTES, &map, 0, P::map_row(layer, group), 0, i * P::CHUNK_GROUPS, full, policy);
        loaded += P::group_rows(group) * min(P::CHUNK_GROUPS * 128, P::ROW_BYTES - i * P::CHUNK_GROUPS * 128);
        store_shared_volatile(ring.loaded, loaded);
      }
}
#else
template <class P>
__device__ void load_weights(Ring& ring, u32& loaded, u64 policy, const char* w, int layer) {
  const int rows = P::rows(), lines = P::lines();
ROLLED
  for (int begin = 0; begin < rows; begin += P::CHUNK_ROWS) {
    const int end = min(begin + P::CHUNK_ROWS, rows);
    const u32 place = ring.next_place<P>(), full = ring.full + place * 8;
    expect_bytes(full, (end - begin) * P::ROW_BYTES);
ROLLED
    for (int from = begin; from < end;) {
      const int to = from < lines ? min(lines, end) : end;  // where rows are contiguous
      copy_bulk(ring.slots + place * CHUNK_BYTES + (from - begin) * P::ROW_BYTES, P::row(w, layer, from), (to - from) * P::ROW_BYTES,
                full, policy);
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

template <class P>
__device__ void prefetch_weights(const Ring& ring, Prefetch& ahead, const char* w, int layer, u32 last) {
  const int end = P::lines() * P::ROW_BYTES;
  for (int at = 0; at < end; at += PIECE_BYTES)  // gates and up in turns, as they are loaded
    for (int first = 0; first < P::rows(); first += P::lines()) {
      const u32 size = min(end - at, PIECE_BYTES);
      const u32 loaded = ahead.wait(ring, size, last);
      if ((int)(ahead.bytes + size - loaded) > AHEAD_BYTES) return;  // the step ends
      if (ahead.bytes + size > loaded) prefetch_bulk(P::row(w, layer, first) + at, size);
      ahead.bytes += size;
    }
}

// --- the scales of rows ---

// The scales of this block's rows of 8 bits, of all layers, in shared memory; none for other weights.
constexpr int LAYER_SCALES = BITS == 8 ? Qkv::MAX_ROWS + Out::MAX_ROWS + GateUp::MAX_ROWS + Down::MAX_ROWS : 0;
constexpr int NUM_SCALES = BITS == 8 ? LAYERS * LAYER_SCALES + Head::MAX_ROWS : 0;

// They arrive while the first layer begins; `wait_copies` before they are used.
template <class P>
__device__ void load_scales(const float* from, int layers, float* to) {
  for (int r = threadIdx.x; BITS == 8 && r < P::rows(); r += THREADS)
#pragma unroll 8
    for (int layer = 0; layer < layers; layer++)
      copy_async4((u32)__cvta_generic_to_shared(to + layer * LAYER_SCALES + r), from + P::global_row(layer, r));
}

// A row's sum over the warps that multiplied it, with its scale.
__device__ __forceinline__ float sum_of(const float* sums, const float* scales, int row) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < CHUNK_WARPS; w++) sum += sums[w * SUM_ROWS + row];
  return BITS == 8 ? scales[row] * sum : sum;
}
