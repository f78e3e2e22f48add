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
  long head, first_token, shared, num_rows, padded_dim;
  long all_from, all_to; /* tokens that every row sees */
  /* Per row: tokens from .. to - 1 that it sees; its query as floats, or codes with scale and sum; scores; a split's
   * result; the merged result. */
  int32_t *from, *to, *q_sum;
  float *queries, *q_scale, *scores, *partial, *merged;
  int8_t *q_codes;
  uint8_t *k_tile;
  float *v_tile, *k_scales, *v_scales;
} tile;

/* A result: max, sum, then padded_dim of values, not yet divided by the sum. */
INLINE long result_floats(long padded_dim) { return padded_dim + LANES; }

/* The first token that the one at `position` sees. */
INLINE long first_seen(const qd_attention_args *a, long position) {
  return a->window > 0 ? max_long(0, position - a->window + 1) : 0;
}

/* Where a row's scores of the group at `start` lie. */
INLINE float *group_scores(const tile *t, long row, long start) { return t->scores + row * SPLIT + start % SPLIT; }

/* Tokens first..last-1 of the group at `start` that a row sees. */
INLINE void seen_tokens(const tile *t, long row, long start, long *first, long *last) {
  *first = max_long(0, t->from[row] - start);
  *last = min_long(GROUP, t->to[row] - start);
}

/* Whether every row sees the whole group at `start`. */
INLINE int all_see_all(const tile *t, long start) { return start >= t->all_from && start + GROUP <= t->all_to; }

/* Ask the caches for keys and values of the group at `start`, if that is before `end`. Blocks lie wherever there was
 * room, where no hardware prefetcher finds the next one. */
void prefetch_group(const tile *t, long start, long end);
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
