/* Decoder layers with quantized or float32 weights for the CPU engine: a C ABI without dependencies.
 *
 * A weight matrix has `rows` x `columns` numbers; every 32 columns of a row form a group with one float16 scale.
 * Eight rows are stored together ("row block"; the last one is padded with zero scales), group after group:
 *
 *   8 bits  256 bytes a group: for each quad of 4 columns, 4 signed bytes of each of the 8 rows.
 *           number = scale * byte, or scale * byte + minimum
 *   4 bits  128 bytes a group: for each quad q of the first 16 columns, 4 bytes of each of the 8 rows; the low half
 *           of a byte is column 4 q + i, the high half column 16 + 4 q + i.
 *           number = scale * half + minimum
 *   scales, minimums: 8 float16 a group, one for each row; 8 bits may have no minimums.
 *
 * For products with these, activations are rounded to 8 bits in the same groups of 32, each with a float32 scale, so that
 * products inside a group are exact in integers.
 *
 *   32 bits  float32 without scales, in panels of 32 rows (the last one is padded): for each column, the numbers of the
 *            32 rows. Any number of columns.
 */
#ifndef LAKH_ENGINE_H
#define LAKH_ENGINE_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LAKH_ENGINE_ABI 5

int lakh_engine_abi(void);

/* Names of the kernels that this CPU runs, the fastest first, separated by blanks. */
const char* lakh_engine_kernels(void);

/* Use the kernels of this name from now on; the fastest by default. Returns 0, or -1 if this CPU does not run them. */
int lakh_engine_select(const char* name);

/* Threads of later products, including the caller: 1 (default) to 64. Returns the number in use. */
int lakh_engine_set_threads(int count);

/* Some rows of a weight matrix in one format. */
typedef struct {
  int64_t bits;  /* 32, 8 or 4 */
  const void* values;
  const uint16_t* scales;    /* null for 32 bits */
  const uint16_t* minimums;  /* null for 32 bits, and for 8 bits without minimums */
  int64_t rows;
} lakh_engine_piece;

/* y[n, i] = sum over j of x[n, j] * weight[i, j] for `num` tokens; the pieces are the rows of the weight in order. Calls
 * from several threads take turns. Returns 0, or -1 for an unsupported format (bits, 4 bits without minimums, or columns
 * that are not a multiple of 32). */
int lakh_engine_matmul(const lakh_engine_piece* pieces, int64_t num_pieces, int64_t columns, const float* x, int64_t num,
                       float* y);

/* Keys and values, layer after layer: kv_heads x capacity x size numbers each, float32, or int8 with scales kv_heads x
 * capacity (null for float32). */
typedef struct {
  void *keys, *values;
  float *key_scales, *value_scales;
  int64_t capacity;
} lakh_engine_cache;

/* The tokens of a step, of one sequence or several. Token n attends to the slots[starts[n]] .. of its sequence, lengths[n]
 * of them, the last of which is its own; its position is lengths[n] - 1. */
typedef struct {
  int64_t num;
  const int64_t *slots, *starts, *lengths;
} lakh_engine_places;

/* How attention weighs keys: softmax of scale * q . key, where a bound above 0 makes a score bound * tanh(score / bound),
 * and the sink of a head is one more score, whose weight is lost. */
typedef struct {
  float scale, bound;  /* bound: 0 for none */
  const float* sinks;  /* one for each head; null: none */
} lakh_engine_scores;

/* Attention of the tokens in one layer. q and out: num x heads x size. Returns 0, or -1 for sizes that do not fit. */
int lakh_engine_attend(const lakh_engine_cache* layer, const lakh_engine_places* places, const lakh_engine_scores* scores,
                       int64_t heads, int64_t kv_heads, int64_t size, const float* q, float* out);

/* A fused matrix of every layer, `num_pieces` pieces for each. */
typedef struct {
  const lakh_engine_piece* pieces;
  int64_t num_pieces;
} lakh_engine_matrices;

/* The feed-forwards of a layer's experts. A piece has the rows of one expert, and the blocks of all, one after the other:
 * those of every expert are padded. */
typedef struct {
  int64_t count, width, ffn;
  lakh_engine_matrices gate_up, down;
  const float* gate_up_bias;  /* count x 2 ffn, with GPT-OSS's gate, whose rows of gate and up alternate; null: SwiGLU */
} lakh_engine_experts;

/* y[n] = the sum of weights[n, k] * expert numbers[n, k] of x[n]. Reads the experts that are chosen. A result depends on
 * its token only. Returns 0, or -1 for unknown experts and sizes that do not fit together. */
int lakh_engine_run_experts(const lakh_engine_experts* experts, const float* x, int64_t num, int64_t top_k,
                            const int64_t* numbers, const float* weights, float* y);

/* A decoder with rotary positions, grouped heads and a gated feed-forward. */
typedef struct {
  int64_t layers, width, heads, kv_heads, size, ffn;
  lakh_engine_matrices qkv, o, gate_up, down;
  lakh_engine_piece embedding, head;
  const float* norms;         /* before attention and feed-forward of each layer, and the final one */
  const float* head_norms;    /* of queries and keys: layers x 2 x size; null: none */
  const float* qkv_bias;      /* null: none */
  const float *cos, *sin;     /* positions x size / 2 */
  float eps;
} lakh_engine_model;

/* Computes the tokens `ids` through all layers, stores their keys and values, and writes the logits of the tokens
 * `scored` (numbers of tokens of this step): num_scored x head.rows. The logits of a token depend on its sequence only:
 * neither the tokens beside it nor the steps in which its sequence was computed change a bit of them. Returns 0, or -1
 * for sizes that do not fit together. */
int lakh_engine_forward(const lakh_engine_model* model, const lakh_engine_cache* cache, const lakh_engine_places* places,
                        const int64_t* ids, int64_t num_scored, const int64_t* scored, float* logits);

#ifdef __cplusplus
}
#endif
#endif
