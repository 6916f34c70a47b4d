// Runs the CUDA kernels of server/model/gpu/batch on a CPU, in place of ptx.cu: one thread for each thread of a block,
// blocks one after the other. Copies are done at once, and a product of tensor cores is computed by each lane for its own
// sums, from the swizzled layout that the descriptors state.

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

using std::min;

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static
#define __expf expf

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct uint4 {
  u32 x, y, z, w;
};
struct Index {
  int x;
};

static thread_local Index threadIdx, blockIdx;
static Index gridDim;
static std::unique_ptr<std::barrier<>> block_barrier;
static std::vector<std::unique_ptr<std::barrier<>>> warp_barriers;
static u32 exchanged[32][32];
alignas(1024) static char shared_memory[256 * 1024];
#define EMULATED_SHARED 512u  // not aligned, as in a block with other shared memory

inline void __syncthreads() { block_barrier->arrive_and_wait(); }

template <class T>
T exchange(T value, int from) {
  const int warp = threadIdx.x / 32;
  std::memcpy(&exchanged[warp][threadIdx.x % 32], &value, 4);
  warp_barriers[warp]->arrive_and_wait();
  std::memcpy(&value, &exchanged[warp][from], 4);
  warp_barriers[warp]->arrive_and_wait();
  return value;
}
template <class T>
T __shfl_sync(u32, T value, int from) { return exchange(value, from); }
template <class T>
T __shfl_xor_sync(u32, T value, int offset) { return exchange(value, (threadIdx.x % 32) ^ offset); }

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
void wait_products() {}

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

template <class Kernel>
void run(int blocks, int threads, Kernel kernel) {
  gridDim.x = blocks;
  for (int block = 0; block < blocks; block++) {
    block_barrier = std::make_unique<std::barrier<>>(threads);
    warp_barriers.clear();
    for (int warp = 0; warp < threads / 32; warp++) warp_barriers.push_back(std::make_unique<std::barrier<>>(32));
    std::vector<std::thread> all;
    for (int thread = 0; thread < threads; thread++)
      all.emplace_back([=] {
        threadIdx.x = thread, blockIdx.x = block;
        kernel();
      });
    for (std::thread& one : all) one.join();
  }
}
