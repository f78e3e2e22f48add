/* Paged causal attention, for decode and prefill rows alike.
 *
 * A row is one query head of one token. Its keys are visited in splits of 256 tokens counted from position 0, and in
 * groups of 16 within a split: scores of a group fill the 16 lanes, exponentials are summed lane by lane over the
 * groups, values are added token by token. Splits are merged in order. So a row's arithmetic depends on its own
 * position and keys alone, while any number of rows may share the work of loading a group.
 *
 * Splits run one after the other inside a chunk, or, where there are too few chunks for the threads, as chunks of
 * their own whose results a second phase merges the same way. */
#include "kv.h"
#include "pool.h"
#include "vmath.h"

#define SPLIT 256
#define GROUP LANES
#define GROUPS (SPLIT / GROUP)
#define MAX_TILE_ROWS 32

/* Rows of one request, consecutive tokens x the query heads of one key/value head, and their state. */
typedef struct {
  const qd_attention_args *a;
  const int32_t *table;
  long head, first_token, num_tokens, shared, num_rows, padded_dim;
  const int32_t *positions;
  /* Per row: queries (floats x scale, or codes with scale and sum), scores, a split's result, the merged result. */
  float *queries, *q_scale, *scores, *partial, *merged;
  int32_t *q_sum;
  int8_t *q_codes;
  uint8_t *k_tile;
  float *v_tile, *k_scales, *v_scales;
} tile;

/* A result: max, sum, then padded_dim of values, not yet divided by the sum. */
INLINE long result_floats(long padded_dim) { return padded_dim + LANES; }

static long tile_tokens(const qd_attention_args *a) {
  return max_long(1, MAX_TILE_ROWS * a->heads.num_kv_heads / a->heads.num_heads);
}

static long tile_rows(const qd_attention_args *a) {
  return tile_tokens(a) * (a->heads.num_heads / a->heads.num_kv_heads);
}

static long padded_dim(const qd_attention_args *a) { return round_up(a->heads.head_dim, BLOCK); }

static uint8_t *take(uint8_t **memory, long bytes) {
  uint8_t *p = *memory;
  *memory += round_up(bytes, 64);
  return p;
}

/* Lays a tile out in memory (or, from NULL, counts its bytes). */
static uint8_t *lay_out(tile *t, const qd_attention_args *a, uint8_t *memory) {
  long dim = padded_dim(a), rows = tile_rows(a);
  t->a = a;
  t->padded_dim = dim;
  t->queries = (float *)(void *)take(&memory, rows * dim * 4);
  t->q_scale = (float *)(void *)take(&memory, rows * 4);
  t->q_sum = (int32_t *)(void *)take(&memory, rows * 4);
  t->q_codes = (int8_t *)take(&memory, rows * dim);
  t->scores = (float *)(void *)take(&memory, rows * SPLIT * 4);
  t->partial = (float *)(void *)take(&memory, rows * result_floats(dim) * 4);
  t->merged = (float *)(void *)take(&memory, rows * result_floats(dim) * 4);
  t->k_tile = take(&memory, GROUP * dim * 4);
  t->v_tile = (float *)(void *)take(&memory, GROUP * dim * 4);
  t->k_scales = (float *)(void *)take(&memory, GROUP * 4);
  t->v_scales = (float *)(void *)take(&memory, SPLIT * 4);
  return memory;
}

static long row_token(const tile *t, long row) { return row / t->shared; }
static long row_position(const tile *t, long row) { return t->positions[row_token(t, row)]; }
static long first_seen(const tile *t, long position) {
  return t->a->window > 0 ? max_long(0, position - t->a->window + 1) : 0;
}

/* A query rounded to INT8 as one vector; its codes count against keys shifted by 128. */
static void quantize_query(tile *t, long row, const float *q) {
  int8_t *to = t->q_codes + row * t->padded_dim;
  memset(to, 0, (size_t)t->padded_dim);
  t->q_scale[row] = kv_quantize(q, to, t->a->heads.head_dim) * t->a->scale;
  int32_t sum = 0;
  for (long i = 0; i < t->a->heads.head_dim; i++) sum += to[i];
  t->q_sum[row] = -128 * sum;
}

static void load_queries(tile *t) {
  const qd_attention_args *a = t->a;
  long dim = a->heads.head_dim;
  for (long row = 0; row < t->num_rows; row++) {
    long token = t->first_token + row_token(t, row), head = t->head * t->shared + row % t->shared;
    const float *q = a->q + (token * a->heads.num_heads + head) * dim;
    if (a->int8_queries)
      quantize_query(t, row, q);
    else
      memcpy(t->queries + row * t->padded_dim, q, (size_t)dim * sizeof(float));
  }
}

