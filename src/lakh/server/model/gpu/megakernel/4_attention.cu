// Attention: a block handles one split of the earlier tokens for one query head; then the splits of a head are combined.

constexpr int LANES = HEAD_DIM / 16;           // of a token; each has 8 numbers of both halves of its key and value
constexpr int TOKENS_AT_ONCE = WARPS * (32 / LANES);  // tokens
constexpr int SHARE = HEAD_DIM / SPLITS;       // numbers of a head that one block combines
constexpr int ATTENTION_FLOATS = WARPS * (HEAD_DIM + 2) + 3 * HEAD_DIM;  // scratch

struct Token {
  uint4 k[2], v[2];
};

__device__ __forceinline__ void unpack(const uint4* from, float* to) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 bits[4] = {from[i].x, from[i].y, from[i].z, from[i].w};
#pragma unroll
    for (int w = 0; w < 4; w++) to[8 * i + 2 * w] = low(bits[w]), to[8 * i + 2 * w + 1] = high(bits[w]);
  }
}

__device__ __forceinline__ void read8(const float* from, float* to) {
  const float4 a = ((const float4*)from)[0], b = ((const float4*)from)[1];
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

// A lane's numbers of a head, rotated to the position of the new token.
__device__ __forceinline__ void rotated(const float* head, int sub, const float* cosine, const float* sine, float* to) {
  float a[8], b[8], c[8], s[8];
  read8(head + sub * 8, a), read8(head + HALF + sub * 8, b), read8(cosine + sub * 8, c), read8(sine + sub * 8, s);
#pragma unroll
  for (int i = 0; i < 8; i++) to[i] = a[i] * c[i] - b[i] * s[i], to[8 + i] = b[i] * c[i] + a[i] * s[i];
}

struct Cache {
  u16 *keys, *values;
  int slots;         // of a head
  const int* table;  // of this sequence
  int at;            // tokens so far
};

struct Part {
  u16 *keys, *values;  // of its layer and head
  const int* table;
  int start, count;  // tokens
  int mine, sub;     // this lane's token among those processed at once, and its lane within that token
  float q[16], sum[16], largest, weight;

  __device__ Part(const Cache& cache, int layer, int item) {
    const u64 head = ((u64)layer * KV_HEADS + item / SPLITS / GROUP) * cache.slots * HEAD_DIM;
    const int size = (cache.at + SPLITS - 1) / SPLITS;
    keys = cache.keys + head, values = cache.values + head, table = cache.table;
    start = item % SPLITS * size, count = min(size, cache.at - start);
    mine = threadIdx.x / LANES, sub = threadIdx.x % LANES;
    largest = -1e30f, weight = 0;
#pragma unroll
    for (int d = 0; d < 16; d++) sum[d] = 0;
  }
  __device__ bool has(int i) const { return i * TOKENS_AT_ONCE + mine < count; }
  __device__ Token read(int i) const {  // of earlier steps: no block writes there
    Token token = {};
    if (has(i)) {
      const int at = start + i * TOKENS_AT_ONCE + mine;
      const u64 slot = (u64)table[at / PAGE] * PAGE + at % PAGE;
      const u16 *k = keys + slot * HEAD_DIM + sub * 8, *v = values + slot * HEAD_DIM + sub * 8;
      token.k[0] = *(const uint4*)k, token.k[1] = *(const uint4*)(k + HALF);
      token.v[0] = *(const uint4*)v, token.v[1] = *(const uint4*)(v + HALF);
    }
    return token;
  }
  __device__ float score(const float* k) const {
    float s = 0;
#pragma unroll
    for (int d = 0; d < 16; d++) s += q[d] * k[d];
#pragma unroll
    for (int off = 1; off < LANES; off <<= 1) s += __shfl_xor_sync(ALL, s, off);
    return s;
  }
  __device__ void attend_pair(const Token& one, const Token& two, int i) {
    float k[16], v[16];
    unpack(one.k, k);
    float s1 = score(k);
    unpack(two.k, k);
    float s2 = score(k);
    s1 = has(i) ? s1 : -1e30f, s2 = has(i + 1) ? s2 : -1e30f;
    const float now = fmaxf(largest, fmaxf(s1, s2)), shrink = __expf(largest - now);
    const float p1 = has(i) ? __expf(s1 - now) : 0.f, p2 = has(i + 1) ? __expf(s2 - now) : 0.f;
    weight = weight * shrink + p1 + p2;
    unpack(one.v, v);
#pragma unroll
    for (int d = 0; d < 16; d++) sum[d] = sum[d] * shrink + p1 * v[d];
    unpack(two.v, v);
#pragma unroll
    for (int d = 0; d < 16; d++) sum[d] += p2 * v[d];
    largest = now;
  }
  // The token of this step, by the first warp of a head's first split; stores it in the cache.
  __device__ void attend_new(const float* k, const float* v, const float* cosine, const float* sine, u64 slot, bool keep) {
    float new_k[16], new_v[16];
    rotated(k, sub, cosine, sine, new_k);
    read8(v + sub * 8, new_v), read8(v + HALF + sub * 8, new_v + 8);
#pragma unroll
    for (int d = 0; d < 16; d++) {
      const u32 k_bits = to_bf16s(new_k[d], 0), v_bits = to_bf16s(new_v[d], 0);
      const u64 to = slot * HEAD_DIM + d / 8 * HALF + sub * 8 + d % 8;
      new_k[d] = low(k_bits), new_v[d] = low(v_bits);
      if (keep && threadIdx.x < LANES) keys[to] = k_bits, values[to] = v_bits;
    }
    const float s = score(new_k);
    if (threadIdx.x < LANES) {
      largest = s, weight = 1;
#pragma unroll
      for (int d = 0; d < 16; d++) sum[d] = new_v[d];
    }
  }
  __device__ void reduce_warp() {  // over the tokens of all lanes of a warp
    float now = largest;
#pragma unroll
    for (int off = LANES; off < 32; off <<= 1) now = fmaxf(now, __shfl_xor_sync(ALL, now, off));
    const float shrink = __expf(largest - now);
    largest = now, weight *= shrink;
#pragma unroll
    for (int d = 0; d < 16; d++) sum[d] *= shrink;
#pragma unroll
    for (int off = LANES; off < 32; off <<= 1) {
      weight += __shfl_xor_sync(ALL, weight, off);
#pragma unroll
      for (int d = 0; d < 16; d++) sum[d] += __shfl_xor_sync(ALL, sum[d], off);
    }
  }
};

// One split: from the flags of qkv to those of parts: the sums, the largest score and the weight.
__device__ void attend(Part& part, Token first, Token second, int item, const u64* qkv, const float* cosine, const float* sine,
                       u64 new_slot, u64* parts, u32 round, float* scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, h = item / SPLITS, kh = h / GROUP;
  const bool is_first = item % SPLITS == 0;
  float *warp_sums = scratch, *warp_ml = warp_sums + WARPS * HEAD_DIM, *q = warp_ml + 2 * WARPS, *k = q + HEAD_DIM;
  // The query, and in the first split key and value.
#if BITS == 16
  for (int d = threadIdx.x; d < (is_first ? 3 : 1) * HEAD_DIM; d += THREADS) {
    const int from = d < HEAD_DIM ? h * HEAD_DIM : QUERIES + (d < 2 * HEAD_DIM ? 0 : KEYS) + kh * HEAD_DIM;
    q[d] = acquire(qkv + from + d % HEAD_DIM, round);
  }
#else
  const u64 *query = qkv + h * HEAD_DIM, *key = qkv + QUERIES + kh * HEAD_DIM;
  constexpr int N = (3 * HEAD_DIM + THREADS - 1) / THREADS;
  const u64* from[N];
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int d = threadIdx.x + i * THREADS;
    from[i] = d < HEAD_DIM ? query + d : d < 2 * HEAD_DIM ? key + d - HEAD_DIM : key + KEYS + d - 2 * HEAD_DIM;
    if (d >= (is_first ? 3 : 1) * HEAD_DIM) from[i] = query;  // any that exists
  }
  float found[N];
  acquire(from, round, found);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int d = threadIdx.x + i * THREADS;
    if (d < (is_first ? 3 : 1) * HEAD_DIM) q[d] = found[i];
  }
