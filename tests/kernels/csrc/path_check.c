/* Runs the kernels on made-up inputs through abi.h and prints a hash of each case's results, so that paths can be
 * compared line by line, also those of another architecture.
 *   path_check [EVERY [FIRST]]: cases FIRST, FIRST + EVERY, ... of all; by default every one.
 * The first line names the path. Inputs come from integers and powers of two, without libm: the same bits everywhere. */
#include "abi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define BLOCK 32
#define ARENA_BYTES (96l << 20)
#define LENGTH(array) ((long)(sizeof(array) / sizeof *(array)))

/* What a case works with. Memory of the arena is NaN as every float type until it is written. */
typedef struct {
  qd_pool *pool;
  uint8_t *arena;
  long used;
  long every, first, index; /* cases that are due; number of the next one */
  uint64_t random, hash;
} check;

static long ceil_div(long a, long b) { return (a + b - 1) / b; }

/* Whether the next case is to be run; its inputs depend on its number alone. */
static int is_due(check *c) {
  long index = c->index++;
  if (index < c->first || (index - c->first) % c->every) return 0;
  memset(c->arena, 0xff, (size_t)c->used);
  c->used = 0;
  c->random = (uint64_t)index;
  c->hash = 0xcbf29ce484222325u;
  return 1;
}

static void *take(check *c, long bytes) {
  uint8_t *p = c->arena + c->used;
  c->used += ceil_div(bytes, 64) * 64;
  if (c->used <= ARENA_BYTES) return p;
  fprintf(stderr, "path_check: the arena is too small\n");
  exit(1);
}

