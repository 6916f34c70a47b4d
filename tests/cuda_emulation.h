// Runs CUDA kernels for Hopper on a CPU, in place of ptx.cu: one thread for each thread of a block, clusters of blocks one
// after the other. Copies are done at once, and a product of tensor cores is computed by each lane for its own sums, from
// the swizzled layout that the descriptors state. Barriers count arrivals and bytes as those of the GPU do.

#include <algorithm>
#include <barrier>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
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
struct Index {
  int x;
};

static thread_local Index threadIdx, blockIdx;
static Index gridDim;
static thread_local int cluster_rank;
static const int MAX_CLUSTER = 2;

struct Block {
  std::unique_ptr<std::barrier<>> barrier;
  std::vector<std::unique_ptr<std::barrier<>>> warp_barriers, group_barriers;
  u32 exchanged[32][32];
  alignas(1024) char memory[256 * 1024];
};
static Block blocks_of_cluster[MAX_CLUSTER];
static std::unique_ptr<std::barrier<>> cluster_barrier;
#define this_block blocks_of_cluster[cluster_rank]
#define shared_memory this_block.memory
#define EMULATED_SHARED 512u  // not aligned, as in a block with other shared memory

inline void __syncthreads() { this_block.barrier->arrive_and_wait(); }

template <class T>
T exchange_values(T value, int from) {
  const int warp = threadIdx.x / 32;
  std::memcpy(&this_block.exchanged[warp][threadIdx.x % 32], &value, 4);
  this_block.warp_barriers[warp]->arrive_and_wait();
  std::memcpy(&value, &this_block.exchanged[warp][from], 4);
  this_block.warp_barriers[warp]->arrive_and_wait();
  return value;
}
template <class T>
T __shfl_sync(u32, T value, int from) { return exchange_values(value, from); }
template <class T>
T __shfl_xor_sync(u32, T value, int offset) { return exchange_values(value, (threadIdx.x % 32) ^ offset); }

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

inline void launch_dependents() {}
inline void wait_for_previous() {}
inline void copy_async(u32 to, const char* from) { std::memcpy(shared_memory + to, from, 16); }
inline void commit_copies() {}
template <int PENDING>
void wait_copies() {}
inline void fence_copies() {}
inline uint4 load(const uint4* from) { return *from; }
inline void begin_products() {}
inline void commit_products() {}
template <int PENDING>
void wait_products() {  // of four warps, together
  this_block.group_barriers[threadIdx.x / 128]->arrive_and_wait();
}

inline float element(u64 descriptor, int row, int column) {
  const u32 start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
  const u32 logical = start + row / 8 * stride + row % 8 * 128 + column * 2;
  u16 bits;
  std::memcpy(&bits, shared_memory + (logical ^ (logical >> 7 & 7) << 4), 2);
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

// --- 8-bit integers ---

inline int integer(u64 descriptor, int row, int column) {
  const u32 start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
  const u32 logical = start + row / 8 * stride + row % 8 * 128 + column;
  return (signed char)shared_memory[logical ^ (logical >> 7 & 7) << 4];
}

inline void multiply(int (&sum)[128], u64 a, u64 b, int adds) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  for (int i = 0; i < 128; i++) {
    const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    int total = adds ? sum[i] : 0;
    for (int k = 0; k < 32; k++) total += integer(a, row, k) * integer(b, column, k);
    sum[i] = total;
  }
}

// --- barriers that count arrivals and bytes, and tiles that report their bytes ---

struct CountingBarrier {
  int expected = 0, arrivals = 0, bytes = 0, phase = 0;
  std::mutex mutex;
  std::condition_variable is_over;
};
static CountingBarrier counting_barriers[MAX_CLUSTER][64];  // by address: 8 bytes each
#define counting_barrier(address, rank) counting_barriers[rank][((address) - EMULATED_SHARED) / 8]

inline void init_barrier(u32 address, int arrivals) {
  CountingBarrier& barrier = counting_barrier(address, cluster_rank);
  barrier.expected = barrier.arrivals = arrivals, barrier.bytes = barrier.phase = 0;
}
inline void publish_barriers() {}
inline void change_barrier(u32 address, int rank, int arrivals, int bytes) {
  CountingBarrier& barrier = counting_barrier(address, rank);
  std::lock_guard<std::mutex> lock(barrier.mutex);
  barrier.arrivals -= arrivals, barrier.bytes += bytes;
  if (barrier.arrivals || barrier.bytes) return;
  barrier.arrivals = barrier.expected, barrier.phase ^= 1;
  barrier.is_over.notify_all();
}
inline void expect_bytes(u32 address, int bytes) { change_barrier(address, cluster_rank, 1, bytes); }
inline void arrive_at(u32 address, int rank) { change_barrier(address, rank, 1, 0); }
inline void wait_barrier(u32 address, int parity) {
  CountingBarrier& barrier = counting_barrier(address, cluster_rank);
  std::unique_lock<std::mutex> lock(barrier.mutex);
  if (!barrier.is_over.wait_for(lock, std::chrono::minutes(3), [&] { return barrier.phase != parity; })) std::abort();
}
inline void sync_cluster() { cluster_barrier->arrive_and_wait(); }

template <int COUNT>
void keep_registers() {}
template <int COUNT>
void take_registers() {}

struct TensorMap {
  const char* matrix;
  int height, width, rows;  // and 128 columns
};
inline void copy_tile(u32 to, const TensorMap* map, int column, int row, u32 barrier, int rank) {
  for (int i = 0; i < map->rows * 128; i++) {
    const int r = row + i / 128, c = column + i % 128;
    const u32 at = to + i;
    const bool is_inside = r < map->height && c < map->width;
    blocks_of_cluster[rank].memory[at ^ (at >> 7 & 7) << 4] =
        is_inside ? map->matrix[(u64)r * map->width + c] : 0;
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

template <class Kernel>
void run(int blocks, int threads, Kernel kernel, int cluster = 1) {
  gridDim.x = blocks;
  for (int first = 0; first < blocks; first += cluster) {
    cluster_barrier = std::make_unique<std::barrier<>>(cluster * threads);
    std::vector<std::thread> all;
    for (int rank = 0; rank < cluster; rank++) {
      Block& block = blocks_of_cluster[rank];
      block.barrier = std::make_unique<std::barrier<>>(threads);
      block.warp_barriers.clear(), block.group_barriers.clear();
      for (int warp = 0; warp < threads / 32; warp++)
        block.warp_barriers.push_back(std::make_unique<std::barrier<>>(32));
      for (int group = 0; group < threads / 128; group++)
        block.group_barriers.push_back(std::make_unique<std::barrier<>>(128));
    }
    for (int rank = 0; rank < cluster; rank++)
      for (int thread = 0; thread < threads; thread++)
        all.emplace_back([=] {
          threadIdx.x = thread, blockIdx.x = first + rank, cluster_rank = rank;
          kernel();
        });
    for (std::thread& one : all) one.join();
  }
}
