/* What Python passes in: plain structs, mirrored field by field in library.py. All pointers are the caller's. */
#ifndef QD_ABI_H
#define QD_ABI_H

#include <stdint.h>

#define QD_EXPORT __attribute__((visibility("default")))

/* Where the tokens of a step stand; see AttentionInputs. num_tokens is M of every op. */
typedef struct {
  int64_t num_tokens, num_requests, max_blocks;
  const int32_t *token_ids, *positions, *slots, *query_start, *context_len, *block_tables;
} qd_step;

/* A matrix of n outputs x k inputs in panels of 16 outputs, see weights.h. bits: 2, 3, 4, 8 for codes; 16 (fp16),
 * 17 (bf16) or 32 for plain floats. header: qd_header. group: inputs a scale covers, 16 or a multiple of 32.
 * perm[j]: the input that column j multiplies, or NULL. inputs: qd_inputs, how codes meet them. */
typedef struct {
  int64_t n, k, group;
  int32_t bits, header, inputs;
  const uint8_t *codes, *headers;
  const float *bias;
  const int32_t *perm;
} qd_weight;

/* Not rounded; to INT8 per 32 inputs; to INT8 per token, as checkpoints made for that (W8A8) ask. */
enum qd_inputs { QD_FLOAT_INPUTS, QD_INT8_BLOCKS, QD_INT8_ROWS };

/* Both floats fp16; fp16 scale and a zero point: offset = -zero * scale; both fp32; fp32 scale and a zero point. */
enum qd_header { QD_HALF, QD_HALF_ZERO, QD_FLOAT, QD_FLOAT_ZERO };

/* source [n, k]: codes one a byte, or floats of the target's own type; writes target->codes. */
typedef struct {
  const qd_weight *target;
  const void *source;
} qd_pack_args;

/* out[m] = scale * row token_ids[m] of weight. */
typedef struct {
  const qd_weight *weight;
  float *out;
  float scale;
} qd_embedding_args;

/* sum = residual + scale * x (residual NULL: sum is x, not written); out = rms_norm(sum) * weight. */
typedef struct {
  const float *x, *residual, *weight;
  float *out, *sum;
  int64_t width;
  float eps, scale;
} qd_norm_args;

/* out[m, i] = act(gate_up[m, i]) * gate_up[m, width + i]; activation: 0 silu, 1 gelu_tanh. */
typedef struct {
  const float *gate_up;
  float *out;
  int64_t width;
  int32_t activation;
} qd_glu_args;

/* x [m, width] into columns column .. column + width - 1 of out [m, out_width]. */
typedef struct {
  const float *x;
  float *out;
  int64_t width, out_width, column;
} qd_copy_args;

/* out = (x @ weight.T + bias) * scale, softcapped where softcap > 0. norm, if any, is run first and its out is x;
 * glu, if any, is run on the result, and only what it gives is written; its width is a multiple of 16. fine: inputs that
 * would be rounded to INT8 per 32 are rounded to INT16 instead. */
typedef struct {
  const qd_weight *weight;
  const float *x;
  float *out;
  const qd_norm_args *norm;
  const qd_glu_args *glu;
  float scale, softcap;
  int32_t fine;
} qd_linear_args;

/* One layer of the pool; strides in elements. type: 0 fp32, 1 fp16, 2 bf16, 3 INT8 codes with scales. */
typedef struct {
  void *k, *v;
  float *k_scale, *v_scale;
  int64_t k_stride[3], v_stride[3], k_scale_stride[3], v_scale_stride[3]; /* block, head, token */
  int64_t block_size;
  int32_t type;
} qd_kv;

typedef struct {
  int64_t num_heads, num_kv_heads, head_dim;
} qd_heads;

/* cos, sin: [positions, rotary_dim / 2], NULL for no rotation; q_norm, k_norm: [head_dim] or NULL. */
typedef struct {
  const float *qkv;
  float *out;
  const float *cos, *sin, *q_norm, *k_norm;
  const qd_kv *kv;
  qd_heads heads;
  int64_t rotary_dim;
  float eps;
} qd_rope_args;

/* int8_queries: queries are rounded to INT8 per head and scores are integer dots (INT8 pools only). */
typedef struct {
  const float *q;
  float *out;
  const qd_kv *kv;
  qd_heads heads;
  int64_t window;
  float scale, softcap;
  int32_t int8_queries;
} qd_attention_args;

/* Of a row of logits: the largest, the first token that has it, whether all are finite. With temperature > 0 also the
 * total of all weights e^((x - largest) / temperature), and those not below a floor, with their ids: among the top_k
 * largest if top_k > 0, else not below tail times the mean and min_weight. count: of those, -1 for more than capacity.
 * mask: NULL, or a bit for each token, from the lowest of the first word on; those whose bit is 0 are as if they were not
 * there, but for finite. Where none is left, largest is minus infinity. */
typedef struct {
  const float *logits;
  const uint32_t *mask;
  double tail, total;
  int64_t top_k;
  float *weights;
  int32_t *ids;
  float temperature, min_weight, largest;
  int32_t best, finite, count;
} qd_shortlist;

typedef struct {
  qd_shortlist *lists;
  int64_t num_lists, vocab_size, capacity;
} qd_shortlist_args;

enum qd_kind {
  QD_PACK, QD_EMBEDDING, QD_NORM, QD_LINEAR, QD_GLU, QD_COPY, QD_ROPE, QD_ATTENTION, QD_SHORTLIST, QD_NUM_KINDS
};

/* One op: its kind and the args struct of that kind. */
typedef struct {
  int64_t kind;
  const void *args;
} qd_op;

typedef struct qd_pool qd_pool;

QD_EXPORT const char *qd_path_name(void);
/* NULL where threads cannot be had. */
QD_EXPORT qd_pool *qd_pool_create(int32_t num_threads);
QD_EXPORT void qd_pool_destroy(qd_pool *pool);
/* Runs ops in order; 0, or -1 without memory for scratch (nothing was run then). One caller at a time. */
QD_EXPORT int32_t qd_run(qd_pool *pool, const qd_op *ops, int64_t num_ops, const qd_step *step);

#endif
