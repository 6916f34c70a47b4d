// The megakernel: the source is the concatenation of these files, in the order of their names, after the instructions of ptx.cu.
//
// Macros that must be defined:
//   LAYERS WIDTH HEADS KV_HEADS HEAD_DIM FFN NUM_IDS NORM_EPS   the model
//   PAGE                                                        tokens of a block of the cache
//   BITS                                                        of a weight: 16 (bf16), 8 (e4m3) or 4
//   WGMMA                                                       whether groups of four warps multiply (8 bits, or 16 on Hopper)
//   BLOCKS WARPS LOADING_WARPS                                  thread blocks, one for each SM; warps that multiply, and that load
//   CHUNK_BYTES SLOTS                                           bytes of a chunk of weights; chunks that fit into shared memory
//   PARTS                                                       numbers whose sum is a number of x, with WGMMA
//   BUSY_BYTES QUIET_BYTES                                      weights in flight, and where flags may be polled
//   AHEAD_BYTES                                                 weights that are asked into L2 before they are loaded
//   KEEPS_TOKENS                                                whether the first keys and values wait in shared memory (4_attention.cu)
//   SPLITS                                                      splits of the sequence in attention
//   SHARED_BYTES                                                shared memory of a thread block

constexpr int THREADS = WARPS * 32;  // without the warps that load weights
constexpr int QUERIES = HEADS * HEAD_DIM, KEYS = KV_HEADS * HEAD_DIM, GROUP = HEADS / KV_HEADS, HALF = HEAD_DIM / 2;
constexpr int ITEMS = HEADS * SPLITS;  // of attention
constexpr u32 ALL = 0xffffffffu;       // lanes of a warp

// Before loops that stay loops in bf16. Where the compiler chooses, a step of 1.2B takes 0.669 ms instead of 0.664 on an H200; with
// weights of 8 bits 0.415 instead of 0.440, and with 4 bits 0.477 instead of 0.495 (bench/results/decode_NVIDIA-H200_2026-11-19.md).
#if BITS == 16
#define ROLLED _Pragma("unroll 1")
#else
#define ROLLED
#endif

// With 4 bits, what depends on them is computed where it is used: before the loop over layers it would take registers that products need.
__device__ __forceinline__ int thread_index() { return BITS == 4 ? recomputed(threadIdx.x) : threadIdx.x; }
__device__ __forceinline__ int block_index() { return BITS == 4 ? recomputed(blockIdx.x) : blockIdx.x; }

__device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }

// The two bf16 numbers of 32 bits.
__device__ __forceinline__ float low(u32 two) { return __uint_as_float(two << 16); }
__device__ __forceinline__ float high(u32 two) { return __uint_as_float(two & 0xffff0000u); }

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int off = 16; off; off >>= 1) v += __shfl_xor_sync(ALL, v, off);
  return v;
}

// A barrier of the warps that multiply.
__device__ __forceinline__ void sync_warps() { sync_threads<1, THREADS>(); }
