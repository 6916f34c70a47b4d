// Runs CUDA kernels for Hopper on a CPU, in place of ptx.cu: clusters of blocks one after the other, and each thread of a
// cluster as a fiber that runs until it waits for others, in random order. Blocks of a persistent kernel, which wait for each
// other, run as one cluster. Bulk copies and tiles arrive at a random later turn, other copies at once. A product of tensor cores is
// computed by each lane for its own sums, from registers of its warp or from the swizzled layout that the descriptors state, then at a
// random time between its start and the wait for it. Barriers count arrivals and bytes as those of the GPU do.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

using std::max;
using std::min;

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(bytes)
#define __shared__ static
#define __expf expf
#define __fdividef(a, b) ((a) / (b))

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct uint4 {
  u32 x, y, z, w;
};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct uint2 {
  u32 x, y;
};
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
struct float4 {
  float x, y, z, w;
};
struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

// --- threads ---

struct Index {
  int x;
};
typedef std::deque<std::function<void()>> Products;
struct Fiber {
  ucontext_t start;
  jmp_buf state;  // once it has started: a jump costs less than swapcontext, which asks the kernel for signal masks
  bool has_started = false;
  const int* awaited = nullptr;  // runs again when this is no longer `old`
  int old = 0;
  std::unique_ptr<char[]> stack;
  Index thread, block;
  int rank;
  bool has_ended = false;
  std::vector<Products> products;  // by group; the last is not yet committed
};
static const int STACK_BYTES = 64 * 1024, MAX_CLUSTER = 16, MAX_TURNS = 1 << 16;
static jmp_buf scheduler;
static Fiber* running;
static char failure[80];  // ends the run
extern "C" const char* failure_of_run() { return failure; }
static std::function<void()> kernel_of_fibers;
static Index gridDim;
#define threadIdx running->thread
#define blockIdx running->block
#define cluster_rank running->rank

inline void yield() {
  if (!_setjmp(running->state)) _longjmp(scheduler, 1);
}
inline void wait_while(const int& phase, int old) {
  running->awaited = &phase, running->old = old;
  while (phase == old) yield();
  running->awaited = nullptr;
}
__attribute__((noinline)) void resume(Fiber& fiber) {
  if (fiber.awaited && *fiber.awaited == fiber.old) return;
  running = &fiber;
  if (_setjmp(scheduler)) return;
  if (fiber.has_started) _longjmp(fiber.state, 1);
  fiber.has_started = true;
  setcontext(&fiber.start);
}

struct Barrier {
  int expected = 0, arrived = 0, phase = 0;

  void arrive_and_wait() {
    const int mine = phase;
    if (++arrived == expected)
      arrived = 0, phase++;
    else
      wait_while(phase, mine);
  }
};

struct CountingBarrier {
  int expected, arrivals, bytes, phase;
};

static std::vector<std::function<void()>> copies_in_flight;
static std::mt19937 random_numbers;

// Registers of a lane that products of its warp read.
struct Fragment {
  u32 a[4], b[2];
};

struct Block {
  Barrier barrier, warps[32], groups[8], named[16];
  std::map<u32, CountingBarrier> counting;  // by address
  u32 exchanged[32][32];
  Fragment fragments[32][32];
  alignas(1024) char memory[256 * 1024];
};
static Block blocks_of_cluster[MAX_CLUSTER];
static Barrier cluster_barrier;
#define this_block blocks_of_cluster[cluster_rank]
#define EMULATED_SHARED 512u  // not aligned, as in a block with other shared memory

inline char* shared_memory(u32 alignment = 16) {
  return this_block.memory + (EMULATED_SHARED + alignment - 1) / alignment * alignment;
}
inline u64 __cvta_generic_to_shared(const void* at) { return (const char*)at - this_block.memory; }

inline void __syncthreads() { this_block.barrier.arrive_and_wait(); }
inline void __syncwarp() { this_block.warps[threadIdx.x / 32].arrive_and_wait(); }
template <int BARRIER, int COUNT>
void sync_threads() {
  Barrier& barrier = this_block.named[BARRIER];
  barrier.expected = COUNT;
  barrier.arrive_and_wait();
}
inline void __trap() {
  snprintf(failure, sizeof(failure), "thread %d of block %d traps", threadIdx.x, blockIdx.x);
  while (true) yield();
}
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
template <class T>
T __shfl_down_sync(u32, T value, int offset) {
  const int lane = threadIdx.x % 32;
  return exchange_values(value, lane + offset < 32 ? lane + offset : lane);
}

