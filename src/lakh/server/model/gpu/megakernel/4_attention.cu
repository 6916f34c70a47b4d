// Attention: a block handles one split of the earlier tokens for one query head; then the splits of a head are combined.

constexpr int LANES = HEAD_DIM / 16;                  // of a token; each has 8 numbers of both halves of its key and value
constexpr int TOKENS_AT_ONCE = WARPS * (32 / LANES);  // tokens
constexpr int READ = 3;                               // tokens of a lane that are attended together
constexpr int SHARE = HEAD_DIM / SPLITS;              // numbers of a head that one block combines
constexpr int PART = HEAD_DIM + 2;                    // flags of a split: sums, the largest score, the weight
constexpr int ATTENTION_FLOATS = (WARPS + 3) * HEAD_DIM + 2 * WARPS;  // scratch

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

struct Cache {
  u16 *keys, *values;
  int slots;         // of a head
  const int* table;  // of this sequence
  int at;            // tokens so far
  u32 new_slot;      // of the token of this step

  __device__ u32 slot_of(int token) const { return (u32)table[token / PAGE] * PAGE + token % PAGE; }
};

struct Split {
  int query_head, start, count;  // tokens

  __device__ Split(const Cache& cache, int item) {
    const int size = (cache.at + SPLITS - 1) / SPLITS;
    query_head = item / SPLITS, start = item % SPLITS * size, count = min(size, cache.at - start);
  }
  __device__ u64 head(const Cache& cache, int layer) const {  // its first number in the cache
    return ((u64)layer * KV_HEADS + query_head / GROUP) * cache.slots * HEAD_DIM;
  }
};

// With 4 bits, and where there is room, the first tokens of a block's first split wait in shared memory. They are loaded as soon as those of the last layer were
// read, so that they are there long before the query. With more bits, weights need this memory: a step of 1.2B on an H200 takes 0.424 ms
// instead of 0.404 in fp8, and 0.673 instead of 0.628 in bf16; with 4 bits 0.350 instead of 0.366.
struct KeptTokens {
  u16 *keys, *values;
  u32 full, empty;  // barriers in shared memory

  static constexpr bool EXIST = KEEPS_TOKENS;
  static constexpr int COUNT = READ * TOKENS_AT_ONCE, BYTES = EXIST ? 4 * COUNT * HEAD_DIM + 16 : 0;  // with the barriers

  __device__ explicit KeptTokens(char* memory) {
    keys = (u16*)memory, values = keys + COUNT * HEAD_DIM;
    full = (u32)__cvta_generic_to_shared(values + COUNT * HEAD_DIM), empty = full + 8;
  }
  __device__ void begin() const {  // by one thread
    if (EXIST) init_barrier(full, 1), init_barrier(empty, WARPS);
  }
  __device__ void load(const Cache& cache, const Split& split, int layer) const {  // by one thread
    const int count = max(min(split.count, COUNT), 0);
    if (layer) wait_barrier_unbounded(empty, (layer - 1) & 1);
    expect_bytes(full, 4 * count * HEAD_DIM);
    for (int t = 0, run; t < count; t += run) {  // of one page
      const int token = split.start + t;
      run = min(PAGE - token % PAGE, count - t);
      const u64 from = split.head(cache, layer) + (u64)cache.slot_of(token) * HEAD_DIM;
      copy_bulk((u32)__cvta_generic_to_shared(keys + t * HEAD_DIM), (const char*)(cache.keys + from), 2 * run * HEAD_DIM, full);
      copy_bulk((u32)__cvta_generic_to_shared(values + t * HEAD_DIM), (const char*)(cache.values + from), 2 * run * HEAD_DIM, full);
    }
  }
  // Lane `sub` of token t.
  __device__ Token read(int t, int sub) const {
    Token token;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int at = t * HEAD_DIM + half * HALF + sub * 8;
      token.k[half] = *(const uint4*)(keys + at), token.v[half] = *(const uint4*)(values + at);
    }
    return token;
  }
};

struct Part : Split {
  int mine, sub;  // this lane's token among those processed at once, and its lane within that token
  float q[16], sum[16], largest, weight;

  __device__ Part(const Cache& cache, int item) : Split(cache, item) {
    mine = threadIdx.x / LANES, sub = threadIdx.x % LANES;
  }
  __device__ bool has(int i) const { return i * TOKENS_AT_ONCE + mine < count; }

  __device__ u32 slot(const Cache& cache, int i) const { return has(i) ? cache.slot_of(start + i * TOKENS_AT_ONCE + mine) : 0; }