/* Where tokens first .. first + count - 1 of the request lie. */
static void locate(const tile *t, const void *data, const int64_t stride[3], long first, long count,
                   const uint8_t *rows[GROUP]) {
  const qd_kv *kv = t->a->kv;
  for (long i = 0; i < count; i++) {
    long token = first + i, block = t->table[token / kv->block_size];
    rows[i] = (const uint8_t *)data +
              kv_at(stride, block, t->head, token % kv->block_size) * kv_element_bytes(kv->type);
  }
}

static void load_scales(const tile *t, const float *data, const int64_t stride[3], long first, long count, float *to) {
  const qd_kv *kv = t->a->kv;
  for (long i = 0; i < GROUP; i++) {
    long token = first + i;
    to[i] = i < count ? data[kv_at(stride, t->table[token / kv->block_size], t->head, token % kv->block_size)] : 0.0f;
  }
}

/* k_tile = keys of a group, shifted by 128, as chunks of 4 elements x 16 tokens, in planes. */
static void load_keys_int8(tile *t, const uint8_t *rows[GROUP], long count) {
  long dim = t->a->heads.head_dim, chunks = t->padded_dim / 4;
  uint8_t padded[1024 + BLOCK];
  memset(t->k_tile, 0, (size_t)(t->padded_dim * GROUP));
  for (long i = 0; i < count; i++) {
    const uint8_t *from = rows[i];
    if (dim % 4) {
      memset(padded, 0, (size_t)t->padded_dim);
      from = memcpy(padded, from, (size_t)dim);
    }
    for (long c = 0; 4 * c < dim; c++) memcpy(t->k_tile + 64 * c + 4 * i, from + 4 * c, 4);
  }
  for (long c = 0; c < chunks; c++) {
    codes k = codes_flip_sign(codes_load(t->k_tile + 64 * c));
    codes_store(t->k_tile + 64 * c, WIDE_PLANES == 2 ? codes_field(k, 0, 15) : k);
    if (WIDE_PLANES == 2) codes_store(t->k_tile + 64 * (chunks + c), codes_field(k, 4, 15));
  }
}

/* k_tile = keys of a group as floats [padded_dim][16 tokens]. */
INLINE void load_keys_float(tile *t, int type, const uint8_t *rows[GROUP], long count) {
  float *to = (float *)(void *)t->k_tile, lanes[LANES];
  long dim = t->a->heads.head_dim;
  memset(to, 0, (size_t)(t->padded_dim * GROUP) * sizeof(float));
  for (long i = 0; i < count; i++)
    for (long d = 0; d < dim; d += LANES) {
      long n = min_long(LANES, dim - d);
      v_store(lanes, kv_load(type, rows[i] + d * kv_element_bytes(type), n));
      for (long j = 0; j < n; j++) to[GROUP * (d + j) + i] = lanes[j];
    }
}

INLINE void load_values(tile *t, int type, const uint8_t *rows[GROUP], long count) {
  long dim = t->a->heads.head_dim;
  for (long i = 0; i < count; i++)
    for (long d = 0; d < t->padded_dim; d += LANES) {
      v16 v = v_zero();
      if (d < dim) v = kv_load(type, rows[i] + d * kv_element_bytes(type), min_long(LANES, dim - d));
      v_store(t->v_tile + i * t->padded_dim + d, v);
    }
}

INLINE v16 score_int8(const tile *t, long row) {
  const int8_t *q = t->q_codes + row * t->padded_dim;
  long chunks = t->padded_dim / 4;
  vi16 sum = vi_set1(t->q_sum[row]);
  for (long b = 0; b < chunks; b += 8) {
    dot low = dot_zero(), high = dot_zero();
UNROLL
    for (long c = b; c < b + 8; c++) {
      low = dot_add(low, codes_load(t->k_tile + 64 * c), q + 4 * c);
      if (WIDE_PLANES == 2) high = dot_add(high, codes_load(t->k_tile + 64 * (chunks + c)), q + 4 * c);
    }
    sum = vi_add(sum, dot_ints(low));
    if (WIDE_PLANES == 2) sum = vi_add(sum, vi_shift4(dot_ints(high)));
  }
  return v_mul(vi_float(sum), v_mul(v_load(t->k_scales), v_set1(t->q_scale[row])));
}