template <int COUNT>
void keep_registers() {}
template <int COUNT>
void take_registers() {}
inline u32 recomputed(u32 number) { return number; }
inline void launch_dependents() {}
inline void wait_for_previous() {}

// --- numbers ---

inline float __uint_as_float(u32 bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline u32 __float_as_uint(float value) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __int_as_float(int bits) { return __uint_as_float(bits); }
inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 32; i += 8) sum += (signed char)(a >> i) * (signed char)(b >> i);
  return sum;
}
inline u32 __byte_perm(u32 low, u32 high, u32 selected) {
  const u64 bytes = (u64)high << 32 | low;
  u32 result = 0;
  for (int i = 0; i < 4; i++) result |= (u32)(bytes >> 8 * (selected >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
inline float rsqrtf(float value) { return 1 / sqrtf(value); }
inline float from_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }
inline u16 to_bf16(float value) {
  const u32 bits = __float_as_uint(value);
  return std::isnan(value) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 to_bf16s(float low, float high) { return to_bf16(low) | (u32)to_bf16(high) << 16; }
inline float exp2_(float value) { return exp2f(value); }

inline float from_f16(u16 bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return value;
}
inline u16 to_f16(float value) {
  const _Float16 rounded = value;
  u16 bits;
  std::memcpy(&bits, &rounded, 2);
  return bits;
}
inline u32 to_f16s(float low, float high) { return to_f16(low) | (u32)to_f16(high) << 16; }
inline float from_e4m3(u32 bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return (bits & 127) == 127 ? NAN : bits & 128 ? -size : size;
}
// A number of e5m2 is the upper byte of one of f16. To nearest even; beyond its range: its largest number.
inline u32 to_e5m2(float value) {
  if (std::isnan(value)) return 0x7f;
  const float size = std::min(std::abs(value), 57344.0f);
  const float unit = size < ldexpf(1, -14) ? ldexpf(1, -16) : ldexpf(1, std::ilogb(size) - 2);
  return to_f16(copysignf(std::nearbyint(size / unit) * unit, value)) >> 8;
}
inline u32 to_e5m2s(float low, float high) { return to_e5m2(low) | to_e5m2(high) << 8; }

// --- memory that other threads read and write at the same time ---

inline void store_relaxed(u64* to, u64 bits) { *to = bits; }
inline void store_relaxed(u32* to, u32 bits) { *to = bits; }
template <class T>
T load_when_others_have_run(const T* from) {
  yield();
  return *from;
}
inline u64 load_relaxed(const u64* from) { return load_when_others_have_run(from); }
inline void load_relaxed2(u64* to, const u64* from) {
  yield();
  std::memcpy(to, from, 16);
}
inline void load_relaxed4(u32* to, const u32* from) {
  yield();
  std::memcpy(to, from, 16);
}
inline u32 add_acquire_release(u32* to, u32 number) {
  yield();
  const u32 before = *to;
  *to += number;
  return before;
}
inline void load_shared_bytes(void* to, u32 from, int bytes) {
  if (from < EMULATED_SHARED || from % bytes || from + bytes > sizeof(this_block.memory)) __trap();
  std::memcpy(to, this_block.memory + from, bytes);
}
inline void load_shared(u32* to, u32 from) { load_shared_bytes(to, from, 4); }
inline void load_shared4(u32* to, u32 from) { load_shared_bytes(to, from, 16); }
inline void store_shared2(u32 to, const u32* from) {
  if (to % 8) __trap();
  std::memcpy(this_block.memory + to, from, 8);
}
inline void store_shared_volatile(u32 to, u32 bits) { std::memcpy(this_block.memory + to, &bits, 4); }
inline u32 load_shared_volatile(u32 from) {
  u32 bits;
  load_shared(&bits, from);
  return bits;
}

template <int NANOSECONDS>
void sleep_for() {
  yield();
}

// --- copies ---

inline void copy_async(u32 to, const char* from) { std::memcpy(this_block.memory + to, from, 16); }
inline void copy_async4(u32 to, const float* from) { std::memcpy(this_block.memory + to, from, 4); }
inline void commit_copies() {}
template <int PENDING>
void wait_copies() {}
inline void fence_copies() {}
inline uint4 load(const uint4* from) { return *from; }

// --- products of a warp ---

// Tells the product of row lane / 4 and 8 after it with columns 2 (lane % 4) and the next: product(row's lane, which half of
// the rows, column's lane).
template <class T, class Product>
void multiply_fragments(T* sum, const Fragment& mine, Product product) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Fragment* all = this_block.fragments[warp];
  all[lane] = mine;
  __syncwarp();
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 4; k++) sum[i] += product(all[lane / 4 * 4 + k].a + i / 2, all[(lane % 4 * 2 + i % 2) * 4 + k].b);
  __syncwarp();
}
template <class Number>
void multiply_16_bits(float* sum, const Fragment& mine, Number number) {
  multiply_fragments(sum, mine, [=](const u32* a, const u32* b) {
    float total = 0;
    for (int half = 0; half < 2; half++)
      total += number(a[2 * half]) * number(b[half]) + number(a[2 * half] >> 16) * number(b[half] >> 16);
    return total;
  });
}
inline void multiply_bf16(float* sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  multiply_16_bits(sum, {{a0, a1, a2, a3}, {b0, b1}}, from_bf16);
}

inline void multiply_u8(int* sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const int* start) {
  int result[4] = {start[0], start[1], start[2], start[3]};
  multiply_fragments(result, {{a0, a1, a2, a3}, {b0, b1}}, [](const u32* a, const u32* b) {
    int total = 0;
    for (int half = 0; half < 2; half++)
      for (int i = 0; i < 32; i += 8) total += (a[2 * half] >> i & 255) * (signed char)(b[half] >> i);
    return total;
  });
  std::memcpy(sum, result, sizeof(result));
}

// --- products of four warps, which wait for them together ---

inline void begin_products() {
  if (running->products.empty()) running->products.emplace_back();
}
inline void begin_product(std::function<void()> product) { running->products.back().push_back(product); }
inline void commit_products() {
  int some = random_numbers() % 16;
  for (Products& group : running->products)  // in order: a product goes on with the sums of those before it
    for (; !group.empty() && some > 0; some--) group.front()(), group.pop_front();
  running->products.emplace_back();
}
template <int PENDING>
void wait_products() {
  for (int turns = random_numbers() % 8; turns > 0; turns--) yield();
  auto& groups = running->products;
  for (int ending = (int)groups.size() - 1 - PENDING; ending > 0; ending--) {
    for (auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
  this_block.groups[threadIdx.x / 128].arrive_and_wait();
}
template <int PENDING, int N, int SUMS>
void wait_products(float (&)[N][SUMS]) {
  wait_products<PENDING>();
}

// Of a matrix in shared memory, rows of 128 swizzled bytes; groups of 8 rows are `group_bytes` apart.
inline u64 descriptor(u32 address, u32 group_bytes = 1024) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(group_bytes >> 4) << 32 | (u64)1 << 62;
}

// 16 bytes of a row of 128, in the layout of the descriptor.
inline const char* swizzled_at(const char* memory, u64 descriptor, int row, int byte) {
  const u32 start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
  const u32 logical = start + row / 8 * stride + row % 8 * 128 + byte;
  return memory + (logical ^ (logical >> 7 & 7) << 4);
}

inline float element(const char* memory, u64 descriptor, int row, int column) {
  u16 bits;
  std::memcpy(&bits, swizzled_at(memory, descriptor, row, 2 * column), 2);
  return from_bf16(bits);
}

// A lane's sums of 64 rows of a and rows of b: sum i of row and column.
template <class T, int SUMS, class Product>
void begin_product(T (&sum)[SUMS], int adds, Product product) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  begin_product([=, sums = &sum[0], memory = (const char*)this_block.memory] {
    for (int i = 0; i < SUMS; i++) {
      const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      sums[i] = (adds ? sums[i] : 0) + product(memory, row, column);
    }
  });
}

// Over 32 bytes of a row.
template <class T, class A, class B>
T dot(const char* memory, u64 a, int row, A a_number, u64 b, int column, B b_number) {
  T total = 0;
  for (int half = 0; half < 32; half += 16) {
    const char *left = swizzled_at(memory, a, row, half), *right = swizzled_at(memory, b, column, half);
    for (int k = 0; k < 16; k++) total += a_number((unsigned char)left[k]) * b_number((unsigned char)right[k]);
  }
  return total;
}

template <int SUMS>
void multiply_bf16(float (&sum)[SUMS], u64 w, u64 x, int adds) {
  begin_product(sum, adds, [=](const char* memory, int row, int token) {
    float total = 0;
    for (int k = 0; k < 16; k++) total += element(memory, w, row, k) * element(memory, x, token, k);
    return total;
  });
}

template <int SUMS>
void multiply(float (&sum)[SUMS], u64 w, u64 x) {
  multiply_bf16(sum, w, x, 1);
}

inline void multiply(int (&sum)[128], u64 a, u64 b, int adds) {
  auto number = [](int bits) { return (int)(signed char)bits; };
  begin_product(sum, adds, [=](const char* memory, int row, int column) {
    return dot<int>(memory, a, row, number, b, column, number);
  });
}

// The numbers of all bytes: a table costs less than arithmetic for each factor.
struct NumbersOf8Bits {
  float of_e4m3[256], of_e5m2[256];

  NumbersOf8Bits() {
    for (u32 bits = 0; bits < 256; bits++) of_e4m3[bits] = from_e4m3(bits), of_e5m2[bits] = from_f16(bits << 8);
  }
};
static const NumbersOf8Bits numbers;

template <int SUMS>
void multiply_e4m3_e5m2(float (&sum)[SUMS], u64 a, u64 b, int adds) {
  auto e4m3 = [](int bits) { return numbers.of_e4m3[bits]; };
  auto e5m2 = [](int bits) { return numbers.of_e5m2[bits]; };
  begin_product(sum, adds, [=](const char* memory, int row, int column) {
    return dot<float>(memory, a, row, e4m3, b, column, e5m2);
  });
}

// --- barriers that count arrivals and bytes, and tiles that report their bytes ---

inline CountingBarrier& counting_barrier(u32 address, int rank) {
  return blocks_of_cluster[rank].counting[address];
}
inline void init_barrier(u32 address, int arrivals) { counting_barrier(address, cluster_rank) = {arrivals, arrivals, 0, 0}; }
inline void publish_barriers() {}
inline void change_barrier(u32 address, int rank, int arrivals, int bytes) {
  CountingBarrier& barrier = counting_barrier(address, rank);
  barrier.arrivals -= arrivals, barrier.bytes += bytes;
  if (barrier.arrivals == 0 && barrier.bytes == 0) barrier.arrivals = barrier.expected, barrier.phase ^= 1;
}
inline void expect_bytes(u32 address, int bytes) { change_barrier(address, cluster_rank, 1, bytes); }
inline void arrive(u32 address) { change_barrier(address, cluster_rank, 1, 0); }
inline void arrive_at(u32 address, int rank) { change_barrier(address, rank, 1, 0); }
inline void wait_barrier(u32 address, int parity) {
  wait_while(counting_barrier(address, cluster_rank).phase, parity);
}

inline void wait_barrier_unbounded(u32 address, u32 parity) { wait_barrier(address, parity); }

inline u64 evict_first() { return 0; }
inline void copy_bulk(u32 to, const char* from, int bytes, u32 barrier, u64) {
  if (to % 16 || (u64)from % 16 || bytes % 16) __trap();
  copies_in_flight.push_back([=, rank = cluster_rank] {
    std::memcpy(blocks_of_cluster[rank].memory + to, from, bytes);
    change_barrier(barrier, rank, 0, -bytes);
  });
}
inline void copy_bulk(u32 to, const char* from, int bytes, u32 barrier) { copy_bulk(to, from, bytes, barrier, 0); }
inline void prefetch_bulk(const char* from, u32 bytes) {
  if ((u64)from % 16 || bytes % 16) __trap();
}
inline void finish_some_copies() {
  std::erase_if(copies_in_flight, [](const std::function<void()>& copy) {
    if (random_numbers() % 2) return false;
    copy();
    return true;
  });
}

// Of bytes; the first dimension is contiguous, and its stride is 1.
struct TensorMap {
  const char* memory;
  long long sizes[4], strides[4], box[4];
};
inline TensorMap tiles(const char* matrix, int height, int width, int rows) {
  return {matrix, {width, height, 1, 1}, {1, width, 0, 0}, {128, rows, 1, 1}};
}
inline void copy_tile(u32 to, TensorMap map, std::vector<int> first, u32 barrier, int rank) {
  if (to % 128 || map.box[0] != 128) __trap();
  copies_in_flight.push_back([=] {
    u32 bytes = 0;
    int i[4];
    for (i[3] = 0; i[3] < map.box[3]; i[3]++)
      for (i[2] = 0; i[2] < map.box[2]; i[2]++)
        for (i[1] = 0; i[1] < map.box[1]; i[1]++)
          for (i[0] = 0; i[0] < map.box[0]; i[0]++, bytes++) {
            bool is_inside = true;
            long long from = 0;
            for (int dim = 0; dim < 4; dim++) {
              const int at = first[dim] + i[dim];
              is_inside &= at < map.sizes[dim], from += at * map.strides[dim];
            }
            const u32 at = to + bytes;
            blocks_of_cluster[rank].memory[at ^ (at >> 7 & 7) << 4] = is_inside ? map.memory[from] : 0;
          }
    change_barrier(barrier, rank, 0, -(int)bytes);
  });
}
inline void prefetch_map(const TensorMap&) {}
inline void load_tile(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  copy_tile(to, *map, {column, row, 0, 0}, barrier, cluster_rank);
}
inline void load_tile(u32 to, const TensorMap* map, int c0, int c1, int c2, int c3, u32 barrier, u64) {
  copy_tile(to, *map, {c0, c1, c2, c3}, barrier, cluster_rank);
}
template <int SIZE>
void load_tile_for_all(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  for (int rank = 0; rank < SIZE; rank++) copy_tile(to, *map, {column, row, 0, 0}, barrier, rank);
}

// --- blocks ---

inline void run_fiber() {
  kernel_of_fibers();
  running->has_ended = true;
  yield();
}

inline void run(int blocks, int threads, std::function<void()> kernel, int cluster = 1) {
  static int launches = 0;
  if (cluster > MAX_CLUSTER) snprintf(failure, sizeof(failure), "a cluster has %d blocks at most", MAX_CLUSTER);
  gridDim.x = blocks;
  kernel_of_fibers = kernel;
  copies_in_flight.clear();
  for (int first = 0; first < blocks; first += cluster) {
    cluster_barrier = {cluster * threads};
    std::vector<Fiber> fibers(cluster * threads);
    for (int i = 0; i < cluster * threads; i++) {
      Fiber& fiber = fibers[i];
      fiber.thread.x = i % threads, fiber.rank = i / threads, fiber.block.x = first + fiber.rank;
      fiber.stack = std::make_unique<char[]>(STACK_BYTES);
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = fiber.stack.get(), fiber.start.uc_stack.ss_size = STACK_BYTES;
      makecontext(&fiber.start, run_fiber, 0);
    }
    for (int rank = 0; rank < cluster && !*failure; rank++) {
      Block& block = blocks_of_cluster[rank];
      block.barrier = {threads};
      for (Barrier& warp : block.warps) warp = {32};
      for (Barrier& group : block.groups) group = {128};
      for (Barrier& named : block.named) named = {};
      block.counting.clear();
      std::memset(block.memory, 0xff, sizeof(block.memory));  // NaN in every type
    }
    std::vector<Fiber*> alive;
    for (Fiber& fiber : fibers) alive.push_back(&fiber);
    random_numbers.seed(launches++);
    for (int turn = 0; !alive.empty(); turn++) {
      if (turn == MAX_TURNS) snprintf(failure, sizeof(failure), "the threads wait for each other");
      if (*failure) return;
      std::shuffle(alive.begin(), alive.end(), random_numbers);
      for (Fiber* fiber : alive) resume(*fiber);
      finish_some_copies();
      std::erase_if(alive, [](const Fiber* fiber) { return fiber->has_ended; });
    }
  }
}

// A kernel whose blocks wait for each other, with the addresses of its arguments.
template <class... Arguments, size_t... INDEX>
void launch(void (*kernel)(Arguments...), int blocks, int threads, void** arguments, std::index_sequence<INDEX...>) {
  run(blocks, threads, [=] { kernel(*(Arguments*)arguments[INDEX]...); }, blocks);
}
template <class... Arguments>
void launch(void (*kernel)(Arguments...), int blocks, int threads, void** arguments) {
  launch(kernel, blocks, threads, arguments, std::index_sequence_for<Arguments...>());
}
