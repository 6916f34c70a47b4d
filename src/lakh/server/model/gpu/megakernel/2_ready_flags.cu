// Ready flags: a block publishes 32 bits of data together with the number of the round in one 64-bit store. A reader polls
// until the flag has the number of its round, so it waits only for the data that it needs. No flag is overwritten before every
// block has read it, because the next data depend on what all blocks computed from it: every block has rows of Out and Down, or of
// GateUp and Qkv (`plan` in __init__.py ensures this).

constexpr u32 MAX_POLLS = 1u << 25;  // of a flag, about half a minute: a block that is not resident by then never will be

__device__ __forceinline__ void release(u64* at, u32 bits, u32 round) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"((u64)round << 32 | bits) : "memory");
}
__device__ __forceinline__ void release(u64* at, float value, u32 round) { release(at, __float_as_uint(value), round); }
__device__ __forceinline__ void release(u64* at, float a, float b, u32 round) { release(at, to_bf16(a) | to_bf16(b) << 16, round); }

__device__ __forceinline__ u32 acquire(const u64* at, u32 round) {
  for (u32 polls = 0; polls < MAX_POLLS; polls++) {
    u64 flag;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(flag) : "l"(at) : "memory");
    if ((u32)(flag >> 32) == round) return (u32)flag;
  }
  __trap();
  return 0;
}

__device__ __forceinline__ bool poll(const u64* from, int end, int i, u32 round, u32* bits) {
  const int at = 2 * (threadIdx.x + i * THREADS);
  u64 a = (u64)round << 32, b = a;
  if (at < end) asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from + at) : "memory");
  bits[0] = (u32)a, bits[1] = (u32)b;
  return (u32)(a >> 32) == round && (u32)(b >> 32) == round;
}

// A thread's N pairs of flags, THREADS pairs apart, up to the end. Every poll reads all of them: on an H200 a step of 1.2B takes
// 0.677 ms, and 0.711 if a thread waits for its first pair before it reads the others (0.694 if it reads only those that are missing).
template <int N>
__device__ __forceinline__ void acquire(const u64* from, int end, u32 round, u32 (&bits)[N][2]) {
  for (u32 polls = 0; polls < MAX_POLLS; polls++) {
    bool ready = true;
#pragma unroll
    for (int i = 0; i < N; i++) ready &= poll(from, end, i, round, bits[i]);
    if (ready) return;
  }
  __trap();
}