/* SplitMix64 (Steele, Lea and Flood, 2014). */
static uint64_t next(check *c) {
  uint64_t z = c->random += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

static long below(check *c, long n) { return (long)(next(c) % (uint64_t)n); }
static int coin(check *c) { return (int)below(c, 2); }
/* -1..1 */
static float uniform(check *c) { return (float)(below(c, 1 << 24) - (1 << 23)) * 0x1p-23f; }

static float *uniforms(check *c, long n, float scale) {
  float *x = take(c, 4 * n);
  for (long i = 0; i < n; i++) x[i] = uniform(c) * scale;
  return x;
}

/* Inputs of a kernel: stretches of 16 of different size, some zero, some all of the largest value. */
static float *activations(check *c, long n) {
  static const float scales[] = {0x1p-110f, 0.0f, 0.125f, 1.0f, 1.0f, 9.0f};
  float *x = take(c, 4 * n), scale = 1.0f, largest = 0.0f;
  for (long i = 0; i < n; i++) {
    if (i % 16 == 0) scale = scales[below(c, LENGTH(scales))], largest = below(c, 4) ? 0.0f : uniform(c);
    x[i] = scale * (largest != 0.0f ? largest : uniform(c));
  }
  return x;
}

/* Makes one of n values no number, in one case of four. */
static void spoil(check *c, float *x, long n) {
  const float infinity = 0x1p127f * 2.0f;
  if (below(c, 4)) return;
  x[below(c, n)] = coin(c) ? infinity : infinity - infinity;
}

/* FNV-1a over 32-bit words (Fowler, Noll and Vo). */
static void hash_word(check *c, uint32_t word) { c->hash = (c->hash ^ word) * 0x100000001b3u; }

static void hash_bytes(check *c, const uint8_t *x, long n) {
  for (long i = 0; i < n; i++) hash_word(c, x[i]);
}

/* NaN is NaN here and below: its sign and payload differ between architectures. */
static void hash_floats(check *c, const float *x, long n) {
  for (long i = 0; i < n; i++) {
    uint32_t word = 0x7fc00000;
    if (x[i] == x[i]) memcpy(&word, x + i, 4);
    hash_word(c, word);
  }
}

static void hash_halves(check *c, const uint16_t *x, long n, int infinity) {
  for (long i = 0; i < n; i++) hash_word(c, (x[i] & 0x7fff) > infinity ? 0x7fff : x[i]);
}

static void run(check *c, const qd_op *ops, long num_ops, const qd_step *step) {
  if (qd_run(c->pool, ops, num_ops, step) == 0) return;
  fprintf(stderr, "path_check: no memory\n");
  exit(1);
}

/* Linear: a packed weight, its rows read back by the embedding, and its product with some rows. */

typedef struct {
  int bits, header, inputs, fine;
  long group, n, k, m;
} linear_case;

static uint16_t half(check *c) { return (uint16_t)((next(c) & 0x83ff) | (uint64_t)below(c, 15) << 10); }

static uint8_t *put_halves(check *c, uint8_t *to) {
  for (int i = 0; i < LANES; i++, to += 2) memcpy(to, &(uint16_t){half(c)}, 2);
  return to;
}

static uint8_t *put_floats(check *c, uint8_t *to) {
  for (int i = 0; i < LANES; i++, to += 4) memcpy(to, &(float){uniform(c) * 0.1f}, 4);
  return to;
}

static uint8_t *put_zero_points(check *c, uint8_t *to) {
  for (int i = 0; i < LANES; i++) *to++ = (uint8_t)next(c);
  return to;
}

static const uint8_t *headers(check *c, const linear_case *l) {
  long count = ceil_div(l->n, LANES) * ceil_div(l->k, l->group);
  uint8_t *start = take(c, count * LANES * 8), *to = start;
  int is_half = l->header == QD_HALF || l->header == QD_HALF_ZERO;
  int has_offset = l->header == QD_HALF || l->header == QD_FLOAT;
  while (count-- > 0) {
    to = is_half ? put_halves(c, to) : put_floats(c, to);
    to = !has_offset ? put_zero_points(c, to) : is_half ? put_halves(c, to) : put_floats(c, to);
  }
  return start;
}

static const void *code_source(check *c, const linear_case *l) {
  long largest = (1 << l->bits) - 1;
  uint8_t *codes = take(c, l->n * l->k);
  for (long i = 0; i < l->n * l->k; i++) codes[i] = (uint8_t)(below(c, 8) ? below(c, largest + 1) : largest);
  return codes;
}

static const void *float_source(check *c, const linear_case *l) {
  float *floats = uniforms(c, l->n * l->k, 1.0f);
  uint16_t *halves = take(c, 2 * l->n * l->k);
  for (long i = 0; i < l->n * l->k; i++) {
    uint32_t word;
    memcpy(&word, floats + i, 4);
    halves[i] = l->bits == 16 ? half(c) : (uint16_t)(word >> 16);
  }
  return l->bits == 32 ? (const void *)floats : halves;
}

static const int32_t *permutation(check *c, long n) {
  int32_t *order = take(c, 4 * n);
  for (long i = 0; i < n; i++) {
    long j = below(c, i + 1);
    order[i] = order[j];
    order[j] = (int32_t)i;
  }
  return order;
}

static qd_weight weight(check *c, const linear_case *l) {
  long bytes = ceil_div(l->n, LANES) * ceil_div(l->k, BLOCK) * BLOCK * LANES * (l->bits == 17 ? 16 : l->bits) / 8;
  return (qd_weight){
      .n = l->n,
      .k = l->k,
      .group = l->group,
      .bits = l->bits,
      .header = l->header,
      .inputs = l->inputs,
      .codes = take(c, bytes),
      .headers = l->bits < 16 ? headers(c, l) : NULL,
      .bias = coin(c) ? uniforms(c, l->n, 1.0f) : NULL,
      .perm = coin(c) ? permutation(c, l->k) : NULL,
  };
}

static void check_linear(check *c, const linear_case *l) {
  qd_weight w = weight(c, l);
  qd_pack_args pack = {&w, l->bits < 16 ? code_source(c, l) : float_source(c, l)};
  int32_t *ids = take(c, 4 * l->m);
  for (long i = 0; i < l->m; i++) ids[i] = (int32_t)below(c, l->n);
  qd_embedding_args embedding = {&w, take(c, 4 * l->m * l->k), 1.5f};
  float *x = activations(c, l->m * l->k), *sum = take(c, 4 * l->m * l->k);
  spoil(c, x, l->m * l->k);
  qd_norm_args norm = {x, NULL, uniforms(c, l->k, 1.0f), take(c, 4 * l->m * l->k), sum, l->k, 1e-5f, 0.3f};
  if (coin(c)) norm.residual = activations(c, l->m * l->k);
  float *out = take(c, 4 * l->m * l->n);
  qd_glu_args glu = {out, take(c, 2 * l->m * l->n), l->n / 2, coin(c)};
  qd_linear_args linear = {&w, x, out, NULL, NULL, coin(c) ? 0.7f : 1.0f, coin(c) ? 3.0f : 0.0f, l->fine};
  if (coin(c)) linear.norm = &norm, linear.x = norm.out;
  if (l->n % (2 * LANES) == 0) linear.glu = &glu;
  qd_op ops[] = {{QD_PACK, &pack}, {QD_EMBEDDING, &embedding}, {QD_LINEAR, &linear}};
  run(c, ops, LENGTH(ops), &(qd_step){.num_tokens = l->m, .token_ids = ids});
  hash_floats(c, embedding.out, l->m * l->k);
  hash_floats(c, norm.out, l->m * l->k);
  hash_floats(c, sum, l->m * l->k);
  hash_floats(c, out, l->m * l->n);
  hash_floats(c, glu.out, l->m * l->n / 2);
  printf("linear bits=%d header=%d group=%ld n=%ld k=%ld inputs=%d fine=%d m=%ld %016llx\n", l->bits, l->header,
         l->group, l->n, l->k, l->inputs, l->fine, l->m, (unsigned long long)c->hash);
}

/* A weight of every shape with every number of rows. */
static void check_shapes(check *c, linear_case l) {
  static const long shapes[][2] = {{37, 75}, {65, 33}, {64, 160}, {19, 2801}}, rows[] = {1, 2, 5, 40};
  for (long i = 0; i < LENGTH(shapes); i++)
    for (long j = 0; j < LENGTH(rows); j++) {
      l.n = shapes[i][0], l.k = shapes[i][1], l.m = rows[j];
      if (is_due(c)) check_linear(c, &l);
    }
}

static void check_linears(check *c) {
  static const int bits[] = {2, 3, 4, 8};
  static const long groups[] = {16, 32, 96};
  static const struct { int inputs, fine; } inputs[] = {
      {QD_FLOAT_INPUTS, 0}, {QD_INT8_BLOCKS, 0}, {QD_INT8_BLOCKS, 1}, {QD_INT8_ROWS, 0}};
  for (long b = 0; b < LENGTH(bits); b++)
    for (int header = QD_HALF; header <= QD_FLOAT_ZERO; header++)
      for (long g = 0; g < LENGTH(groups); g++)
        for (long i = 0; i < LENGTH(inputs); i++)
          check_shapes(c, (linear_case){bits[b], header, inputs[i].inputs, inputs[i].fine, .group = groups[g]});
  static const int float_bits[] = {16, 17, 32};
  for (long b = 0; b < LENGTH(float_bits); b++) check_shapes(c, (linear_case){.bits = float_bits[b], .group = BLOCK});
}

/* Attention: requests whose contexts are written by one step, and extended and attended to by the next. */

#define KV_HEADS 2
#define POOL_BLOCKS 512 /* a power of two, see block_tables */
#define INT8_POOL 3

/* num_queries: the last tokens of the context, which are the second step's. */
typedef struct {
  long context_len, num_queries;
} request;

typedef struct {
  const request *requests;
  long num_requests;
} batch;

typedef struct {
  int type, int8_queries;
  long head_dim, shared, window, softcap, batch;
} attention_case;

static const int32_t *block_tables(check *c, long num_requests, long max_blocks) {
  int32_t *tables = take(c, 4 * num_requests * max_blocks);
  for (long i = 0; i < num_requests * max_blocks; i++) tables[i] = (int32_t)(i * 389 % POOL_BLOCKS);
  return tables;
}

/* The step that fills the pool, or the one of the queries. */
static qd_step batch_step(check *c, batch b, long block_size, int is_fill) {
  long max_blocks = ceil_div(300, block_size), m = 0;
  int32_t *positions = take(c, 4 * 300 * b.num_requests), *slots = take(c, 4 * 300 * b.num_requests);
  int32_t *query_start = take(c, 4 * (b.num_requests + 1)), *context_len = take(c, 4 * b.num_requests);
  const int32_t *tables = block_tables(c, b.num_requests, max_blocks);
  for (long r = 0; r < b.num_requests; r++) {
    long end = b.requests[r].context_len, begin = is_fill ? 0 : end - b.requests[r].num_queries;
    query_start[r] = (int32_t)m;
    context_len[r] = (int32_t)end;
    for (long i = begin; i < end; i++, m++) {
      positions[m] = (int32_t)i;
      slots[m] = (int32_t)(tables[r * max_blocks + i / block_size] * block_size + i % block_size);
    }
  }
  query_start[b.num_requests] = (int32_t)m;
  return (qd_step){m, b.num_requests, max_blocks, NULL, positions, slots, query_start, context_len, tables};
}

static qd_kv kv_layer(check *c, int type, long head_dim, long block_size) {
  static const long element_bytes[] = {4, 2, 2, 1};
  long vectors = POOL_BLOCKS * KV_HEADS * block_size, bytes = vectors * head_dim * element_bytes[type];
  qd_kv kv = {.k = take(c, bytes), .v = take(c, bytes), .block_size = block_size, .type = type};
  if (type == INT8_POOL) kv.k_scale = take(c, 4 * vectors), kv.v_scale = take(c, 4 * vectors);
  for (int i = 0; i < 3; i++) {
    long stride = i == 0 ? KV_HEADS * block_size : i == 1 ? block_size : 1;
    kv.k_stride[i] = kv.v_stride[i] = stride * head_dim;
    kv.k_scale_stride[i] = kv.v_scale_stride[i] = stride;
  }
  return kv;
}

static void hash_vectors(check *c, const qd_kv *kv, const void *data, long n) {
  switch (kv->type) {
    case 0: hash_floats(c, data, n); break;
    case 1: hash_halves(c, data, n, 0x7c00); break;
    case 2: hash_halves(c, data, n, 0x7f80); break;
    default: hash_bytes(c, data, n);
  }
}

static void hash_layer(check *c, const qd_kv *kv, long head_dim) {
  long vectors = POOL_BLOCKS * KV_HEADS * kv->block_size;
  hash_vectors(c, kv, kv->k, vectors * head_dim);
  hash_vectors(c, kv, kv->v, vectors * head_dim);
  if (kv->type != INT8_POOL) return;
  hash_floats(c, kv->k_scale, vectors);
  hash_floats(c, kv->v_scale, vectors);
}

/* Writes keys and values of the step's tokens; with `attention`, attends with their queries. */
static void run_step(check *c, qd_rope_args rope, qd_attention_args *attention, const qd_step *step) {
  qd_heads heads = rope.heads;
  long qkv = step->num_tokens * (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim;
  long q = step->num_tokens * heads.num_heads * heads.head_dim;
  float *x = activations(c, qkv);
  spoil(c, x, qkv);
  rope.qkv = x;
  rope.out = take(c, 4 * q);
  qd_op ops[] = {{QD_ROPE, &rope}, {QD_ATTENTION, attention}};
  if (attention) attention->q = rope.out, attention->out = take(c, 4 * q);
  run(c, ops, attention ? 2 : 1, step);
  hash_floats(c, rope.out, q);
  if (attention) hash_floats(c, attention->out, q);
}

static void check_attention(check *c, const attention_case *a, batch b) {
  long dim = a->head_dim, block_size = dim == 64 ? 16 : 12;
  qd_kv kv = kv_layer(c, a->type, dim, block_size);
  qd_heads heads = {KV_HEADS * a->shared, KV_HEADS, dim};
  qd_rope_args rope = {.kv = &kv, .heads = heads, .rotary_dim = coin(c) ? dim : dim / 2, .eps = 1e-6f};
  if (below(c, 4)) rope.cos = uniforms(c, 300 * dim, 1.0f), rope.sin = uniforms(c, 300 * dim, 1.0f);
  if (coin(c)) rope.q_norm = uniforms(c, dim, 1.0f), rope.k_norm = uniforms(c, dim, 1.0f);
  qd_attention_args attention = {.kv = &kv, .heads = heads, .window = a->window, .scale = 0.2f,
                                 .softcap = (float)a->softcap, .int8_queries = a->int8_queries};
  qd_step fill = batch_step(c, b, block_size, 1), queries = batch_step(c, b, block_size, 0);
  run_step(c, rope, NULL, &fill);
  run_step(c, rope, &attention, &queries);
  hash_layer(c, &kv, dim);
  printf("attention type=%d int8_queries=%d head_dim=%ld shared=%ld window=%ld softcap=%ld batch=%ld %016llx\n", a->type,
         a->int8_queries, dim, a->shared, a->window, a->softcap, a->batch, (unsigned long long)c->hash);
}

/* Many requests; a prompt; a request alone, whose splits are chunks of their own. */
static void check_batches(check *c, attention_case a) {
  static const request many[] = {{1, 1}, {2, 2}, {15, 1}, {16, 2}, {17, 3}, {31, 31}, {255, 1}, {256, 1}, {257, 2},
                                 {299, 5}};
  static const request prompt[] = {{300, 300}}, alone[] = {{300, 1}};
  static const batch batches[] = {{many, LENGTH(many)}, {prompt, 1}, {alone, 1}};
  for (a.batch = 0; a.batch < LENGTH(batches); a.batch++)
    if (is_due(c)) check_attention(c, &a, batches[a.batch]);
}

static void check_attentions(check *c) {
  static const struct { int type, int8_queries; } pools[] = {{0, 0}, {1, 0}, {2, 0}, {INT8_POOL, 0}, {INT8_POOL, 1}};
  static const long head_dims[] = {64, 80}, shared[] = {1, 3, 4}, windows[] = {0, 37}, softcaps[] = {0, 5};
  for (long p = 0; p < LENGTH(pools); p++)
    for (long d = 0; d < LENGTH(head_dims); d++)
      for (long s = 0; s < LENGTH(shared); s++)
        for (long w = 0; w < LENGTH(windows); w++)
          for (long cap = 0; cap < LENGTH(softcaps); cap++)
            check_batches(c, (attention_case){pools[p].type, pools[p].int8_queries, head_dims[d], shared[s], windows[w],
                                              softcaps[cap], 0});
}

/* Shortlists: rows of logits of many sizes. */

#define CAPACITY 32

/* NULL for one row of two. */
static const uint32_t *mask_of(check *c, long vocab_size) {
  long num_words = (vocab_size + 31) / 32;
  uint32_t *mask = take(c, 4 * num_words);
  for (long i = 0; i < num_words; i++) mask[i] = (uint32_t)below(c, 1 << 16) << 16 | (uint32_t)below(c, 1 << 16);
  return coin(c) ? mask : NULL;
}

static void check_shortlist(check *c, long vocab_size, long top_k) {
  float *logits = activations(c, vocab_size);
  const uint32_t *mask = mask_of(c, vocab_size);
  spoil(c, logits, vocab_size);
  qd_shortlist list = {.logits = logits, .mask = mask, .tail = 1e-3, .top_k = top_k, .min_weight = 1e-6f,
                       .temperature = (float)below(c, 3) * 0.4f};
  list.weights = take(c, 4 * CAPACITY), list.ids = take(c, 4 * CAPACITY);
  qd_shortlist_args args = {&list, 1, vocab_size, CAPACITY};
  run(c, &(qd_op){QD_SHORTLIST, &args}, 1, &(qd_step){0});
  hash_floats(c, &list.largest, 1);
  hash_bytes(c, (const uint8_t *)&list.total, sizeof list.total);
  hash_floats(c, list.weights, CAPACITY);
  hash_bytes(c, (const uint8_t *)list.ids, 4 * CAPACITY);
  printf("shortlist vocab_size=%ld top_k=%ld best=%d finite=%d count=%d %016llx\n", vocab_size, top_k, list.best,
         list.finite, list.count, (unsigned long long)c->hash);
}

static void check_shortlists(check *c) {
  static const long top_ks[] = {0, 5};
  for (long vocab_size = 1; vocab_size < 1200; vocab_size += 7)
    for (long k = 0; k < LENGTH(top_ks); k++)
      if (is_due(c)) check_shortlist(c, vocab_size, top_ks[k]);
}

int main(int argc, char **argv) {
  check c = {.pool = qd_pool_create(2), .arena = malloc(ARENA_BYTES), .every = argc > 1 ? atol(argv[1]) : 1,
             .first = argc > 2 ? atol(argv[2]) : 0};
  if (!c.pool || !c.arena || c.every < 1) return 1;
  memset(c.arena, 0xff, ARENA_BYTES);
  printf("%s\n", qd_path_name());
  check_linears(&c);
  check_attentions(&c);
  check_shortlists(&c);
  qd_pool_destroy(c.pool);
  free(c.arena);
  return 0;
}
