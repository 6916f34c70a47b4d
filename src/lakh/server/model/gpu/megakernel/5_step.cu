// A decode step of one sequence: its token, position and block table in, the next token out. All thread blocks go through all
// layers; after every product they publish their shares of it.

#if WGMMA
constexpr int MAX_X_BYTES = max_of(Qkv::X_BYTES * parts_of(true), max_of(Out::X_BYTES, Down::X_BYTES) * parts_of(false));
constexpr int MAX_X = max_of(MAX_X_BYTES / 4, ATTENTION_FLOATS);
#else
constexpr int MAX_COLUMNS = max_of(max_of(WIDTH, QUERIES), FFN);
constexpr int MAX_X = max_of(BITS == 4 ? MAX_COLUMNS / 32 * 18 : MAX_COLUMNS, ATTENTION_FLOATS);
#endif
#if TILED
#define LOADED(matrix) chunks_of_##matrix
#else
#define LOADED(matrix) w_##matrix
#endif
// In shared memory, after the chunks; tensor cores need x at a multiple of 1,024 bytes.
constexpr int RING_BYTES = SLOTS * CHUNK_BYTES, X_AT = RING_BYTES + (WGMMA ? 0 : SLOTS * 16);
constexpr int BARRIERS_AT = RING_BYTES + (WGMMA ? 4 * MAX_X : 0), KEPT_AT = RING_BYTES + SLOTS * 16 + 4 * MAX_X;
constexpr int SUMS_AT = KEPT_AT + KeptTokens::BYTES;
static_assert(KEPT_AT % 16 == 0, "bulk copies need multiples of 16 bytes");

struct Best {
  float score;
  int id;
};

__device__ __forceinline__ Best no_best() { return {-__int_as_float(0x7f800000), NUM_IDS - 1}; }
__device__ __forceinline__ Best better(Best a, Best b) {  // of equals the first
  return b.score > a.score || (b.score == a.score && b.id < a.id) ? b : a;
}
__device__ Best block_best(Best mine, Best* scratch) {
#pragma unroll
  for (int off = 16; off; off >>= 1)
    mine = better(mine, {__shfl_xor_sync(ALL, mine.score, off), __shfl_xor_sync(ALL, mine.id, off)});
  sync_warps();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = mine;
  sync_warps();
  mine = scratch[0];
#pragma unroll
  for (int w = 1; w < WARPS; w++) mine = better(mine, scratch[w]);
  return mine;
}

