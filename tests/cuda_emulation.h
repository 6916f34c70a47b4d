// Runs CUDA kernels for Hopper on a CPU, in place of ptx.cu: clusters of blocks one after the other, and each thread of a
// cluster as a fiber that runs until it waits for others, in random order. Copies are done at once, and a product of tensor cores is computed
// by each lane for its own sums, from the swizzled layout that the descriptors state. Barriers count arrivals and bytes as
// those of the GPU do.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

using std::min;

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __shared__ static
#define __expf expf

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct uint4 {
  u32 x, y, z, w;
};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

// --- threads ---

struct Index {
  int x;
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Index thread, block;
  int rank;
  bool has_ended = false;
};
static const int STACK_BYTES = 64 * 1024, MAX_CLUSTER = 2, MAX_TURNS = 1 << 14;
static ucontext_t scheduler;
static Fiber* running;
static std::function<void()> kernel_of_fibers;
static Index gridDim;
#define threadIdx running->thread
#define blockIdx running->block
#define cluster_rank running->rank

inline void yield() { swapcontext(&running->context, &scheduler); }

struct Barrier {
  int expected = 0, arrived = 0, phase = 0;

  void arrive_and_wait() {
    const int mine = phase;
    if (++arrived == expected)
      arrived = 0, phase++;
    else
      while (phase == mine) yield();
  }
};

struct CountingBarrier {
  int expected, arrivals, bytes, phase;
};

struct Block {
  Barrier barrier, warps[32], groups[8];
  CountingBarrier counting[64];  // by address: 8 bytes each
  u32 exchanged[32][32];
  alignas(1024) char memory[256 * 1024];
};
static Block blocks_of_cluster[MAX_CLUSTER];
static Barrier cluster_barrier;
#define this_block blocks_of_cluster[cluster_rank]
#define EMULATED_SHARED 512u  // not aligned, as in a block with other shared memory

inline void __syncthreads() { this_block.barrier.arrive_and_wait(); }
inline void sync_cluster() { cluster_barrier.arrive_and_wait(); }

template <class T>
T exchange_values(T value, int from) {
  const int warp = threadIdx.x / 32;
  std::memcpy(&this_block.exchanged[warp][threadIdx.x % 32], &value, 4);
  this_block.warps[warp].arrive_and_wait();
  std::memcpy(&value, &this_block.exchanged[warp][from], 4);
  this_block.warps[warp].arrive_and_wait();
  return value;
}
template <class T>
T __shfl_sync(u32, T value, int from) { return exchange_values(value, from); }
template <class T>
T __shfl_xor_sync(u32, T value, int offset) { return exchange_values(value, (threadIdx.x % 32) ^ offset); }

template <int COUNT>
void keep_registers() {}
template <int COUNT>
void take_registers() {}
inline void launch_dependents() {}
inline void wait_for_previous() {}

// --- numbers ---

inline float __uint_as_float(u32 bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float from_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }
inline u16 to_bf16(float value) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 to_bf16s(float low, float high) { return to_bf16(low) | (u32)to_bf16(high) << 16; }
inline float exp2_(float value) { return exp2f(value); }

// --- copies ---

inline void copy_async(u32 to, const char* from) { std::memcpy(this_block.memory + to, from, 16); }
inline void commit_copies() {}
template <int PENDING>
void wait_copies() {}
inline void fence_copies() {}
inline uint4 load(const uint4* from) { return *from; }

// --- products: of four warps, which wait for them together ---

inline void begin_products() {}
inline void commit_products() {}
template <int PENDING>
void wait_products() {
  this_block.groups[threadIdx.x / 128].arrive_and_wait();
}

// Of a matrix in shared memory, rows of 128 swizzled bytes: groups of 8 rows are 1,024 bytes apart.
inline u64 descriptor(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

// 16 bytes of a row of 128, in the layout of the descriptor.
inline const char* swizzled_at(const char* memory, u64 descriptor, int row, int byte) {
  const u32 start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
  const u32 logical = start + row / 8 * stride + row % 8 * 128 + byte;
  return memory + (logical ^ (logical >> 7 & 7) << 4);
}

inline float element(u64 descriptor, int row, int column) {
  u16 bits;
  std::memcpy(&bits, swizzled_at(this_block.memory, descriptor, row, 2 * column), 2);
  return from_bf16(bits);
}

template <int SUMS>
void multiply(float (&sum)[SUMS], u64 w, u64 x) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  for (int i = 0; i < SUMS; i++) {
    const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2), token = i / 4 * 8 + lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) sum[i] += element(w, row, k) * element(x, token, k);
  }
}

