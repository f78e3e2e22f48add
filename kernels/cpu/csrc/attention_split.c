/* One split of attention: scores of its groups, their exponentials, the sum of values. */
#include "attention_tile.h"
#include "kv.h"
#include "vmath.h"

/* Integer dots of num rows (a constant) from `row` on with a group's keys. */
INLINE void score_int8(tile *t, int num, long row, long start) {
  const int8_t *q = t->q_codes + row * t->padded_dim;
  long dim = t->padded_dim;
  vi16 sum[SHARED_ROWS];
  UNROLL
  for (int r = 0; r < num; r++) sum[r] = vi_set1(t->q_sum[row + r]);
  for (long c = 0; c < dim / 4; c++) {
    codes k = codes_load(t->k_tile + 64 * c);
    UNROLL
    for (int r = 0; r < num; r++) sum[r] = key_dot_add(sum[r], k, q + r * dim + 4 * c);
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

static void cap_scores(float *scores, float cap) {
  v_store(scores, v_mul(v_tanh(v_div(v_load(scores), v_set1(cap))), v_set1(cap)));
}

/* -inf where unseen. */
static void mask_scores(tile *t, long row, long start) {
  float *scores = group_scores(t, row, start);
  long first, last;
  seen_tokens(t, row, start, &first, &last);
  v_store(scores, v_keep(v_load(scores), first, last, v_set1(-INFINITY)));
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
  if (t->a->softcap > 0.0f)
    for (long row = 0; row < t->num_rows; row++) cap_scores(group_scores(t, row, start), t->a->softcap);
  if (!all_see_all(t, start))
    for (long row = 0; row < t->num_rows; row++) mask_scores(t, row, start);
}

/* Scores of a row become weights: exp(score - max), times the value's scale. Starts the row's partial result. */
static void weigh(tile *t, long row, long split_start) {
  float *scores = t->scores + row * SPLIT, *result = t->partial + row * result_floats(t->padded_dim);
  /* Of the split, in tokens from its start: what the row sees, and the groups that hold it. */
  long from = t->from[row] - split_start, to = t->to[row] - split_start;
  long first = max_long(0, from) / GROUP * GROUP, last = min_long(SPLIT, round_up(to, GROUP));
  if (first >= last) return;
  v16 largest = v_set1(-INFINITY), sum = v_zero();
  for (long i = first; i < last; i += GROUP) largest = v_max(v_load(scores + i), largest);
  float max = v_max_lane(largest);
  for (long i = first; i < last; i += GROUP) {
    v16 p = v_exp(v_sub(v_load(scores + i), v_set1(max)));
    if (from > i || to < i + GROUP) p = v_keep(p, from - i, to - i, v_zero());
    sum = v_add(sum, p);
    v_store(scores + i, t->a->kv->type == KV_INT8 ? v_mul(p, v_load(t->v_scales + i)) : p);
  }
  result[0] = max;
  result[1] = v_sum(sum);
  memset(result + LANES, 0, (size_t)t->padded_dim * sizeof(float));
}

/* What a row's values are added to. */
INLINE float *row_values(const tile *t, long row) { return t->partial + row * result_floats(t->padded_dim) + LANES; }

/* How values of a group are read: as floats from v_tile (type -1), or as they lie in the pool, which is cheaper where
 * few rows share them. */
typedef struct {
  const uint8_t **rows;
  int type; /* a constant */
} group_values;

INLINE v16 value_at(const tile *t, group_values from, long j, long d) {
  if (from.type < 0) return v_load(t->v_tile + j * t->padded_dim + d);
  return kv_load(from.type, from.rows[j] + d * kv_element_bytes(from.type), LANES);
}

/* values of num_rows rows += sum over tokens first..last-1 of the group of weight * value, token by token, for
 * num_vectors vectors from element d on; both numbers are constants. */
INLINE void add_values(tile *t, int num_rows, int num_vectors, group_values from, long row, long d, long start,
                       long first, long last) {
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
    for (int i = 0; i < num_vectors; i++) values[i] = value_at(t, from, j, d + LANES * i);
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
INLINE void add_all_values(tile *t, int num_rows, group_values from, long row, long start, long first, long last) {
  long d = 0;
  for (; d + SHARED_VECTORS * LANES <= t->padded_dim; d += SHARED_VECTORS * LANES)
    add_values(t, num_rows, SHARED_VECTORS, from, row, d, start, first, last);
  for (; d < t->padded_dim; d += LANES) add_values(t, num_rows, 1, from, row, d, start, first, last);
}

/* Rows that see the whole group share the loads of its values. */
INLINE void mix_values(tile *t, group_values from, long start) {
  if (all_see_all(t, start)) {
    for (long row = 0; row < t->num_rows; row += SHARED_ROWS)
      FOR_NUM_ROWS(min_long(SHARED_ROWS, t->num_rows - row), add_all_values, from, row, start, 0, GROUP)
    return;
  }
  for (long row = 0; row < t->num_rows; row++) {
    long first, last;
    seen_tokens(t, row, start, &first, &last);
    if (first < last) add_all_values(t, 1, from, row, start, first, last);
  }
}

static void mix_group(tile *t, const uint8_t *rows[GROUP], long start, long count) {
  if (t->num_rows > SHARED_ROWS || t->a->heads.head_dim != t->padded_dim) {
    load_value_group(t, rows, count);
    mix_values(t, (group_values){NULL, -1}, start);
    return;
  }
  switch (t->a->kv->type) {
    case KV_INT8: mix_values(t, (group_values){rows, KV_INT8}, start); break;
    case KV_FP16: mix_values(t, (group_values){rows, KV_FP16}, start); break;
    case KV_BF16: mix_values(t, (group_values){rows, KV_BF16}, start); break;
    default: mix_values(t, (group_values){rows, KV_FP32}, start);
  }
}

#define AHEAD (2 * GROUP) /* tokens between those at work and those whose keys are asked for */

void attend_split(tile *t, long split_start, long seen, long end) {
  const uint8_t *values[SPLIT];
  long first = max_long(split_start, seen), last = min_long(split_start + SPLIT, end);
  for (long start = first; start < last; start += GROUP) {
    long count = min_long(GROUP, last - start), at = start - split_start;
    prefetch_group(t, start + AHEAD, end);
    load_key_group(t, start, count);
    score_group(t, start);
    locate_values(t, start, count, values + at, t->v_scales + at);
  }
  for (long row = 0; row < t->num_rows; row++) weigh(t, row, split_start);
  for (long start = first; start < last; start += GROUP)
    mix_group(t, values + start - split_start, start, min_long(GROUP, last - start));
}
