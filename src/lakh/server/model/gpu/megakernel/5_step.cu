// A step of one row: its token, its place and its blocks in, the next token out. All blocks go through all layers; after every
// product they tell each other their shares of it.

constexpr int MOST_X = most(most(most(WIDTH, QUERIES), FFN), ATTENTION_FLOATS);

struct Best {
  float score;
  int id;
};

__device__ __forceinline__ Best none() { return {-__int_as_float(0x7f800000), NUM_IDS - 1}; }
__device__ __forceinline__ Best better(Best a, Best b) {  // of equals the first
  return b.score > a.score || (b.score == a.score && b.id < a.id) ? b : a;
}
__device__ Best best_of_block(Best mine, Best* scratch) {
#pragma unroll
  for (int off = 16; off; off >>= 1)
    mine = better(mine, {__shfl_xor_sync(ALL, mine.score, off), __shfl_xor_sync(ALL, mine.id, off)});
  together();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = mine;
  together();
  mine = scratch[0];
#pragma unroll
  for (int w = 1; w < WARPS; w++) mine = better(mine, scratch[w]);
  return mine;
}

// A block's rows of what is added to the residual, which it keeps in full; the others get it in 16 bits.
__device__ void add_and_tell(float* residual, const float* sums, int first, int rows, u64* to, u32 round) {
  for (int r = 2 * threadIdx.x; r < rows; r += 2 * THREADS) {
    residual[r] += sum_of(sums, r), residual[r + 1] += sum_of(sums, r + 1);
    tell(to + (first + r) / 2, residual[r], residual[r + 1], round);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) whole_step(
    // the model
    const u16* embed, const char* w_qkv, const char* w_o, const char* w_gate_up, const char* w_down, const char* w_head,
    const u16* norms, const float* cos, const float* sin,
    // the cache, and the row
    u16* keys, u16* values, int slots, const int* table, int* position, int* token, int* steps, int* history, float* logits,
    // words: of the residual after attention and after the feed-forward; all others are of the name that they have
    u64* after_attention, u64* after_ffn, u64* qkv, u64* parts, u64* attended, u64* inner, u64* bests,
    // steps so far, and blocks that are done with this one
    u32* counters) {
  extern __shared__ __align__(128) char memory[];
  u64* full = (u64*)(memory + SLOTS * CHUNK_BYTES);
  u64* empty = full + SLOTS;
  u32* x = (u32*)(empty + SLOTS);              // MOST_X: what the next matrix is multiplied with; scratch between
  float* sums = (float*)(x + MOST_X);          // WARPS MOST_ROWS
  float* residual = sums + WARPS * MOST_ROWS;  // this block's rows
  float *cosine = residual + (Out::MOST_LINES + 3) / 4 * 4, *sine = cosine + HALF;  // of the row's place
  float* squares = sine + HALF;                                                     // WARPS
  int* is_last = (int*)(squares + WARPS);
  int* busy = is_last + 1;
  constexpr int FLOATS = MOST_X + WARPS * MOST_ROWS + (Out::MOST_LINES + 3) / 4 * 4 + 2 * HALF + WARPS + 2;
  static_assert(SLOTS * (CHUNK_BYTES + 16) + 4 * FLOATS <= SHARED_BYTES, "more shared memory is needed");

  Ring ring = {(u32)__cvta_generic_to_shared(memory), (u32)__cvta_generic_to_shared(full), (u32)__cvta_generic_to_shared(empty),
               (u32)__cvta_generic_to_shared(busy), 0};
  if (threadIdx.x == 0) ring.begin();
  __syncthreads();

  if (threadIdx.x >= THREADS) {
    if (threadIdx.x > THREADS) return;
    u64 policy;  // weights are not read again before all others were
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    for (int layer = 0; layer < LAYERS; layer++) {
      ask<Qkv>(ring, policy, w_qkv, layer);
      ask<Out>(ring, policy, w_o, layer);
      ask<GateUp>(ring, policy, w_gate_up, layer);
      ask<Down>(ring, policy, w_down, layer);
    }
    ask<Head>(ring, policy, w_head, 0);
    return;
  }

  const u32 first_round = counters[0] * LAYERS + 1;
  const int at = position[0];
  const u64 new_slot = (u64)table[at / PAGE] * PAGE + at % PAGE;
  const u16* embedding = embed + (u64)token[0] * WIDTH;
  const int my_first = Out::first(), my_rows = Out::lines();
  const Cache cache = {keys, values, slots, table, at};
  for (int r = threadIdx.x; r < my_rows; r += THREADS) residual[r] = low(embedding[my_first + r]);
  for (int d = threadIdx.x; d < HALF; d += THREADS) cosine[d] = cos[at * HALF + d], sine[d] = sin[at * HALF + d];

  Row row = read_row(embedding), gains = read_row(norms);
  for (int layer = 0; layer < LAYERS; layer++) {
    const u32 round = first_round + layer;
    Token first = {}, second = {};  // asked for long before they are needed, as are the gains of the next norm
    if (blockIdx.x < ITEMS) {
      const Part part(cache, layer, blockIdx.x);
      first = part.read(0), second = part.read(1);
    }
    if (layer) hear(after_ffn, WIDTH / 2, round - 1, row.words);
    float scale = put_normed(row, gains, x, squares);
    gains = read_row(norms + (2 * layer + 1) * WIDTH);
    multiply<Qkv>(ring, x, sums);
    for (int r = threadIdx.x; r < Qkv::rows(); r += THREADS) tell(qkv + Qkv::first() + r, scale * sum_of(sums, r), round);

    for (int item = blockIdx.x; item < ITEMS; item += BLOCKS) {
      Part part(cache, layer, item);
      if (item != blockIdx.x) first = part.read(0), second = part.read(1);
      attend(part, first, second, item, qkv, cosine, sine, new_slot, parts, round, (float*)x);
    }
    for (int item = blockIdx.x; item < ITEMS; item += BLOCKS) combine(item, parts, attended, round, (float*)x);
    put_words<QUERIES>(attended, round, x);
    multiply<Out>(ring, x, sums);
    add_and_tell(residual, sums, my_first, my_rows, after_attention, round);

    hear(after_attention, WIDTH / 2, round, row.words);
    scale = put_normed(row, gains, x, squares);
    gains = read_row(norms + (2 * layer + 2) * WIDTH);
    multiply<GateUp>(ring, x, sums);
    for (int r = 2 * threadIdx.x; r < GateUp::lines(); r += 2 * THREADS) {
      float gated[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float gate = scale * sum_of(sums, r + i), up = scale * sum_of(sums, GateUp::lines() + r + i);
        gated[i] = gate / (1 + __expf(-gate)) * up;
      }
      tell(inner + (GateUp::first() + r) / 2, gated[0], gated[1], round);
    }
    put_words<FFN>(inner, round, x);
    multiply<Down>(ring, x, sums);
    add_and_tell(residual, sums, my_first, my_rows, after_ffn, round);
  }

  hear(after_ffn, WIDTH / 2, first_round + LAYERS - 1, row.words);
  const float scale = put_normed(row, gains, x, squares);
  multiply<Head>(ring, x, sums);
  Best mine = none();
  for (int r = threadIdx.x; r < Head::rows(); r += THREADS) {
    const float score = scale * sum_of(sums, r);
    logits[Head::first() + r] = score;
    mine = better(mine, {score, Head::first() + r});
  }
  // The best of this block, and by the block that is done last the best of all.
  Best best = best_of_block(mine, (Best*)x);
  if (threadIdx.x == 0) {
    bests[blockIdx.x] = (u64)__float_as_uint(best.score) << 32 | (u32)best.id;
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counters + 1) : "memory");
    *is_last = before == BLOCKS - 1;
  }
  together();
  if (!*is_last) return;
  mine = none();
  for (int b = threadIdx.x; b < BLOCKS; b += THREADS) {
    u64 word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(bests + b) : "memory");
    mine = better(mine, {__uint_as_float((u32)(word >> 32)), (int)(u32)word});
  }
  best = best_of_block(mine, (Best*)x);
  if (threadIdx.x) return;
  const int step = steps[0];
  history[step] = best.id, token[0] = best.id, position[0] = at + 1, steps[0] = step + 1;
  counters[0]++, counters[1] = 0;
}
