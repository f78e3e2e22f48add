/* The state of attention for a few rows of one request, and what is done with it. */
#ifndef QD_ATTENTION_TILE_H
#define QD_ATTENTION_TILE_H

#include "abi.h"
#include "simd.h"

#define SPLIT 256
#define GROUP LANES

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

INLINE long row_token(const tile *t, long row) { return row / t->shared; }
INLINE long row_position(const tile *t, long row) { return t->positions[row_token(t, row)]; }
INLINE long first_seen(const tile *t, long position) {
  return t->a->window > 0 ? max_long(0, position - t->a->window + 1) : 0;
}

/* Where a row's scores of the group at `start` lie. */
INLINE float *group_scores(const tile *t, long row, long start) { return t->scores + row * SPLIT + start % SPLIT; }

/* Tokens first..last-1 of the group at `start` that a row sees. */
INLINE void seen_tokens(const tile *t, long row, long start, long *first, long *last) {
  long position = row_position(t, row);
  *first = max_long(0, first_seen(t, position) - start);
  *last = min_long(GROUP, position + 1 - start);
}

/* Queries of all rows, as floats or rounded to INT8. */
void load_queries(tile *t);
/* Keys of tokens start .. start + count - 1 (count <= 16) and their scales, into k_tile. */
void load_key_group(tile *t, long start, long count);
/* Where values of those tokens lie, and their scales. */
void locate_values(const tile *t, long start, long count, const uint8_t *rows[GROUP], float *scales);
/* Values at rows, into v_tile. */
void load_value_group(tile *t, const uint8_t *rows[GROUP], long count);
/* partial = every row over one split. Tokens from `seen` (a group's start) to `end` are of interest to some row. */
void attend_split(tile *t, long split_start, long seen, long end);

#endif