inline void multiply(int (&sum)[128], u64 a, u64 b, int adds) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const char* memory = this_block.memory;
  for (int i = 0; i < 128; i++) {
    const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    int total = adds ? sum[i] : 0;
    for (int half = 0; half < 32; half += 16) {
      signed char left[16], right[16];
      std::memcpy(left, swizzled_at(memory, a, row, half), 16);
      std::memcpy(right, swizzled_at(memory, b, column, half), 16);
      for (int k = 0; k < 16; k++) total += left[k] * right[k];
    }
    sum[i] = total;
  }
}

// --- barriers that count arrivals and bytes, and tiles that report their bytes ---

inline CountingBarrier& counting_barrier(u32 address, int rank) {
  return blocks_of_cluster[rank].counting[(address - EMULATED_SHARED) / 8];
}
inline void init_barrier(u32 address, int arrivals) { counting_barrier(address, cluster_rank) = {arrivals, arrivals, 0, 0}; }
inline void publish_barriers() {}
inline void change_barrier(u32 address, int rank, int arrivals, int bytes) {
  CountingBarrier& barrier = counting_barrier(address, rank);
  barrier.arrivals -= arrivals, barrier.bytes += bytes;
  if (barrier.arrivals == 0 && barrier.bytes == 0) barrier.arrivals = barrier.expected, barrier.phase ^= 1;
}
inline void expect_bytes(u32 address, int bytes) { change_barrier(address, cluster_rank, 1, bytes); }
inline void arrive_at(u32 address, int rank) { change_barrier(address, rank, 1, 0); }
inline void wait_barrier(u32 address, int parity) {
  const CountingBarrier& barrier = counting_barrier(address, cluster_rank);
  while (barrier.phase == parity) yield();
}

struct TensorMap {
  const char* matrix;
  int height, width, rows;  // and 128 columns
};
inline void copy_tile(u32 to, const TensorMap* map, int column, int row, u32 barrier, int rank) {
  for (int i = 0; i < map->rows * 128; i++) {
    const int r = row + i / 128, c = column + i % 128;
    const u32 at = to + i;
    const bool is_inside = r < map->height && c < map->width;
    blocks_of_cluster[rank].memory[at ^ (at >> 7 & 7) << 4] = is_inside ? map->matrix[(u64)r * map->width + c] : 0;
  }
  change_barrier(barrier, rank, 0, -map->rows * 128);
}
inline void load_tile(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  copy_tile(to, map, column, row, barrier, cluster_rank);
}
template <int SIZE>
void load_tile_for_all(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  for (int rank = 0; rank < SIZE; rank++) copy_tile(to, map, column, row, barrier, rank);
}

// --- blocks ---

inline void run_fiber() {
  kernel_of_fibers();
  running->has_ended = true;
  yield();
}

inline void run(int blocks, int threads, std::function<void()> kernel, int cluster = 1) {
  gridDim.x = blocks;
  kernel_of_fibers = kernel;
  for (int first = 0; first < blocks; first += cluster) {
    cluster_barrier = {cluster * threads};
    std::vector<Fiber> fibers(cluster * threads);
    for (int i = 0; i < cluster * threads; i++) {
      Fiber& fiber = fibers[i];
      fiber.thread.x = i % threads, fiber.rank = i / threads, fiber.block.x = first + fiber.rank;
      fiber.stack = std::make_unique<char[]>(STACK_BYTES);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = STACK_BYTES;
      makecontext(&fiber.context, run_fiber, 0);
    }
    for (int rank = 0; rank < cluster; rank++) {
      Block& block = blocks_of_cluster[rank];
      block.barrier = {threads};
      for (Barrier& warp : block.warps) warp = {32};
      for (Barrier& group : block.groups) group = {128};
    }
    std::vector<Fiber*> alive;
    for (Fiber& fiber : fibers) alive.push_back(&fiber);
    std::mt19937 random(first);
    for (int turn = 0; !alive.empty(); turn++) {
      if (turn == MAX_TURNS) fprintf(stderr, "the threads wait for each other\n"), abort();
      std::shuffle(alive.begin(), alive.end(), random);
      for (Fiber* fiber : alive) {
        running = fiber;
        swapcontext(&scheduler, &fiber->context);
      }
      std::erase_if(alive, [](const Fiber* fiber) { return fiber->has_ended; });
    }
  }
}