#endif
  sync_warps();
  rotated(q, part.sub, cosine, sine, part.q);
  const float by = rsqrtf((float)HEAD_DIM);
#pragma unroll
  for (int d = 0; d < 16; d++) part.q[d] *= by;
  if (is_first && warp == 0) part.attend_new(k, k + HEAD_DIM, cosine, sine, new_slot, h % GROUP == 0);
ROLLED
  for (int i = 0; i * TOKENS_AT_ONCE < part.count; i += 2) {
    part.attend_pair(first, second, i);
    first = part.read(i + 2), second = part.read(i + 3);
  }
  part.reduce_warp();
  if (lane < LANES) {
#pragma unroll
    for (int d = 0; d < 16; d++) warp_sums[warp * HEAD_DIM + d / 8 * HALF + part.sub * 8 + d % 8] = part.sum[d];
    if (lane == 0) warp_ml[2 * warp] = part.largest, warp_ml[2 * warp + 1] = part.weight;
  }
  sync_warps();
ROLLED
  for (int d = threadIdx.x; d < HEAD_DIM + 2; d += THREADS) {
    float largest = -1e30f, sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, warp_ml[2 * w]);
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      sum += (d < HEAD_DIM ? warp_sums[w * HEAD_DIM + d] : warp_ml[2 * w + 1]) * __expf(warp_ml[2 * w] - largest);
    release(parts + item * (HEAD_DIM + 2) + d, d == HEAD_DIM ? largest : sum, round);
  }
  sync_warps();
}

// SHARE numbers of a head: from the flags of its parts to those of attended.
__device__ void combine(int item, const u64* parts, Pair* attended, u32 round, float* scratch) {
  const int h = item / SPLITS, slice = item % SPLITS * SHARE;
ROLLED
  for (int i = threadIdx.x; i < SPLITS * (SHARE + 2); i += THREADS) {
    const int d = i % (SHARE + 2), from = d < SHARE ? slice + d : HEAD_DIM + d - SHARE;
    scratch[i] = acquire(parts + (h * SPLITS + i / (SHARE + 2)) * (HEAD_DIM + 2) + from, round);
  }
  sync_warps();
ROLLED
  for (int d = 2 * threadIdx.x; d < SHARE; d += 2 * THREADS) {
    float largest = -1e30f, weight = 0, sum[2] = {};
#pragma unroll
    for (int s = 0; s < SPLITS; s++) largest = fmaxf(largest, scratch[s * (SHARE + 2) + SHARE]);
#pragma unroll
    for (int s = 0; s < SPLITS; s++) {
      const float* one = scratch + s * (SHARE + 2);
      const float share = __expf(one[SHARE] - largest);
      sum[0] += one[d] * share, sum[1] += one[d + 1] * share, weight += one[SHARE + 1] * share;
    }
    release(attended + (h * HEAD_DIM + slice + d) / 2, sum[0] / weight, sum[1] / weight, round);
  }
  sync_warps();
}