INLINE v16 score_float(const tile *t, long row) {
  const float *q = t->queries + row * t->padded_dim, *k = (const float *)(const void *)t->k_tile;
  v16 sum[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
  for (long d = 0; d < t->padded_dim; d += 4)
    for (int i = 0; i < 4; i++) sum[i] = v_fma(v_set1(q[d + i]), v_load(k + GROUP * (d + i)), sum[i]);
  v16 total = v_mul(v_add(v_add(sum[0], sum[1]), v_add(sum[2], sum[3])), v_set1(t->a->scale));
  return t->a->kv->type == KV_INT8 ? v_mul(total, v_load(t->k_scales)) : total;
}

/* Scores of the group at `start` of every row that sees some of it; unseen lanes -inf. */
static void score_group(tile *t, long start, long split_start) {
  const float cap = t->a->softcap;
  for (long row = 0; row < t->num_rows; row++) {
    long position = row_position(t, row), seen = first_seen(t, position);
    if (start > position || start + GROUP <= seen) continue;
    v16 s = t->a->int8_queries ? score_int8(t, row) : score_float(t, row);
    if (cap > 0.0f) s = v_mul(v_tanh(v_div(s, v_set1(cap))), v_set1(cap));
    s = v_keep(s, seen - start, position + 1 - start, v_set1(-INFINITY));
    v_store(t->scores + row * SPLIT + start - split_start, s);
  }
}

/* The groups of this split that a row sees: first..last-1 as tokens from the split's start. */
INLINE int seen_groups(const tile *t, long row, long split_start, long *first, long *last) {
  long position = row_position(t, row), seen = first_seen(t, position);
  *first = max_long(0, seen - split_start) / GROUP * GROUP;
  *last = min_long(SPLIT, round_up(position + 1 - split_start, GROUP));
  return *first < *last;
}

/* Scores of a row become weights: exp(score - max), times the value's scale. Starts the row's partial result. */
static void weigh(tile *t, long row, long split_start) {
  float *scores = t->scores + row * SPLIT, *result = t->partial + row * result_floats(t->padded_dim);
  long first, last, position = row_position(t, row), seen = first_seen(t, position);
  if (!seen_groups(t, row, split_start, &first, &last)) return;
  v16 largest = v_set1(-INFINITY), sum = v_zero();
  for (long i = first; i < last; i += GROUP) largest = v_max(v_load(scores + i), largest);
  float max = v_max_lane(largest);
  for (long i = first; i < last; i += GROUP) {
    v16 p = v_exp(v_sub(v_load(scores + i), v_set1(max)));
    p = v_keep(p, seen - split_start - i, position + 1 - split_start - i, v_zero());
    sum = v_add(sum, p);
    v_store(scores + i, t->a->kv->type == KV_INT8 ? v_mul(p, v_load(t->v_scales + i)) : p);
  }
  result[0] = max;
  result[1] = v_sum(sum);
  memset(result + LANES, 0, (size_t)t->padded_dim * sizeof(float));
}

/* result += sum over tokens of weight * value, token by token; num: vectors of 16 at once, a constant. */
INLINE void add_values(int num, const float *weights, long count, const float *values, long stride, float *result) {
  v16 acc[4];
UNROLL
  for (int i = 0; i < num; i++) acc[i] = v_load(result + LANES * i);
  for (long j = 0; j < count; j++) {
    v16 w = v_set1(weights[j]);
UNROLL
    for (int i = 0; i < num; i++) acc[i] = v_fma(w, v_load(values + j * stride + LANES * i), acc[i]);
  }
UNROLL
  for (int i = 0; i < num; i++) v_store(result + LANES * i, acc[i]);
}

static void mix_group(tile *t, long start, long split_start) {
  for (long row = 0; row < t->num_rows; row++) {
    long position = row_position(t, row), seen = first_seen(t, position);
    long first = max_long(0, seen - start), count = min_long(GROUP, position + 1 - start) - first, d = 0;
    if (count <= 0) continue;
    const float *weights = t->scores + row * SPLIT + start - split_start + first;
    const float *values = t->v_tile + first * t->padded_dim;
    float *result = t->partial + row * result_floats(t->padded_dim) + LANES;
    for (; d + 4 * LANES <= t->padded_dim; d += 4 * LANES)
      add_values(4, weights, count, values + d, t->padded_dim, result + d);
    if (d < t->padded_dim) add_values(2, weights, count, values + d, t->padded_dim, result + d);
  }
}

static void load_key_group(tile *t, long start, long count) {
  const qd_kv *kv = t->a->kv;
  const uint8_t *rows[GROUP];
  locate(t, kv->k, kv->k_stride, start, count, rows);
  if (kv->type == KV_INT8) load_scales(t, kv->k_scale, kv->k_scale_stride, start, count, t->k_scales);
  if (t->a->int8_queries)
    load_keys_int8(t, rows, count);
  else
    load_keys_float(t, kv->type, rows, count);
}

static void load_value_group(tile *t, long start, long count) {
  const uint8_t *rows[GROUP];
  locate(t, t->a->kv->v, t->a->kv->v_stride, start, count, rows);
  load_values(t, t->a->kv->type, rows, count);
}

/* partial = every row over one split. Tokens from `seen` (a group's start) to `end` are of interest to some row. */
static void attend_split(tile *t, long split_start, long seen, long end) {
  const qd_kv *kv = t->a->kv;
  long first = max_long(split_start, seen), last = min_long(split_start + SPLIT, end);
  for (long start = first; start < last; start += GROUP) {
    long count = min_long(GROUP, last - start);
    load_key_group(t, start, count);
    score_group(t, start, split_start);
    if (kv->type == KV_INT8)
      load_scales(t, kv->v_scale, kv->v_scale_stride, start, count, t->v_scales + start - split_start);
  }
  for (long row = 0; row < t->num_rows; row++) weigh(t, row, split_start);
  for (long start = first; start < last; start += GROUP) {
    load_value_group(t, start, min_long(GROUP, last - start));
    mix_group(t, start, split_start);
  }
}

/* merged = merged and partial together, or partial where it is the row's first split. */
static void merge(float *merged, const float *partial, int is_first, long dim) {
  if (is_first) {
    memcpy(merged, partial, (size_t)result_floats(dim) * sizeof(float));
    return;
  }
  float max = merged[0] > partial[0] ? merged[0] : partial[0], weights[LANES] = {merged[0] - max, partial[0] - max};
  v_store(weights, v_exp(v_load(weights)));
  for (long i = 0; i < dim; i += LANES) {
    v16 old = v_mul(v_load(merged + LANES + i), v_set1(weights[0]));
    v_store(merged + LANES + i, v_fma(v_load(partial + LANES + i), v_set1(weights[1]), old));
  }
  merged[0] = max;
  merged[1] = fmaf(partial[1], weights[1], merged[1] * weights[0]);
}

static void write_row(const qd_attention_args *a, long token, long head, const float *result) {
  float *out = a->out + (token * a->heads.num_heads + head) * a->heads.head_dim;
  for (long i = 0; i < a->heads.head_dim; i += LANES)
    v_store_n(out + i, v_div(v_load(result + LANES + i), v_set1(result[1])), a->heads.head_dim - i);
}

static long num_tiles(const qd_attention_args *a, const qd_step *step) {
  long tiles = 0, tokens = tile_tokens(a);
  for (long r = 0; r < step->num_requests; r++)
    tiles += ceil_div(step->query_start[r + 1] - step->query_start[r], tokens);
  return tiles;
}

static long longest_context(const qd_step *step) {
  long longest = 1;
  for (long r = 0; r < step->num_requests; r++) longest = max_long(longest, step->context_len[r]);
  return longest;
}

/* Splits that are chunks of their own: 1 for none. */
static long parallel_splits(const qd_attention_args *a, const qd_step *step, int num_threads) {
  if (num_threads == 1 || num_tiles(a, step) * a->heads.num_kv_heads >= 4 * num_threads) return 1;
  return ceil_div(longest_context(step), SPLIT);
}

/* The tile of a chunk: which request, tokens and head. */
static void find_tile(tile *t, const qd_step *step, long index) {
  const qd_attention_args *a = t->a;
  long tokens = tile_tokens(a), r = 0, which = index / a->heads.num_kv_heads;
  for (;; r++) {
    long tiles = ceil_div(step->query_start[r + 1] - step->query_start[r], tokens);
    if (which < tiles) break;
    which -= tiles;
  }
  t->head = index % a->heads.num_kv_heads;
  t->shared = a->heads.num_heads / a->heads.num_kv_heads;
  t->first_token = step->query_start[r] + which * tokens;
  t->num_tokens = min_long(tokens, step->query_start[r + 1] - t->first_token);
  t->num_rows = t->num_tokens * t->shared;
  t->positions = step->positions + t->first_token;
  t->table = step->block_tables + r * step->max_blocks;
}

static float *shared_result(const tile *t, uint8_t *shared, long splits, long row, long split) {
  long head = t->head * t->shared + row % t->shared, token = t->first_token + row_token(t, row);
  long at = (token * t->a->heads.num_heads + head) * splits + split;
  return (float *)(void *)shared + at * result_floats(t->padded_dim);
}

static void keep_partial(const tile *t, uint8_t *shared, long splits, long split) {
  for (long row = 0; row < t->num_rows; row++)
    memcpy(shared_result(t, shared, splits, row, split), t->partial + row * result_floats(t->padded_dim),
           (size_t)result_floats(t->padded_dim) * sizeof(float));
}

static void merge_partial(tile *t, long split) {
  for (long row = 0; row < t->num_rows; row++) {
    long position = row_position(t, row), first = first_seen(t, position) / SPLIT, at = row * result_floats(t->padded_dim);
    if (split >= first && split <= position / SPLIT)
      merge(t->merged + at, t->partial + at, split == first, t->padded_dim);
  }
}

static void attend(const qd_attention_args *a, const qd_step *step, long index, qd_thread *thread) {
  tile t;
  long splits = parallel_splits(a, step, thread->num_threads);
  memset(&t, 0, sizeof t);
  lay_out(&t, a, thread->scratch);
  memset(t.queries, 0, (size_t)(tile_rows(a) * t.padded_dim) * sizeof(float));
  find_tile(&t, step, index / splits);
  long seen = first_seen(&t, t.positions[0]) / GROUP * GROUP, end = t.positions[t.num_tokens - 1] + 1;
  long first = splits > 1 ? index % splits : seen / SPLIT, last = splits > 1 ? first + 1 : ceil_div(end, SPLIT);
  if (SPLIT * first >= end || SPLIT * last <= seen) return;
  load_queries(&t);
  for (long split = first; split < last; split++) {
    attend_split(&t, SPLIT * split, seen, end);
    if (splits > 1)
      keep_partial(&t, thread->shared, splits, split);
    else
      merge_partial(&t, split);
  }
  if (splits > 1) return;
  for (long row = 0; row < t.num_rows; row++)
    write_row(a, t.first_token + row_token(&t, row), t.head * t.shared + row % t.shared,
              t.merged + row * result_floats(t.padded_dim));
}

/* All heads of token m: its splits in order, and the result. */
static void merge_token(const qd_attention_args *a, const qd_step *step, long m, qd_thread *thread) {
  long splits = parallel_splits(a, step, thread->num_threads), dim = padded_dim(a), position = step->positions[m];
  long first = a->window > 0 ? max_long(0, position - a->window + 1) / SPLIT : 0;
  float *merged = (float *)(void *)thread->scratch;
  for (long head = 0; head < a->heads.num_heads; head++) {
    const float *partials = (float *)(void *)thread->shared + (m * a->heads.num_heads + head) * splits * result_floats(dim);
    for (long split = first; split <= position / SPLIT; split++)
      merge(merged, partials + split * result_floats(dim), split == first, dim);
    write_row(a, m, head, merged);
  }
}

static long scratch_bytes(const void *args, const qd_step *step) {
  tile t;
  uint8_t *base = (uint8_t *)64;
  (void)step;
  return lay_out(&t, args, base) - base;
}

static long shared_bytes(const void *args, const qd_step *step, int num_threads) {
  const qd_attention_args *a = args;
  long splits = parallel_splits(a, step, num_threads);
  if (splits == 1) return 0;
  return step->num_tokens * a->heads.num_heads * splits * result_floats(padded_dim(a)) * (long)sizeof(float);
}

static long num_chunks(const void *args, const qd_step *step, int phase, int num_threads) {
  const qd_attention_args *a = args;
  long splits = parallel_splits(a, step, num_threads);
  if (phase == 0) return num_tiles(a, step) * a->heads.num_kv_heads * splits;
  return splits > 1 ? step->num_tokens : 0;
}

static void chunk(const void *args, const qd_step *step, int phase, long index, qd_thread *thread) {
  if (phase == 0)
    attend(args, step, index, thread);
  else
    merge_token(args, step, index, thread);
}

const qd_kernel attention_kernel = {
    .num_phases = 2,
    .shared_bytes = shared_bytes,
    .scratch_bytes = scratch_bytes,
    .num_chunks = num_chunks,
    .chunk = chunk,
};
