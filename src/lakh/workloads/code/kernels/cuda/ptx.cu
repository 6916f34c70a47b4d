// What kernels need of a Hopper GPU beyond C++: its instructions, by name.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct __align__(64) TensorMap {
  u64 words[16];
};

// --- programmatic dependent launch ---

__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }

// Until the previous kernels have ended and their results are visible.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// --- memory ---

__device__ __forceinline__ void copy_async(u32 to, const char* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// 4 bytes.
__device__ __forceinline__ void copy_async4(u32 to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most PENDING groups of copies are under way.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ uint4 load(const uint4* from) {
  uint4 to;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
               : "l"(from));
  return to;
}

// Read once: the first to leave the L2 cache.
__device__ __forceinline__ u64 evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// A multiple of 16 bytes from global to shared memory; the barrier counts them.
__device__ __forceinline__ void copy_bulk(u32 to, const char* from, int bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void copy_bulk(u32 to, const char* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
               "r"(barrier)
               : "memory");
}

// A multiple of 16 bytes from global memory into L2.
__device__ __forceinline__ void prefetch_bulk(const char* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Global memory that other blocks read and write at the same time.
__device__ __forceinline__ void store_relaxed(u64* to, u64 bits) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(bits) : "memory");
}

__device__ __forceinline__ void store_relaxed(u32* to, u32 bits) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}

__device__ __forceinline__ u64 load_relaxed(const u64* from) {
  u64 bits;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(bits) : "l"(from) : "memory");
  return bits;
}

__device__ __forceinline__ void load_relaxed2(u64* to, const u64* from) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(to[0]), "=l"(to[1]) : "l"(from) : "memory");
}

__device__ __forceinline__ void load_relaxed4(u32* to, const u32* from) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(from)
               : "memory");
}

// Returns the number before; orders what this thread wrote and will read.
__device__ __forceinline__ u32 add_acquire_release(u32* to, u32 number) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(number) : "memory");
  return before;
}

// Shared memory.
__device__ __forceinline__ void load_shared(u32* to, u32 from) {
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(from) : "memory");
}

__device__ __forceinline__ void load_shared4(u32* to, u32 from) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void store_shared2(u32 to, const u32* from) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(from[0]), "r"(from[1]) : "memory");
}

// Numbers that warps read and write without a barrier.
__device__ __forceinline__ void store_shared_volatile(u32 to, u32 bits) {
  asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(to), "r"(bits) : "memory");
}

__device__ __forceinline__ u32 load_shared_volatile(u32 from) {
  u32 bits;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(bits) : "r"(from) : "memory");
  return bits;
}

template <int NANOSECONDS>
__device__ __forceinline__ void sleep_for() {
  asm volatile("nanosleep.u32 %0;" ::"n"(NANOSECONDS));
}

// --- numbers ---

__device__ __forceinline__ u16 to_bf16(float value) {
  u16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
}

__device__ __forceinline__ float exp2_(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

__device__ __forceinline__ u32 to_bf16s(float low, float high) {
  u32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

__device__ __forceinline__ float from_f16(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Two numbers of e5m2; beyond its range: its largest number.
__device__ __forceinline__ u32 to_e5m2s(float low, float high) {
  u16 result;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(result) : "f"(high), "f"(low));
  return result;
}

// --- registers ---

// The same number, but unknown to the compiler: it computes what depends on it here and not before a loop, where it would take
// registers for long.
__device__ __forceinline__ u32 recomputed(u32 number) {
  asm volatile("" : "+r"(number));
  return number;
}

// --- barriers of some warps of a block ---

template <int BARRIER, int COUNT>
__device__ __forceinline__ void sync_threads() {
  asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(COUNT) : "memory");
}

// --- barriers in shared memory ---

constexpr int BARRIER_POLLS = 1 << 24;  // then something is wrong: trap, and do not hang

__device__ __forceinline__ void init_barrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void expect_bytes(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_barrier(u32 barrier, int parity) {
  u32 done = 0;
  for (int polls = 0; !done; polls++) {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (polls == BARRIER_POLLS) __trap();
  }
}

// Where a thread may wait for as long as other blocks need.
__device__ __forceinline__ void wait_barrier_unbounded(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Other blocks of the cluster see the barriers of this one.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Of the block `rank` of the cluster, at the same address.
__device__ __forceinline__ void arrive_at(u32 barrier, int rank) {
  asm volatile(
      "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(
          barrier),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
}

// --- tiles from global to shared memory ---

// Before its first use.
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void load_tile(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// Of four dimensions.
__device__ __forceinline__ void load_tile(u32 to, const TensorMap* map, int c0, int c1, int c2, int c3, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "l"(policy)
      : "memory");
}

// Into all blocks of a cluster of SIZE.
template <int SIZE>
__device__ __forceinline__ void load_tile_for_all(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((u16)((1 << SIZE) - 1))
      : "memory");
}

// --- registers of four warps ---

template <int COUNT>
__device__ __forceinline__ void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// --- products on tensor cores, of one warp ---

// sum += 16 rows of a times 8 columns of b, over 16 numbers. With lane / 4 and lane % 4 a lane has of a (a0, a2) that row
// and (a1, a3) the row 8 after it, of b that column; pairs of numbers of the first (a0, a1, b0) and last (a2, a3, b1) 8.
// Its sums are those rows and two columns.
__device__ __forceinline__ void multiply_bf16(float* sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// sum = start + 16 rows of a times 8 columns of b, over 32 numbers of 8 bits, without sign in a and with sign in b; fours of them
// lie as the pairs of 16 bits do.
__device__ __forceinline__ void multiply_u8(int* sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const int* start) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(sum[0]), "=r"(sum[1]), "=r"(sum[2]), "=r"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(start[0]), "r"(start[1]), "r"(start[2]), "r"(start[3]));
}

// --- products on tensor cores, of four warps ---

// Of a matrix in shared memory, rows of 128 swizzled bytes; groups of 8 rows are `group_bytes` apart.
__device__ __forceinline__ u64 descriptor(u32 address, u32 group_bytes = 1024) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(group_bytes >> 4) << 32 | (u64)1 << 62;
}

