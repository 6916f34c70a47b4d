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

#define LAKH_ENGINE_ABI 11

int lakh_engine_abi(void);

/* Names of the kernels that this CPU runs, the default first, separated by blanks. */
const char* lakh_engine_kernels(void);

/* Use the kernels of this name from now on. Returns 0, or -1 if this CPU does not run them. */
int lakh_engine_select(const char* name);

/* The name of the kernels in use. */
const char* lakh_engine_selected(void);

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
 * and the sink of a head is one more score, whose weight is lost. With a window, a token attends to the last `window` of
 * its places only; with a negative one to those since the last position that is a multiple of -window. */
typedef struct {
  float scale, bound;  /* bound: 0 for none */
  int64_t window;      /* 0: none; below 0: chunks */
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

/* What a node computes for every token: `out` from `in`. Of the first kinds number by number; of those from RMS_NORM to
 * COPY_POSITION row by row, where a row is the last dim of `sizes` and its numbers are side by side; the others read and
 * write whole buffers. */
enum lakh_engine_kind {
  LAKH_ENGINE_ADD,       /* in[0] + in[1] */
  LAKH_ENGINE_MULTIPLY,  /* in[0] * in[1] */
  LAKH_ENGINE_DIVIDE,    /* in[0] / in[1] */
  LAKH_ENGINE_SCALE,     /* in[0] * real */
  LAKH_ENGINE_COPY,
  LAKH_ENGINE_SIGMOID,
  LAKH_ENGINE_GELU,      /* by tanh */
  LAKH_ENGINE_EXACT_GELU,  /* by the error function */
  LAKH_ENGINE_RMS_NORM,    /* weight in[1], eps real */
  LAKH_ENGINE_LAYER_NORM,  /* weight in[1], bias in[2], eps real */
  LAKH_ENGINE_GATE,        /* silu(gate) * up, where a row of in[0] has 2 * sizes[2] numbers: gate | up */
  LAKH_ENGINE_ROTATE,      /* rotary positions of table whole[0], where number i of a row pairs with i + sizes[2] / 2 */
  LAKH_ENGINE_SOFTMAX,
  LAKH_ENGINE_SUM,         /* a row of in[0] becomes one number */
  LAKH_ENGINE_TOP,         /* indices of the sizes[2] largest of the whole[0] numbers of a row of in[0], in order */
  LAKH_ENGINE_LIMIT_GROUPS, /* in[0], -inf in all but whole[1] of whole[0] groups: those whose two best have the largest sums */
  LAKH_ENGINE_GATHER,      /* out[i] = in[0][in[1][i]], where a row of in[0] has whole[0] numbers */
  LAKH_ENGINE_SCATTER,     /* out[in[0][i]] = in[1][i], where a row of out has whole[0] numbers */
  LAKH_ENGINE_COPY_ROTARY, /* cosines (whole[0] is 0) or sines (1) of the token's position in table whole[1], twice */
  LAKH_ENGINE_COPY_POSITION, /* the row of the token's position in the whole[0] rows of `numbers` of in[0] */
  LAKH_ENGINE_STORE,          /* keys in[0] and values in[1], kv_heads rows each, into the cache of layer whole[0] */
  LAKH_ENGINE_ATTEND,         /* queries in[0], heads rows; layer whole[0], how: lakh_engine_scores in `weights` */
  LAKH_ENGINE_PRODUCT,        /* with the lakh_engine_matrices in `weights`, which have whole[0] columns */
  LAKH_ENGINE_HEAD_PRODUCTS,  /* each of whole[1] parts of in[0] with its own matrix, stored as those of experts are */
  LAKH_ENGINE_EXPERTS,        /* of in[0], with the indices in[1] and weights in[2] of whole[0] lakh_engine_experts */
  LAKH_ENGINE_KINDS
};

/* Numbers of a token in a buffer, or numbers that are the same for all tokens. Indices are int64 in two places each. */
typedef struct {
  int64_t buffer;      /* -1: `numbers` */
  int64_t offset;      /* of the first number */
  int64_t strides[3];
  const float* numbers;
} lakh_engine_operand;

typedef struct {
  int64_t kind;
  int64_t sizes[3];  /* of a token; 1 in front for fewer dims */
  lakh_engine_operand out, in[3];
  int64_t whole[2];
  double real;
  const void* weights;
} lakh_engine_node;

/* A decoder: nodes in order, from the embedded token in buffer `first` to the normalized hidden state in buffer `last`. */
typedef struct {
  const lakh_engine_node* nodes;
  int64_t num_nodes;
  const int64_t* buffers;  /* places of a token in each, 4 bytes each */
  int64_t num_buffers, first, last;
  lakh_engine_piece embedding, head;
  const float *cos, *sin;  /* tables x positions x rotary / 2 */
  int64_t tables, positions, rotary;
  int64_t layers, kv_heads, size;  /* of the cache */
  float logit_bound;  /* logits become bound * tanh(logit / bound); 0 for none */
} lakh_engine_graph;

/* Returns 0, or -1 for a graph whose sizes do not fit together. */
int lakh_engine_check(const lakh_engine_graph* graph);

/* Computes the tokens `ids` by a graph that lakh_engine_check accepts, stores their keys and values, and writes the logits
 * of the tokens `scored` (ascending numbers of tokens of this step): num_scored x head.rows. The logits of a token depend on its
 * sequence only: neither the tokens beside it nor the steps in which its sequence was computed change a bit of them.
 * Returns 0, or -1 for unknown ids, slots and tokens, and places that do not fit. */
int lakh_engine_forward(const lakh_engine_graph* graph, const lakh_engine_cache* cache, const lakh_engine_places* places,
                        const int64_t* ids, int64_t num_scored, const int64_t* scored, float* logits);

#ifdef __cplusplus
}
#endif
#endif
