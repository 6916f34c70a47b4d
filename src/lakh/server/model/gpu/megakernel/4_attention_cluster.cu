#if CLUSTER > 1
// Attention where the blocks of a query head are a cluster, and each has a split. They send rows of the query, and what their warps sum,
// to each other's shared memory, where barriers count what arrives: that takes less time than ready flags, which pass through L2. Keys
// and values of the new token belong to several heads; they come by ready flags, and are used after the earlier tokens.

static_assert(CLUSTER == SPLITS && BLOCKS == ITEMS, "each block has a split of a head");
static_assert(SPLITS <= 8 && Qkv::GROUPS % BLOCKS == 0, "a cluster has at most 8 blocks, and a block rows of its own head");
static_assert(HEAD_DIM == SPLITS * SHARE && SHARE % 4 == 0, "a lane sends up to 4 numbers at once");

constexpr int SENDERS = SPLITS * WARPS;  // warps
constexpr int RUN = LANES / 2;           // numbers that a lane has after `reduce_warp`, side by side

// What arrives in a block in each layer. Nothing is overwritten before it was read, because a block sends more only after it had numbers
// of the next layer, which depend on all blocks.
struct __align__(16) Inbox {
  float query[HEAD_DIM];
  float weights[SENDERS][2];        // the largest score and the weight
  float sums[SENDERS][SHARE + 4];  // padded for the banks
};

struct Mail {
  Inbox* inbox;
  u32 query_barrier, parts_barrier;  // in shared memory

  static constexpr int QUERY_BYTES = 4 * HEAD_DIM, PARTS_BYTES = 4 * SENDERS * (2 + SHARE);

  __device__ void begin() const {  // by one thread
    init_barrier(query_barrier, 1), init_barrier(parts_barrier, 1);
  }
  __device__ void expect() const {  // what comes in the next layer, by one thread
    expect_bytes(query_barrier, QUERY_BYTES), expect_bytes(parts_barrier, PARTS_BYTES);
  }
  // To this place in the inbox of a block of the cluster.
  template <int N>
  __device__ void send(int rank, const float* to, const float (&numbers)[N], u32 barrier) const {
    store_async(address_at((u32)__cvta_generic_to_shared(to), rank), numbers, address_at(barrier, rank));
  }
};

// Rows of the query to the blocks of its head, those of keys and values to all.
__device__ void release_qkv(const Mail& mail, const float* sums, const float* scales, float scale, u64* qkv, u32 round) {
  const int rank = blockIdx.x % SPLITS, rows = Qkv::second_lines();
ROLLED
  for (int i = threadIdx.x; i < HEAD_DIM + rows; i += THREADS) {
    if (i < HEAD_DIM) {
      const int row = i % SHARE;
      const float number[1] = {scale * sum_of(sums, scales, row)};
      mail.send(i / SHARE, mail.inbox->query + rank * SHARE + row, number, mail.query_barrier);
    } else {
      const int row = i - HEAD_DIM;
      release(qkv + QUERIES + Qkv::second_first() + row, scale * sum_of(sums, scales, SHARE + row), round);
    }
  }
}

// The key and value of the new token, by one warp.
__device__ void take_new(const Part& part, const Cache& cache, int layer, const u64* qkv, const float* cosine, const float* sine,
                         u32 round, float* k_and_v) {
  constexpr int N = HALF / 16;  // of a lane: numbers d and HALF + d
  const int lane = threadIdx.x % 32;
  const u64* from[2 * N];
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int at = lane + 32 * i, row = at / HALF * KEYS + part.query_head / GROUP * HEAD_DIM + at % HALF;
    from[2 * i] = qkv + QUERIES + row, from[2 * i + 1] = from[2 * i] + HALF;
  }
  float found[2 * N];
  acquire(from, round, found);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int at = lane + 32 * i, head = at / HALF;
    part.take(cache, layer, 1 + head, at % HALF, found[2 * i], found[2 * i + 1], cosine, sine, k_and_v + head * HEAD_DIM);
  }
  __syncwarp();
}

// From the query that arrives to what all blocks of the cluster send.
__device__ void attend(const Mail& mail, const Cache& cache, Token (&tokens)[READ], int layer, const u64* qkv, const float* cosine,
                       const float* sine, u32 round, float* scratch) {
  const int warp = threadIdx.x / 32, rank = blockIdx.x % SPLITS;
  Part part(cache, blockIdx.x);
  float *q = scratch, *k = q + HEAD_DIM, *v = k + HEAD_DIM;
  wait_barrier_unbounded(mail.query_barrier, layer & 1);
  for (int d = threadIdx.x; d < HALF; d += THREADS)
    part.take(cache, layer, 0, d, mail.inbox->query[d], mail.inbox->query[HALF + d], cosine, sine, q);
  sync_warps();
  part.begin(q);
  part.attend_all(cache, tokens, layer);
  if (rank == 0 && warp == WARPS - 1) {
    take_new(part, cache, layer, qkv, cosine, sine, round, k);
    part.attend_new(k, v);
  }
  const int first = part.reduce_warp(), sender = rank * WARPS + warp;
  // A lane's numbers are side by side, and so of one block.
  const int d = first / 8 * HALF + part.sub * 8 + first % 8;
  float run[RUN];
#pragma unroll
  for (int i = 0; i < RUN; i++) run[i] = part.sum[i];
  mail.send(d / SHARE, mail.inbox->sums[sender] + d % SHARE, run, mail.parts_barrier);
  const float weight[2] = {part.largest, part.weight};
  if (threadIdx.x % 32 < SPLITS)
    mail.send(threadIdx.x % 32, mail.inbox->weights[sender], weight, mail.parts_barrier);
}

// SHARE numbers of a head, two of them by a warp at once: each lane has some senders.
__device__ void combine(const Mail& mail, int layer, Pair* attended, u32 round) {
  constexpr int N = (SENDERS + 31) / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_barrier_unbounded(mail.parts_barrier, layer & 1);
  float share[N], weight = 0, largest = -1e30f;
#pragma unroll
  for (int i = 0; i < N; i++)
    if (lane + 32 * i < SENDERS) largest = fmaxf(largest, mail.inbox->weights[lane + 32 * i][0]);
#pragma unroll
  for (int off = 16; off; off >>= 1) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, off));
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float* of = mail.inbox->weights[min(lane + 32 * i, SENDERS - 1)];
    share[i] = lane + 32 * i < SENDERS ? __expf(of[0] - largest) : 0;
    weight += share[i] * of[1];
  }
  weight = warp_sum(weight);
#pragma unroll
  for (int d = 2 * warp; d < SHARE; d += 2 * WARPS) {
    float a = 0, b = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const float* sums = mail.inbox->sums[min(lane + 32 * i, SENDERS - 1)];
      a += share[i] * sums[d], b += share[i] * sums[d + 1];
    }
    a = warp_sum(a), b = warp_sum(b);
    if (lane == 0) release(attended + (blockIdx.x * SHARE + d) / 2, a / weight, b / weight, round);
  }
}
#endif