// Adds a block's rows to the residual stream, which it keeps in float32; the others get it in bf16.
__device__ void add_and_release(float* residual, const float* sums, const float* scales, int first, int rows, Pair* to, u32 round) {
ROLLED
  for (int r = 2 * threadIdx.x; r < rows; r += 2 * THREADS) {
    residual[r] += sum_of(sums, scales, r), residual[r + 1] += sum_of(sums, scales, r + 1);
    release(to + (first + r) / 2, residual[r], residual[r + 1], round);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32 * LOADING_WARPS, 1) decode_step(
    // the model
    const u16* embed, const char* w_qkv, const char* w_o, const char* w_gate_up, const char* w_down, const char* w_head,
    const float* s_qkv, const float* s_o, const float* s_gate_up, const float* s_down, const float* s_head,  // of rows of 8 bits
    const u16* norms, const float* cos, const float* sin,
    // the KV cache, and the sequence
    u16* keys, u16* values, int slots, const int* table, int* position, int* token, int* steps, int* history, float* logits,
    // ready flags: of the residual after attention and after the feed-forward, and of the activations of these names
    Pair* after_attention, Pair* after_ffn, u64* qkv, u64* parts, Pair* attended, Pair* inner, u64* bests,
    // steps so far, and blocks that have finished this one
    u32* counters
#if TILED
    ,
    const __grid_constant__ TensorMap chunks_of_qkv, const __grid_constant__ TensorMap chunks_of_o,
    const __grid_constant__ TensorMap chunks_of_gate_up, const __grid_constant__ TensorMap chunks_of_down,
    const __grid_constant__ TensorMap chunks_of_head
#endif
) {
  extern __shared__ __align__(1024) char memory[];
  u64* full = (u64*)(memory + BARRIERS_AT);
  u64* empty = full + SLOTS;
  u32* x = (u32*)(memory + X_AT);                   // MAX_X: input of the next product; scratch in between
  float *sums = (float*)(memory + SUMS_AT), *other_sums = sums + MAX_ROWS;  // CHUNK_WARPS SUM_ROWS
  float* residual = sums + CHUNK_WARPS * SUM_ROWS;                          // this block's rows
  float *cosine = residual + (Out::MAX_LINES + 3) / 4 * 4, *sine = cosine + HALF;  // of the position
  float* squares = sine + HALF;                                                     // WARPS
  int* is_last = (int*)(squares + WARPS);
  int* quiet = is_last + 1;
  int* loaded = quiet + 1;
  float* scales = (float*)(loaded + 1);  // NUM_SCALES
  float *o_scales = scales + Qkv::MAX_ROWS, *gate_up_scales = o_scales + Out::MAX_ROWS, *down_scales = gate_up_scales + GateUp::MAX_ROWS;
  float* head_scales = scales + LAYERS * LAYER_SCALES;
  constexpr int FLOATS = MAX_X + CHUNK_WARPS * SUM_ROWS + (Out::MAX_LINES + 3) / 4 * 4 + 2 * HALF + WARPS + 3 + NUM_SCALES;
  static_assert(SLOTS * (CHUNK_BYTES + 16) + KeptTokens::BYTES + 4 * FLOATS <= SHARED_BYTES, "more shared memory is needed");

  Ring ring = {(u32)__cvta_generic_to_shared(memory), (u32)__cvta_generic_to_shared(full), (u32)__cvta_generic_to_shared(empty),
               (u32)__cvta_generic_to_shared(quiet), (u32)__cvta_generic_to_shared(loaded)};
  if (TILED && ring.slots % 1024) __trap();
  const KeptTokens kept(memory + KEPT_AT);
  if (threadIdx.x == 0) kept.begin(), ring.begin();
  __syncthreads();

  if (threadIdx.x >= THREADS) {
#if TILED
    keep_registers<40>();
#endif
    const u32 all = LAYERS * (Qkv::bytes() + Out::bytes() + GateUp::bytes() + Down::bytes()) + Head::bytes();
    if (threadIdx.x == THREADS) {
#if TILED
      prefetch_map(chunks_of_qkv), prefetch_map(chunks_of_o), prefetch_map(chunks_of_gate_up);
      prefetch_map(chunks_of_down), prefetch_map(chunks_of_head);
#endif
      const u64 policy = evict_first();  // weights are read once per step
      u32 begun = 0;
ROLLED
      for (int layer = 0; layer < LAYERS; layer++) {
        load_weights<Qkv>(ring, begun, policy, LOADED(qkv), layer);
        load_weights<Out>(ring, begun, policy, LOADED(o), layer);
        load_weights<GateUp>(ring, begun, policy, LOADED(gate_up), layer);
        load_weights<Down>(ring, begun, policy, LOADED(down), layer);
      }
      load_weights<Head>(ring, begun, policy, LOADED(head), 0);
    } else if (threadIdx.x == THREADS + 32 && AHEAD_BYTES > 0) {
      Prefetch ahead = {0};
#pragma unroll 1
      for (int layer = 0; layer <= LAYERS; layer++) {  // after the head the first weights of the next step
        if (layer == LAYERS) prefetch_weights<Head>(ring, ahead, w_head, 0, all);
        prefetch_weights<Qkv>(ring, ahead, w_qkv, layer % LAYERS, all);
        prefetch_weights<Out>(ring, ahead, w_o, layer % LAYERS, all);
        prefetch_weights<GateUp>(ring, ahead, w_gate_up, layer % LAYERS, all);
        prefetch_weights<Down>(ring, ahead, w_down, layer % LAYERS, all);
      }
    }
    if (KeptTokens::EXIST && threadIdx.x == THREADS + 64 && blockIdx.x < ITEMS) {
      const Cache cache = {keys, values, slots, table, position[0]};
      const Split split(cache, blockIdx.x);
#pragma unroll 1
      for (int layer = 0; layer < LAYERS; layer++) kept.load(cache, split, layer);
    }
    return;
  }

#if TILED
  take_registers<224>();
#endif

  const u32 first_round = counters[0] * LAYERS + 1;
  const int at = position[0];
  const u16* embedding = embed + (u64)token[0] * WIDTH;
  Cache cache = {keys, values, slots, table, at};
  cache.new_slot = cache.slot_of(at);
ROLLED
  for (int r = threadIdx.x; r < Out::lines(); r += THREADS) residual[r] = low(embedding[Out::first() + r]);
ROLLED
  for (int d = threadIdx.x; d < HALF; d += THREADS) cosine[d] = cos[at * HALF + d], sine[d] = sin[at * HALF + d];

  load_scales<Qkv>(s_qkv, LAYERS, scales), load_scales<Out>(s_o, LAYERS, o_scales);
  load_scales<GateUp>(s_gate_up, LAYERS, gate_up_scales), load_scales<Down>(s_down, LAYERS, down_scales);
  load_scales<Head>(s_head, 1, head_scales);
  commit_copies();

  u32 first_slots[READ] = {};  // of this block's tokens
  if (!KeptTokens::EXIST && blockIdx.x < ITEMS)
#pragma unroll
    for (int n = 0; n < READ; n++) first_slots[n] = Part(cache, blockIdx.x).slot(cache, n);

  Row row = read_row(embedding), gains = read_row(norms);
ROLLED
  for (int layer = 0; layer < LAYERS; layer++) {
    const u32 round = first_round + layer;
    const int own = layer * LAYER_SCALES;
    Token tokens[READ] = {};  // loaded long before use, as are the gains of the next norm
    if (!KeptTokens::EXIST && blockIdx.x < ITEMS)
#pragma unroll
      for (int n = 0; n < READ; n++) tokens[n] = Part(cache, blockIdx.x).read(cache, layer, n, first_slots[n]);
    Weights<Qkv> of_qkv;  // the first weights of a product are read while its input is awaited
    of_qkv.begin(ring);
    if (layer) acquire(ring, after_ffn, WIDTH / 2, round - 1, row.bits);
    load_normed(row, gains, x, squares);
    gains = read_row(norms + (2 * layer + 1) * WIDTH);
    if (BITS == 8) wait_copies<0>();
    multiply<Qkv, true>(ring, of_qkv, x, sums);
    float scale = norm_scale(squares);
ROLLED
    for (int r = threadIdx.x; r < Qkv::rows(); r += THREADS)
      release(qkv + Qkv::first() + r, scale * sum_of(sums, scales + own, r), round);

ROLLED
    for (int item = blockIdx.x; item < ITEMS; item += BLOCKS) {
      if (item != blockIdx.x) {
        const Part part(cache, item);
#pragma unroll
        for (int n = 0; n < READ; n++) tokens[n] = part.read(cache, layer, n, part.slot(cache, n));
      }
      attend(ring, cache, kept, tokens, layer, item, qkv, cosine, sine, parts, round, (float*)x);
    }
ROLLED
    for (int item = blockIdx.x; item < ITEMS; item += BLOCKS) combine(ring, item, parts, attended, round, (float*)x);
    Weights<Out> of_out;
    of_out.begin(ring);
    load_activations<Out>(ring, attended, round, x);
    multiply<Out, false>(ring, of_out, x, other_sums);
    add_and_release(residual, other_sums, o_scales + own, Out::first(), Out::lines(), after_attention, round);

    Weights<GateUp> of_gate_up;
    of_gate_up.begin(ring);
    acquire(ring, after_attention, WIDTH / 2, round, row.bits);
    load_normed(row, gains, x, squares);
    gains = read_row(norms + (2 * layer + 2) * WIDTH);
    multiply<GateUp, true>(ring, of_gate_up, x, sums);
    scale = norm_scale(squares);
ROLLED
    for (int at = threadIdx.x; at < (2 * GateUp::lines() + 31) / 32 * 32; at += THREADS) {  // gate and up of two lines in four lanes
      const int line = min(at / 2, GateUp::lines() - 1);
      const float mine = scale * sum_of(sums, gate_up_scales + own, line + at % 2 * GateUp::lines());
      const float up = __shfl_down_sync(ALL, mine, 1), gated = __fdividef(mine, 1 + __expf(-mine)) * up;
      const float next = __shfl_down_sync(ALL, gated, 2);
      if (at % 4 == 0 && at / 2 < GateUp::lines()) release(inner + (GateUp::first() + line) / 2, gated, next, round);
    }
    Weights<Down> of_down;
    of_down.begin(ring);
    load_activations<Down>(ring, inner, round, x);
    multiply<Down, false>(ring, of_down, x, other_sums);
    add_and_release(residual, other_sums, down_scales + own, Out::first(), Out::lines(), after_ffn, round);
  }

  Weights<Head> of_head;
  of_head.begin(ring);
  acquire(ring, after_ffn, WIDTH / 2, first_round + LAYERS - 1, row.bits);
  load_normed(row, gains, x, squares);
  multiply<Head, true>(ring, of_head, x, sums);
  const float scale = norm_scale(squares);
  Best mine = no_best();
ROLLED
  for (int r = threadIdx.x; r < Head::rows(); r += THREADS) {
    const float score = scale * sum_of(sums, head_scales, r);
    logits[Head::first() + r] = score;
    mine = better(mine, {score, Head::first() + r});
  }
  // The best token of this block; the last block to finish finds the best of all.
  Best best = block_best(mine, (Best*)x);
  if (threadIdx.x == 0) {
    bests[blockIdx.x] = (u64)__float_as_uint(best.score) << 32 | (u32)best.id;
    *is_last = add_acquire_release(counters + 1, 1) == BLOCKS - 1;
  }
  sync_warps();
  if (!*is_last) return;
  mine = no_best();
  for (int b = threadIdx.x; b < BLOCKS; b += THREADS) {
    const u64 flag = load_relaxed(bests + b);
    mine = better(mine, {__uint_as_float((u32)(flag >> 32)), (int)(u32)flag});
  }
  best = block_best(mine, (Best*)x);
  if (threadIdx.x) return;
  const int step = steps[0];
  history[step] = best.id, token[0] = best.id, position[0] = at + 1, steps[0] = step + 1;
  counters[0]++, counters[1] = 0;
}