// Tensor cores see what copies, or this thread, wrote.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most PENDING groups of products are under way.
template <int PENDING>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define R4(a, i) "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3])
#define R8(a, i) R4(a, i), R4(a, i + 4)

// sum += 64 rows of w times 8, 16, 32 or 64 tokens of x (two sums each), over 16 columns; w and x are descriptors.
__device__ __forceinline__ void multiply(float (&sum)[32], u64 w, u64 x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, 1, 1, "
      "1, 0, 0;"
      : R8(sum, 0), R8(sum, 8), R8(sum, 16), R8(sum, 24)
      : "l"(w), "l"(x));
}

__device__ __forceinline__ void multiply(float (&sum)[16], u64 w, u64 x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15}, %16, %17, 1, 1, 1, 0, 0;"
      : R8(sum, 0), R8(sum, 8)
      : "l"(w), "l"(x));
}

__device__ __forceinline__ void multiply(float (&sum)[8], u64 w, u64 x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, 0, 0;"
      : R8(sum, 0)
      : "l"(w), "l"(x));
}

__device__ __forceinline__ void multiply(float (&sum)[4], u64 w, u64 x) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
               : R4(sum, 0)
               : "l"(w), "l"(x));
}

// sum (+)= 64 rows of e4m3 times 16 or 24 rows of e5m2, over 32 columns.
__device__ __forceinline__ void multiply_e4m3_e5m2(float (&sum)[8], u64 a, u64 b, int adds) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %10, 0;"
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e5m2 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1;}"
      : R8(sum, 0)
      : "l"(a), "l"(b), "r"(adds));
}

__device__ __forceinline__ void multiply_e4m3_e5m2(float (&sum)[12], u64 a, u64 b, int adds) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %14, 0;"
      "wgmma.mma_async.sync.aligned.m64n24k32.f32.e4m3.e5m2 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, %12, %13, "
      "p, 1, 1;}"
      : R8(sum, 0), R4(sum, 8)
      : "l"(a), "l"(b), "r"(adds));
}

// sum (+)= 64 rows times 8 or 16 rows of bf16, over 16 columns.
__device__ __forceinline__ void multiply_bf16(float (&sum)[4], u64 a, u64 b, int adds) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %6, 0;"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0;}"
      : R4(sum, 0)
      : "l"(a), "l"(b), "r"(adds));
}

__device__ __forceinline__ void multiply_bf16(float (&sum)[8], u64 a, u64 b, int adds) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %10, 0;"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 0, 0;}"
      : R8(sum, 0)
      : "l"(a), "l"(b), "r"(adds));
}

// The same wait; the sums are not read before it.
template <int PENDING, int N, int SUMS>
__device__ __forceinline__ void wait_products(float (&sums)[N][SUMS]) {
  wait_products<PENDING>();
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(sums[n][i])::"memory");
}

#define I4(i) "+r"(sum[i]), "+r"(sum[i + 1]), "+r"(sum[i + 2]), "+r"(sum[i + 3])
#define I16(i) I4(i), I4(i + 4), I4(i + 8), I4(i + 12)

// sum (+)= 64 rows of a times 256 rows of b, over 32 columns of 8-bit integers.
__device__ __forceinline__ void multiply(int (&sum)[128], u64 a, u64 b, int adds) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %130, 0;"
      "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, p;}"
      : I16(0), I16(16), I16(32), I16(48), I16(64), I16(80), I16(96), I16(112)
      : "l"(a), "l"(b), "r"(adds));
}
