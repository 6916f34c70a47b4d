// Words that blocks tell each other: 32 bits, and beside them the number of the round, in one store. Who reads a word knows
// whether it is of this round, so nobody has to wait for anything but the words that he needs. No word is written again before
// all have read it, because what is written next follows from what all of them made of it: every block has rows of Out and Down,
// or of GateUp and Qkv (whole_step.py sees to that).

constexpr u32 LOOKS = 1u << 25;  // for a word, about half a minute: a block that is not there by then will not come

__device__ __forceinline__ void tell(u64* at, u32 bits, u32 round) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"((u64)round << 32 | bits) : "memory");
}
__device__ __forceinline__ void tell(u64* at, float value, u32 round) { tell(at, __float_as_uint(value), round); }
__device__ __forceinline__ void tell(u64* at, float a, float b, u32 round) { tell(at, to_bf16(a) | to_bf16(b) << 16, round); }

__device__ __forceinline__ u32 hear(const u64* at, u32 round) {
  for (u32 looks = 0; looks < LOOKS; looks++) {
    u64 word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
    if ((u32)(word >> 32) == round) return (u32)word;
  }
  __trap();
  return 0;
}

__device__ __forceinline__ bool look(const u64* from, int end, int i, u32 round, u32* bits) {
  const int at = 2 * (threadIdx.x + i * THREADS);
  u64 a = (u64)round << 32, b = a;
  if (at < end) asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from + at) : "memory");
  bits[0] = (u32)a, bits[1] = (u32)b;
  return (u32)(a >> 32) == round && (u32)(b >> 32) == round;
}

// A thread's N pairs of words, THREADS pairs apart; those at or past the end are nobody's. Who looks in vain looks for his first
// pair alone until it is there: all threads of all blocks looking for everything would keep the weights waiting.
template <int N>
__device__ __forceinline__ void hear(const u64* from, int end, u32 round, u32 (&bits)[N][2]) {
  for (u32 looks = 0; looks < LOOKS; looks++) {
    bool heard = true;
#pragma unroll
    for (int i = 0; i < N; i++) heard &= look(from, end, i, round, bits[i]);
    if (heard) return;
    while (!look(from, end, 0, round, bits[0]) && looks < LOOKS) looks++;
  }
  __trap();
}
