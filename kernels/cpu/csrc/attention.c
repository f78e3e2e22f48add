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

/* Where tokens first .. first + count - 1 of the request lie, and their scales (0 for the others). */
static void locate(const tile *t, const void *data, const int64_t stride[3], const float *scale_data,
                   const int64_t scale_stride[3], long first, long count, const uint8_t *rows[GROUP], float *scales) {
  const qd_kv *kv = t->a->kv;
  long block = first / kv->block_size, token = first % kv->block_size, size = kv_element_bytes(kv->type);
  if (scale_data) memset(scales, 0, GROUP * sizeof(float));
  for (long i = 0; i < count; block++, token = 0) {
    long last = min_long(count, i + kv->block_size - token), id = t->table[block];
    const uint8_t *row = (const uint8_t *)data + kv_at(stride, id, t->head, token) * size;
    const float *scale = scale_data ? scale_data + kv_at(scale_stride, id, t->head, token) : NULL;
    for (; i < last; i++, row += stride[2] * size) {
      rows[i] = row;
      if (scale) scales[i] = *scale, scale += scale_stride[2];
    }
  }
}

/* k_tile = keys of a group, shifted by 128, as chunks of 4 elements x 16 tokens, in planes. */
static void load_keys_int8(tile *t, const uint8_t *rows[GROUP], long count) {
  long dim = t->a->heads.head_dim, chunks = t->padded_dim / 4;
  uint8_t zeros[64] = {0}, ends[GROUP][64];
  for (long d = 0; d < dim; d += 64) {
    const uint8_t *parts[GROUP];
    for (long i = 0; i < GROUP; i++) {
      parts[i] = i < count ? rows[i] + d : zeros;
      if (dim - d < 64) parts[i] = memcpy(memset(ends[i], 0, 64), parts[i], (size_t)(dim - d));
    }
    words_transpose(parts, t->k_tile + GROUP * d);
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

/* Where a row's scores of the group at `start` lie. */
INLINE float *group_scores(const tile *t, long row, long start) { return t->scores + row * SPLIT + start % SPLIT; }

/* Integer dots of num rows (a constant) from `row` on with a group's keys. */
INLINE void score_int8(tile *t, int num, long row, long start) {
  const int8_t *q = t->q_codes + row * t->padded_dim;
  long dim = t->padded_dim, chunks = dim / 4;
  vi16 sum[SHARED_ROWS];
UNROLL
  for (int r = 0; r < num; r++) sum[r] = vi_set1(t->q_sum[row + r]);
  for (long b = 0; b < chunks; b += 8) {
    dot low[SHARED_ROWS], high[SHARED_ROWS];
UNROLL
    for (int r = 0; r < num; r++) low[r] = high[r] = dot_zero();
UNROLL
    for (long c = b; c < b + 8; c++) {
      codes k = codes_load(t->k_tile + 64 * c), k_high = k;
      if (WIDE_PLANES == 2) k_high = codes_load(t->k_tile + 64 * (chunks + c));
UNROLL
      for (int r = 0; r < num; r++) {
        low[r] = dot_add(low[r], k, q + r * dim + 4 * c);
        if (WIDE_PLANES == 2) high[r] = dot_add(high[r], k_high, q + r * dim + 4 * c);
      }
    }
UNROLL
    for (int r = 0; r < num; r++) {
      sum[r] = vi_add(sum[r], dot_ints(low[r]));
      if (WIDE_PLANES == 2) sum[r] = vi_add(sum[r], vi_shift4(dot_ints(high[r])));
    }
  }
  v16 k_scales = v_load(t->k_scales);
UNROLL
  for (int r = 0; r < num; r++)
    v_store(group_scores(t, row + r, start), v_mul(vi_float(sum[r]), v_mul(k_scales, v_set1(t->q_scale[row + r]))));
}

INLINE void score_float(tile *t, int num, long row, long start) {
  const float *k = (const float *)(const void *)t->k_tile;
  for (long end = row + num; row < end; row++) {
    const float *q = t->queries + row * t->padded_dim;
    v16 sum[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
    for (long d = 0; d < t->padded_dim; d += 4)
UNROLL
      for (int i = 0; i < 4; i++) sum[i] = v_fma(v_set1(q[d + i]), v_load(k + GROUP * (d + i)), sum[i]);
    v16 total = v_mul(v_add(v_add(sum[0], sum[1]), v_add(sum[2], sum[3])), v_set1(t->a->scale));
    v_store(group_scores(t, row, start), t->a->kv->type == KV_INT8 ? v_mul(total, v_load(t->k_scales)) : total);
  }
}

INLINE void score_rows(tile *t, int num, long row, long start) {
  if (t->a->int8_queries)
    score_int8(t, num, row, start);
  else
    score_float(t, num, row, start);
}

/* Tokens first..last-1 of the group at `start` that a row sees. */
INLINE void seen_tokens(const tile *t, long row, long start, long *first, long *last) {
  long position = row_position(t, row);
  *first = max_long(0, first_seen(t, position) - start);
  *last = min_long(GROUP, position + 1 - start);
}

/* Scores after the cap, -inf where unseen. */
static void mask_scores(tile *t, long row, long start) {
  const float cap = t->a->softcap;
  float *scores = group_scores(t, row, start);
  long first, last;
  v16 s = v_load(scores);
  if (cap > 0.0f) s = v_mul(v_tanh(v_div(s, v_set1(cap))), v_set1(cap));
  seen_tokens(t, row, start, &first, &last);
  v_store(scores, v_keep(s, first, last, v_set1(-INFINITY)));
}

/* Calls f with the number of rows as a constant, 1 .. SHARED_ROWS. */
#define FOR_NUM_ROWS(num, f, ...)                       \
  switch (num) {                                        \
    case 1: f(t, 1, __VA_ARGS__); break;                \
    case 2: f(t, 2, __VA_ARGS__); break;                \
    case 3: f(t, SHARED_ROWS < 3 ? 1 : 3, __VA_ARGS__); break; \
    default: f(t, SHARED_ROWS, __VA_ARGS__);            \
  }

/* Scores of the group at `start` for every row; rows that see none of it are scored too and never looked at. */
static void score_group(tile *t, long start) {
  for (long row = 0; row < t->num_rows; row += SHARED_ROWS)
    FOR_NUM_ROWS(min_long(SHARED_ROWS, t->num_rows - row), score_rows, row, start)
  for (long row = 0; row < t->num_rows; row++) mask_scores(t, row, start);
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

/* What a row's values are added to. */
INLINE float *row_values(const tile *t, long row) { return t->partial + row * result_floats(t->padded_dim) + LANES; }

/* values of num_rows rows += sum over tokens first..last-1 of the group of weight * value, token by token, for
 * num_vectors vectors from element d on; both numbers are constants. */
INLINE void add_values(tile *t, int num_rows, int num_vectors, long row, long d, long start, long first, long last) {
  v16 acc[SHARED_ROWS][SHARED_VECTORS];
  const float *weights[SHARED_ROWS];
UNROLL
  for (int r = 0; r < num_rows; r++) {
    weights[r] = group_scores(t, row + r, start);
UNROLL
    for (int i = 0; i < num_vectors; i++) acc[r][i] = v_load(row_values(t, row + r) + d + LANES * i);
  }
  for (long j = first; j < last; j++) {
    v16 values[SHARED_VECTORS];
UNROLL
    for (int i = 0; i < num_vectors; i++) values[i] = v_load(t->v_tile + j * t->padded_dim + d + LANES * i);
UNROLL
    for (int r = 0; r < num_rows; r++) {
      v16 w = v_set1(weights[r][j]);
UNROLL
      for (int i = 0; i < num_vectors; i++) acc[r][i] = v_fma(w, values[i], acc[r][i]);
    }
  }
UNROLL
  for (int r = 0; r < num_rows; r++)
UNROLL
    for (int i = 0; i < num_vectors; i++) v_store(row_values(t, row + r) + d + LANES * i, acc[r][i]);
}

/* The same for all elements. */
INLINE void add_all_values(tile *t, int num_rows, long row, long start, long first, long last) {
  long d = 0;
  for (; d + SHARED_VECTORS * LANES <= t->padded_dim; d += SHARED_VECTORS * LANES)
    add_values(t, num_rows, SHARED_VECTORS, row, d, start, first, last);
  for (; d < t->padded_dim; d += 2 * LANES) add_values(t, num_rows, 2, row, d, start, first, last);
}

/* Rows see the whole group: they share the loads of its values. */
static int all_see_all(const tile *t, long row, long end, long start) {
  for (; row < end; row++) {
    long first, last;
    seen_tokens(t, row, start, &first, &last);
    if (first > 0 || last < GROUP) return 0;
  }
  return 1;
}

static void mix_group(tile *t, long start) {
  for (long row = 0; row < t->num_rows; row += SHARED_ROWS) {
    long end = min_long(t->num_rows, row + SHARED_ROWS);
    if (all_see_all(t, row, end, start)) {
      FOR_NUM_ROWS(end - row, add_all_values, row, start, 0, GROUP)
      continue;
    }
    for (long r = row; r < end; r++) {
      long first, last;
      seen_tokens(t, r, start, &first, &last);
      if (first < last) add_all_values(t, 1, r, start, first, last);
    }
  }
}

static void load_key_group(tile *t, long start, long count) {
  const qd_kv *kv = t->a->kv;
  const uint8_t *rows[GROUP];
  locate(t, kv->k, kv->k_stride, kv->k_scale, kv->k_scale_stride, start, count, rows, t->k_scales);
  if (t->a->int8_queries)
    load_keys_int8(t, rows, count);
  else
    load_keys_float(t, kv->type, rows, count);
}

INLINE void load_value_rows(tile *t, int type, const uint8_t *rows[GROUP], long count) {
  long dim = t->a->heads.head_dim, size = kv_element_bytes(type), stride = t->padded_dim;
  float *to = t->v_tile;
  for (long i = 0; i < count; i++, to += stride) {
    const uint8_t *row = rows[i];
    long d = 0;
    for (; d + LANES <= dim; d += LANES) v_store(to + d, kv_load(type, row + d * size, LANES));
    if (d < dim) v_store(to + d, kv_load(type, row + d * size, dim - d)), d += LANES;
    if (d < stride) v_store(to + d, v_zero());
  }
}

static void load_value_group(tile *t, const uint8_t *rows[GROUP], long count) {
  switch (t->a->kv->type) {
    case KV_INT8: load_value_rows(t, KV_INT8, rows, count); break;
    case KV_FP16: load_value_rows(t, KV_FP16, rows, count); break;
    case KV_BF16: load_value_rows(t, KV_BF16, rows, count); break;
    default: load_value_rows(t, KV_FP32, rows, count);
  }
}

/* partial = every row over one split. Tokens from `seen` (a group's start) to `end` are of interest to some row. */
static void attend_split(tile *t, long split_start, long seen, long end) {
  const qd_kv *kv = t->a->kv;
  const uint8_t *values[SPLIT];
  long first = max_long(split_start, seen), last = min_long(split_start + SPLIT, end);
  for (long start = first; start < last; start += GROUP) {
    long count = min_long(GROUP, last - start), at = start - split_start;
    load_key_group(t, start, count);
    score_group(t, start);
    locate(t, kv->v, kv->v_stride, kv->v_scale, kv->v_scale_stride, start, count, values + at, t->v_scales + at);
  }
  for (long row = 0; row < t->num_rows; row++) weigh(t, row, split_start);
  for (long start = first; start < last; start += GROUP) {
    load_value_group(t, values + start - split_start, min_long(GROUP, last - start));
    mix_group(t, start);
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
