// Ready flags: a block publishes data together with the number of the round in one store. A reader polls until the flag has the
// number of its round, so it waits only for the data that it needs. No flag is overwritten before every block has read it, because the
// next data depend on what all blocks computed from it: every block has rows of Out and Down, or of GateUp and Qkv (`plan` in
// __init__.py ensures this).

constexpr u32 MAX_POLLS = 1u << 25;  // of a flag, about half a minute: a block that is not resident by then never will be

// --- 32 bits of data and the round in 64 bits ---

__device__ __forceinline__ void release(u64* at, u32 bits, u32 round) {
  store_relaxed(at, (u64)round << 32 | bits);
}
__device__ __forceinline__ void release(u64* at, float value, u32 round) { release(at, __float_as_uint(value), round); }

// A thread waits for all of its numbers at once.
template <int N>
__device__ __forceinline__ void acquire(const u64* const (&from)[N], u32 round, float (&values)[N]) {
ROLLED
  for (u32 polls = 0; polls < MAX_POLLS; polls++) {
    u64 flags[N];
    bool ready = true;
#pragma unroll
    for (int i = 0; i < N; i++) flags[i] = load_relaxed(from[i]);
#pragma unroll
    for (int i = 0; i < N; i++) values[i] = __uint_as_float((u32)flags[i]), ready &= (u32)(flags[i] >> 32) == round;
    if (ready) return;
  }
  __trap();
}
__device__ __forceinline__ float acquire(const u64* at, u32 round) {
  const u64* const from[1] = {at};
  float values[1];
  acquire(from, round, values);
  return values[0];
}

// --- two numbers of bf16 that all blocks read ---

#if BITS == 16
typedef u64 Pair;
#else
typedef u32 Pair;
#endif
constexpr int PAIRS = 16 / sizeof(Pair);  // that a thread reads at once

#if BITS == 16
__device__ __forceinline__ void release(Pair* at, float a, float b, u32 round) { release(at, to_bf16s(a, b), round); }

__device__ __forceinline__ bool poll(const Pair* from, int end, int i, u32 round, u32* bits) {
  const int at = PAIRS * (threadIdx.x + i * THREADS);
  u64 flags[2] = {(u64)round << 32, (u64)round << 32};
  if (at < end) load_relaxed2(flags, from + at);
  bits[0] = (u32)flags[0], bits[1] = (u32)flags[1];
  return (u32)(flags[0] >> 32) == round && (u32)(flags[1] >> 32) == round;
}

// A thread's N times PAIRS pairs, up to the end. Every poll reads all of them: on an H200 a step of 1.2B takes 0.677 ms, and 0.711 if a
// thread waits for its first pair before it reads the others (0.694 if it reads only those that are missing).
template <int N>
__device__ __forceinline__ void acquire(const Pair* from, int end, u32 round, u32 (&bits)[N][PAIRS]) {
  for (u32 polls = 0; polls < MAX_POLLS; polls++) {
    bool ready = true;
#pragma unroll
    for (int i = 0; i < N; i++) ready &= poll(from, end, i, round, bits[i]);
    if (ready) return;
  }
  __trap();
}

#else
// A tagged pair has 32 bits, and in them the round modulo 4. A step of 1.2B takes 0.543 ms in fp8 and 0.588 in int4 on an H200, and 0.562
// and 0.600 with 64 bits; in bf16 0.675 and 0.673, so 64 bits stay there. Exponents are lower by 80, so the highest bit of the exponent
// of numbers below 2^81 is free. Larger numbers and NaN are read as almost 2^81, whose norm is NaN (`load_normed`); below 2^-46 a number
// is read as less than 2^-46.

constexpr u32 TAGS = 0x40004000u;  // the bits that have the round
constexpr u32 MOVED = 0x2800u;     // 80 in the exponent of bf16

__device__ __forceinline__ u32 tag_of(u32 round) { return (round & 1) << 14 | (round & 2) << 29; }

__device__ __forceinline__ u32 to_code(u32 bits) {  // of a number of bf16
  const u32 size = bits & 0x7fffu;
  return (bits & 0x8000u) | (size < MOVED ? 0 : min(size - MOVED, 0x3fffu));
}
__device__ __forceinline__ u32 to_codes(float a, float b) {
  const u32 pair = to_bf16s(a, b);
  return to_code(pair & 0xffffu) | to_code(pair >> 16) << 16;
}
__device__ __forceinline__ u32 from_codes(u32 pair) { return (pair & ~TAGS) + (MOVED << 16 | MOVED); }  // two numbers of bf16

__device__ __forceinline__ void release(Pair* at, float a, float b, u32 round) {
  store_relaxed(at, to_codes(a, b) | tag_of(round));
}

// A thread's N times PAIRS pairs, up to the end, as numbers of bf16.
template <int N>
__device__ __forceinline__ void acquire(const Pair* from, int end, u32 round, u32 (&bits)[N][PAIRS]) {
  const u32 tag = tag_of(round);
ROLLED
  for (u32 polls = 0; polls < MAX_POLLS; polls++) {
    u32 missing = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int at = PAIRS * (threadIdx.x + i * THREADS);
      bits[i][0] = bits[i][1] = bits[i][2] = bits[i][3] = tag;
      if (at < end) load_relaxed4(bits[i], from + at);
    }
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int w = 0; w < 4; w++) missing |= bits[i][w] ^ tag;
    if (missing & TAGS) continue;
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int w = 0; w < 4; w++) bits[i][w] = from_codes(bits[i][w]);
    return;
  }
  __trap();
}
#endif