  __device__ Token read(const Cache& cache, int layer, int i, u32 slot) const {  // of earlier steps: no block writes there
    Token token = {};
    if (has(i)) {
      const u64 at = head(cache, layer) + (u64)slot * HEAD_DIM + sub * 8;
      const u16 *k = cache.keys + at, *v = cache.values + at;
      token.k[0] = *(const uint4*)k, token.k[1] = *(const uint4*)(k + HALF);
      token.v[0] = *(const uint4*)v, token.v[1] = *(const uint4*)(v + HALF);
    }
    return token;
  }
  __device__ void begin(const float* query) {
    read8(query + sub * 8, q), read8(query + HALF + sub * 8, q + 8);
    largest = -1e30f, weight = 0;
#pragma unroll
    for (int d = 0; d < 16; d++) sum[d] = 0;
  }
  __device__ float score(const float* k) const {
    float a = 0, b = 0;
#pragma unroll
    for (int d = 0; d < 16; d += 2) a += q[d] * k[d], b += q[d + 1] * k[d + 1];
    a += b;
#pragma unroll
    for (int off = 1; off < LANES; off <<= 1) a += __shfl_xor_sync(ALL, a, off);
    return a;
  }
  __device__ void attend(const Token (&tokens)[READ], int i) {
    float numbers[16], scores[READ], now = largest;
#pragma unroll
    for (int n = 0; n < READ; n++) {
      unpack(tokens[n].k, numbers);
      scores[n] = score(numbers);
      now = fmaxf(now, has(i + n) ? scores[n] : -1e30f);
    }
    const float shrink = __expf(largest - now);
    weight *= shrink, largest = now;
#pragma unroll
    for (int d = 0; d < 16; d++) sum[d] *= shrink;
#pragma unroll
    for (int n = 0; n < READ; n++) {
      const float by = has(i + n) ? __expf(scores[n] - now) : 0.f;
      weight += by;
      unpack(tokens[n].v, numbers);
#pragma unroll
      for (int d = 0; d < 16; d++) sum[d] += by * numbers[d];
    }
  }
  // The token of this step, by the first lanes of one warp.
  __device__ void attend_new(const float* k, const float* v) {
    float numbers[16];
    read8(k + sub * 8, numbers), read8(k + HALF + sub * 8, numbers + 8);
    const float mine = score(numbers);
    read8(v + sub * 8, numbers), read8(v + HALF + sub * 8, numbers + 8);
    if (threadIdx.x % 32 >= LANES) return;
    const float now = fmaxf(largest, mine), shrink = __expf(largest - now), by = __expf(mine - now);
    weight = weight * shrink + by, largest = now;
#pragma unroll
    for (int d = 0; d < 16; d++) sum[d] = sum[d] * shrink + by * numbers[d];
  }
  // Over the tokens of all lanes of a warp: with each exchange a lane keeps half of its numbers. The sums are left at
  // sum[0 .. LANES / 2); returns which of the 16 they are.
  __device__ int reduce_warp() {
    float now = largest;
#pragma unroll
    for (int off = LANES; off < 32; off <<= 1) now = fmaxf(now, __shfl_xor_sync(ALL, now, off));
    const float shrink = __expf(largest - now);
    largest = now, weight *= shrink;
#pragma unroll
    for (int d = 0; d < 16; d++) sum[d] *= shrink;
#pragma unroll
    for (int off = LANES; off < 32; off <<= 1) weight += __shfl_xor_sync(ALL, weight, off);
    int first = 0, count = 16;
#pragma unroll
    for (int off = 16; off >= LANES; off >>= 1) {
      count /= 2;
      const bool is_upper = threadIdx.x & off;
      if (is_upper) first += count;
#pragma unroll
      for (int d = 0; d < 8; d++)
        if (d < count) {
          const float other = __shfl_xor_sync(ALL, is_upper ? sum[d] : sum[d + count], off);
          sum[d] = (is_upper ? sum[d + count] : sum[d]) + other;
        }
    }
    return first;
  }
};

