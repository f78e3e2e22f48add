/* Paged causal attention, for decode and prefill rows alike.
 *
 * A row is one query head of one token. Its keys are visited in splits of 256 tokens counted from position 0, and in
 * groups of 16 within a split: scores of a group fill the 16 lanes, exponentials are summed lane by lane over the
 * groups, values are added token by token. Splits are merged in order. So a row's arithmetic depends on its own
 * position and keys alone, while any number of rows may share the work of loading a group.
 *
 * Splits run one after the other inside a chunk, or, where there are too few chunks for the threads, as chunks of
 * their own whose results a second phase merges the same way. */
#include "attention_tile.h"
#include "kv.h"
#include "pool.h"
#include "vmath.h"

#define MAX_TILE_ROWS 32

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
  t->from = (int32_t *)(void *)take(&memory, rows * 4);
  t->to = (int32_t *)(void *)take(&memory, rows * 4);
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
  t->num_rows = min_long(tokens, step->query_start[r + 1] - t->first_token) * t->shared;
  for (long row = 0; row < t->num_rows; row++) {
    long position = step->positions[t->first_token + row / t->shared];
    t->from[row] = (int32_t)first_seen(a, position);
    t->to[row] = (int32_t)position + 1;
  }
  t->all_from = t->from[t->num_rows - 1];
  t->all_to = t->to[0];
  t->table = step->block_tables + r * step->max_blocks;
}

static float *shared_result(const tile *t, uint8_t *shared, long splits, long row, long split) {
  long head = t->head * t->shared + row % t->shared, token = t->first_token + row / t->shared;
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
    long first = t->from[row] / SPLIT, last = (t->to[row] - 1) / SPLIT, at = row * result_floats(t->padded_dim);
    if (split >= first && split <= last)
      merge(t->merged + at, t->partial + at, split == first, t->padded_dim);
  }
}

static void attend(const qd_attention_args *a, const qd_step *step, long index, qd_thread *thread) {
  tile t;
  long splits = parallel_splits(a, step, thread->num_threads);
  memset(&t, 0, sizeof t);
  lay_out(&t, a, thread->scratch);
  find_tile(&t, step, index / splits);
  long seen = t.from[0] / GROUP * GROUP, end = t.to[t.num_rows - 1];
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
    write_row(a, t.first_token + row / t.shared, t.head * t.shared + row % t.shared,
              t.merged + row * result_floats(t.padded_dim));
}

/* All heads of token m: its splits in order, and the result. */
static void merge_token(const qd_attention_args *a, const qd_step *step, long m, qd_thread *thread) {
  long splits = parallel_splits(a, step, thread->num_threads), dim = padded_dim(a), position = step->positions[m];
  long first = first_seen(a, position) / SPLIT;
  float *merged = (float *)(void *)thread->scratch;
  for (long head = 0; head < a->heads.num_heads; head++) {
    const float *partials = (float *)(void *)thread->shared;
    partials += (m * a->heads.num_heads + head) * splits * result_floats(dim);
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
