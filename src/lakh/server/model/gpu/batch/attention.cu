// Attention of a decode batch: one block for each sequence and key/value head, which has GROUP query heads.
//
// qkv: PARTS x sequences x X in float32, which are added here. The cache is bf16: a page of PAGE tokens of one head is
// contiguous. A warp takes every WARPS-th page of the sequence, straight into registers: LANES lanes have 8 numbers each
// of a token, so nothing goes through shared memory and no warp waits for another before the end.
//
// Programmatic dependent launch: the first page of each warp is loaded before the wait, because nothing in the step
// writes the keys and values of earlier tokens.

#define WARPS 4
#define LANES (D / 8)
#define PER_LOAD (32 / LANES)  // tokens
#define LOADS (PAGE / PER_LOAD)
#define X ((HEADS + 2 * KV_HEADS) * D)
#define NEW ((GROUP + 2) * D)  // queries, key and value of the new token
#define NEW_EACH ((NEW + 32 * WARPS - 1) / (32 * WARPS))
#define LOWEST -1.0e30f

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// The tokens of a page that lie before `at`; zero for others.
__device__ __forceinline__ void load_page(uint4 (&to)[LOADS], const u16* head, int block, int first, int at, int lane) {
  const uint4* from = (const uint4*)(head + (u64)block * PAGE * D) + lane;
#pragma unroll
  for (int j = 0; j < LOADS; j++) {
    const uint4 zero = {0, 0, 0, 0};
    to[j] = first + j * PER_LOAD + lane / LANES < at ? load(from + j * 32) : zero;
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 4)
    batch_attention(const float* qkv, const float* cos, const float* sin, u16* keys, u16* values, const int* tables,
                    const int* positions, u16* out, int slots, int table_width) {
  launch_dependents();
  __shared__ float fresh[NEW];
  __shared__ float sums[WARPS][GROUP][D];
  __shared__ float tops[WARPS][GROUP], weights[WARPS][GROUP];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int kv_head = blockIdx.x % KV_HEADS, sequence = blockIdx.x / KV_HEADS, sequences = gridDim.x / KV_HEADS;
  const int at = positions[sequence];
  const int* table = tables + (u64)sequence * table_width;
  u16* const head_keys = keys + (u64)kv_head * slots * D;
  u16* const head_values = values + (u64)kv_head * slots * D;
  const int num_pages = (at + PAGE - 1) / PAGE;

  // Each lane holds the block of one of the warp's next 32 pages.
  int entries = table[min(warp + WARPS * lane, table_width - 1)];
  uint4 k[LOADS], v[LOADS];
  int page = warp, block = __shfl_sync(~0u, entries, 0);
  if (page < num_pages) {
    load_page(k, head_keys, block, page * PAGE, at, lane);
    load_page(v, head_values, block, page * PAGE, at, lane);
  }
  const int new_slot = table[at / PAGE] * PAGE + at % PAGE;
  wait_for_previous();

  // The new token: sum the parts, rotate queries and key, store key and value.
#pragma unroll
  for (int i = 0; i < NEW_EACH; i++) {
    const int index = thread + i * 32 * WARPS, row = index / D, d = index % D;
    const int head = row < GROUP ? kv_head * GROUP + row : HEADS + (row - GROUP) * KV_HEADS + kv_head;
    if (index < NEW) {
      float value = 0.0f;
#pragma unroll
      for (int part = 0; part < PARTS; part++) value += qkv[((u64)part * sequences + sequence) * X + head * D + d];
      fresh[index] = value;
    }
  }
  __syncthreads();
  float turned[NEW_EACH];
#pragma unroll
  for (int i = 0; i < NEW_EACH; i++) {
    const int index = thread + i * 32 * WARPS, row = index / D, d = index % D;
    if (index < NEW) {
      turned[i] = fresh[index];
      if (row <= GROUP) {
        const int angle = at * (D / 2) + d % (D / 2);
        turned[i] *= cos[angle];
        turned[i] += fresh[row * D + (d + D / 2) % D] * sin[angle] * (d < D / 2 ? -1.0f : 1.0f);
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < NEW_EACH; i++) {
    const int index = thread + i * 32 * WARPS, row = index / D, d = index % D;
    if (index < NEW) {
      if (row < GROUP) {
        fresh[index] = turned[i] * SCALE_LOG2E;  // scores are exponents of 2
      } else {
        const u16 stored = to_bf16(turned[i]);
        (row == GROUP ? head_keys : head_values)[(u64)new_slot * D + d] = stored;
        fresh[index] = low(stored);
      }
    }
  }
  __syncthreads();

  const int mine = lane % LANES * 8;  // the numbers of this lane
  float q[GROUP][8], o[GROUP][8], top[GROUP], weight[GROUP];
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
    float score = 0.0f;
#pragma unroll
    for (int e = 0; e < 8; e++) {
      q[g][e] = fresh[g * D + mine + e];
      score += q[g][e] * fresh[GROUP * D + mine + e];
    }
#pragma unroll
    for (int offset = LANES / 2; offset; offset /= 2) score += __shfl_xor_sync(~0u, score, offset);
    const bool has_new = warp == 0 && lane < LANES;
    top[g] = warp == 0 ? score : LOWEST;
    weight[g] = has_new ? 1.0f : 0.0f;
#pragma unroll
    for (int e = 0; e < 8; e++) o[g][e] = has_new ? fresh[(GROUP + 1) * D + mine + e] : 0.0f;
  }

  for (int round = 1; page < num_pages; page += WARPS, round++) {
    float p[LOADS][GROUP];
#pragma unroll
    for (int j = 0; j < LOADS; j++)
#pragma unroll
      for (int g = 0; g < GROUP; g++) {
        float score = low(k[j].x) * q[g][0];
        score += high(k[j].x) * q[g][1];
        score += low(k[j].y) * q[g][2];
        score += high(k[j].y) * q[g][3];
        score += low(k[j].z) * q[g][4];
        score += high(k[j].z) * q[g][5];
        score += low(k[j].w) * q[g][6];
        p[j][g] = score + high(k[j].w) * q[g][7];
      }
    const int next = page + WARPS;
    if (round % 32 == 0) entries = table[min(next + WARPS * lane, table_width - 1)];
    block = __shfl_sync(~0u, entries, round % 32);
    if (next < num_pages) load_page(k, head_keys, block, next * PAGE, at, lane);
#pragma unroll
    for (int j = 0; j < LOADS; j++)
#pragma unroll
      for (int g = 0; g < GROUP; g++) {
#pragma unroll
        for (int offset = LANES / 2; offset; offset /= 2) p[j][g] += __shfl_xor_sync(~0u, p[j][g], offset);
        if (page * PAGE + j * PER_LOAD + lane / LANES >= at) p[j][g] = LOWEST;
      }
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      float now = top[g];
#pragma unroll
      for (int j = 0; j < LOADS; j++) now = fmaxf(now, p[j][g]);
#pragma unroll
      for (int offset = 16; offset >= LANES; offset /= 2) now = fmaxf(now, __shfl_xor_sync(~0u, now, offset));
      const float shrink = exp2_(top[g] - now);
      top[g] = now;
      weight[g] *= shrink;
#pragma unroll
      for (int e = 0; e < 8; e++) o[g][e] *= shrink;
#pragma unroll
      for (int j = 0; j < LOADS; j++) {
        p[j][g] = exp2_(p[j][g] - now);
        weight[g] += p[j][g];
      }
    }
#pragma unroll
    for (int j = 0; j < LOADS; j++)
#pragma unroll
      for (int g = 0; g < GROUP; g++) {
        o[g][0] += p[j][g] * low(v[j].x);
        o[g][1] += p[j][g] * high(v[j].x);
        o[g][2] += p[j][g] * low(v[j].y);
        o[g][3] += p[j][g] * high(v[j].y);
        o[g][4] += p[j][g] * low(v[j].z);
        o[g][5] += p[j][g] * high(v[j].z);
        o[g][6] += p[j][g] * low(v[j].w);
        o[g][7] += p[j][g] * high(v[j].w);
      }
    if (next < num_pages) load_page(v, head_values, block, next * PAGE, at, lane);
  }

  // Add the tokens of the other lanes, then of the other warps.
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
#pragma unroll
    for (int offset = 16; offset >= LANES; offset /= 2) {
      weight[g] += __shfl_xor_sync(~0u, weight[g], offset);
#pragma unroll
      for (int e = 0; e < 8; e++) o[g][e] += __shfl_xor_sync(~0u, o[g][e], offset);
    }
    if (lane < LANES)
#pragma unroll
      for (int e = 0; e < 8; e++) sums[warp][g][mine + e] = o[g][e];
    if (lane == 0) tops[warp][g] = top[g], weights[warp][g] = weight[g];
  }
  __syncthreads();
  for (int index = thread; index < GROUP * D; index += 32 * WARPS) {
    const int g = index / D, d = index % D;
    float most = tops[0][g], total = 0.0f, divisor = 0.0f;
#pragma unroll
    for (int w = 1; w < WARPS; w++) most = fmaxf(most, tops[w][g]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float share = exp2_(tops[w][g] - most);
      total += share * sums[w][g][d];
      divisor += share * weights[w][g];
    }
    out[((u64)sequence * HEADS + kv_head * GROUP + g) * D + d] = to_bf16(total / divisor);
  }
}