// One split: from the flags of qkv to those of parts. Its first tokens were read, or are kept.
__device__ void attend(const Ring& ring, const Cache& cache, const KeptTokens& kept, Token (&tokens)[READ], int layer, int item,
                       const u64* qkv, const float* cosine, const float* sine, u64* parts, u32 round, float* scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Part part(cache, item);
  const bool is_first = item % SPLITS == 0, is_kept = KeptTokens::EXIST && item == blockIdx.x;
  const int kv_head = part.query_head / GROUP;
  float *warp_sums = scratch, *warp_ml = warp_sums + WARPS * HEAD_DIM, *q = warp_ml + 2 * WARPS, *k = q + HEAD_DIM, *v = k + HEAD_DIM;
  // The query, and in the first split key and value. A thread has number d of a first half and number d of the second.
  constexpr int N = (3 * HALF + THREADS - 1) / THREADS;
  const u64* from[2 * N];
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int at = threadIdx.x + i * THREADS, head = at / HALF;
    const int row = head == 0 ? part.query_head * HEAD_DIM : QUERIES + (head == 1 ? 0 : KEYS) + kv_head * HEAD_DIM;
    const bool is_needed = head < (is_first ? 3 : 1);
    from[2 * i] = qkv + (is_needed ? row + at % HALF : part.query_head * HEAD_DIM);  // else any that exists
    from[2 * i + 1] = from[2 * i] + (is_needed ? HALF : 0);
  }
  float found[2 * N];
  acquire(ring, from, round, found);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int at = threadIdx.x + i * THREADS, head = at / HALF, d = at % HALF;
    if (head >= (is_first ? 3 : 1)) continue;
    float a = found[2 * i], b = found[2 * i + 1];
    if (head < 2) {  // not of values
      const float c = cosine[d], s = sine[d], rotated = a * c - b * s;
      b = b * c + a * s, a = rotated;
    }
    if (head == 0) {
      const float by = rsqrtf((float)HEAD_DIM);
      a *= by, b *= by;
    } else {  // as it is in the cache
      const u32 a_bits = to_bf16(a), b_bits = to_bf16(b);
      u16* to = (head == 1 ? cache.keys : cache.values) + part.head(cache, layer) + (u64)cache.new_slot * HEAD_DIM + d;
      if (part.query_head % GROUP == 0) to[0] = a_bits, to[HALF] = b_bits;
      a = low(a_bits), b = low(b_bits);
    }
    q[head * HEAD_DIM + d] = a, q[head * HEAD_DIM + HALF + d] = b;
  }
  sync_warps();
  part.begin(q);
  if (is_kept) {
    wait_barrier_unbounded(kept.full, layer & 1);
#pragma unroll
    for (int n = 0; n < READ; n++) tokens[n] = part.has(n) ? kept.read(n * TOKENS_AT_ONCE + part.mine, part.sub) : Token{};
    __syncwarp();
    if (lane == 0) arrive(kept.empty);
  }
ROLLED
  for (int i = 0; i * TOKENS_AT_ONCE < part.count; i += READ) {
    part.attend(tokens, i);
#pragma unroll
    for (int n = 0; n < READ; n++) tokens[n] = part.read(cache, layer, i + READ + n, part.slot(cache, i + READ + n));
  }
  if (is_first && warp == WARPS - 1) part.attend_new(k, v);
  const int first = part.reduce_warp();
#pragma unroll
  for (int d = 0; d < LANES / 2; d++) {
    const int n = first + d;  // of a lane's numbers
    warp_sums[warp * HEAD_DIM + n / 8 * HALF + part.sub * 8 + n % 8] = part.sum[d];
  }
  if (lane == 0) warp_ml[2 * warp] = part.largest, warp_ml[2 * warp + 1] = part.weight;
  sync_warps();
ROLLED
  for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) {
    float largest = -1e30f, sum = 0, weight = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, warp_ml[2 * w]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float share = __expf(warp_ml[2 * w] - largest);
      sum += warp_sums[w * HEAD_DIM + d] * share, weight += warp_ml[2 * w + 1] * share;
    }
    u64* to = parts + item * PART;
    release(to + d, sum, round);
    if (d == 0) release(to + HEAD_DIM, largest, round);
    if (d == 32 % HEAD_DIM) release(to + HEAD_DIM + 1, weight, round);
  }
  sync_warps();
}

// SHARE numbers of a head: from the flags of its parts to those of attended. One thread polls a flag; then neighbouring lanes have the
// same number of all splits.
__device__ void combine(const Ring& ring, int item, const u64* parts, Pair* attended, u32 round, float* scratch) {
  constexpr int WIDE = SHARE + 2, FLAGS = SPLITS * WIDE, N = (FLAGS + THREADS - 1) / THREADS;
  const int h = item / SPLITS, slice = item % SPLITS * SHARE, split = threadIdx.x % SPLITS;
  const u64* from[N];
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int at = min((int)threadIdx.x + i * THREADS, FLAGS - 1), d = at % WIDE;
    from[i] = parts + (h * SPLITS + at / WIDE) * PART + (d < SHARE ? slice + d : HEAD_DIM + d - SHARE);
  }
  float found[N];
  acquire(ring, from, round, found);
#pragma unroll
  for (int i = 0; i < N; i++)
    if (threadIdx.x + i * THREADS < FLAGS) scratch[threadIdx.x + i * THREADS] = found[i];
  sync_warps();
ROLLED
  for (int d = threadIdx.x / SPLITS; d < SHARE; d += THREADS / SPLITS) {
    const float* part = scratch + split * WIDE;
    float largest = part[SHARE];
#pragma unroll
    for (int off = 1; off < SPLITS; off <<= 1) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, off));
    const float share = __expf(part[SHARE] - largest);
    float sum = part[d] * share, weight = part[SHARE + 1] * share;
#pragma unroll
    for (int off = 1; off < SPLITS; off <<= 1) sum += __shfl_xor_sync(ALL, sum, off), weight += __shfl_xor_sync(ALL, weight, off);
    const float mine = sum / weight, next = __shfl_down_sync(ALL, mine, SPLITS);
    if (d % 2 == 0 && split == 0) release(attended + (h * HEAD_DIM + slice + d) / 2, mine, next, round);
  }
  sync_warps();
}
