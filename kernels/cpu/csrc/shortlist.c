/* What a token is drawn from: of a row of logits the largest, the weights exp((x - largest) / temperature), their sum,
 * and the few that are not below a floor. A chunk is a row. */
#include <float.h>

#include "pool.h"
#include "vmath.h"

#define SEGMENT 512
#define BINS 512
#define BINS_PER_UNIT 16 /* of (largest - x) / temperature */

/* Copies n elements, `other` in the place of those whose bit is 0; out may be x. */
static void hold(const float *x, const uint32_t *mask, long n, float other, float *out) {
  for (long i = 0; i < n; i += 32) {
    uint32_t word = mask[i / 32];
    long end = min_long(32, n - i);
    for (long j = 0; j < end; j++) out[i + j] = (word >> j & 1) ? x[i + j] : other;
  }
}

/* The largest of n elements; NaN or infinite ones make *bad NaN. */
static float largest_of(const float *x, long n, v16 *bad) {
  v16 largest = v_set1(-INFINITY), nothing = v_zero();
  long i = 0;
  for (; i + LANES <= n; i += LANES) {
    v16 v = v_load(x + i);
    largest = v_max(v, largest);
    nothing = v_fma(v, v_zero(), nothing);
  }
  float best = v_max_lane(largest);
  nothing = v_fma(v_load_n(x + i, n - i), v_zero(), nothing);
  *bad = v_add(*bad, nothing);
  for (; i < n; i++) best = x[i] > best ? x[i] : best;
  return best;
}

/* Writes weights of n tokens from `first` on and returns their sum. */
static double weigh(const qd_shortlist *list, const float *logits, long first, long n, float *weights) {
  v16 sum = v_zero(), temperature = v_set1(list->temperature), largest = v_set1(list->largest);
  for (long i = 0; i < n; i += LANES) {
    v16 x = v_sub(v_load_n(logits + first + i, n - i), largest);
    v16 w = v_keep(v_exp(v_div(x, temperature)), 0, n - i, v_zero());
    sum = v_add(sum, w);
    v_store(weights + first + i, w);
  }
  return (double)v_sum(sum);
}

/* A floor that leaves at least `count` weights, and few more. */
static float floor_of_top(const qd_shortlist *list, const float *logits, long n) {
  long bins[BINS] = {0}, bin = 0, kept = 0;
  float floor[LANES];
  for (long i = 0; i < n; i++) {
    float below = (list->largest - logits[i]) / list->temperature * BINS_PER_UNIT;
    if (below < BINS) bins[(long)below]++;
  }
  while (bin < BINS && kept < list->top_k) kept += bins[bin++];
  if (kept < list->top_k) return 0.0f;
  /* A bin more, for rounding. */
  v_store(floor, v_exp(v_set1((float)-(bin + 1) / BINS_PER_UNIT)));
  return floor[0];
}

static float floor_of(const qd_shortlist *list, const float *logits, long n) {
  if (list->top_k > 0) return floor_of_top(list, logits, n);
  float tail = (float)(list->tail * list->total / (double)n);
  return tail > list->min_weight ? tail : list->min_weight;
}

/* Writes the ids and weights that are not below floor; returns how many, or -1 for too many. */
static int32_t collect(const float *weights, long n, float floor, long capacity, qd_shortlist *list) {
  long count = 0;
  for (long i = 0; i < n; i += LANES) {
    long end = min_long(n, i + LANES);
    if (end - i == LANES && v_max_lane(v_load(weights + i)) < floor) continue;
    for (; i < end; i++) {
      if (weights[i] < floor) continue;
      if (count == capacity) return -1;
      list->ids[count] = (int32_t)i;
      list->weights[count++] = weights[i];
    }
    i = end - LANES;
  }
  return (int32_t)count;
}

static void find_best(qd_shortlist *list, const float *x, long n) {
  long best = 0;
  v16 bad = v_zero();
  list->largest = -INFINITY;
  for (long i = 0; i < n; i += SEGMENT) {
    float here = largest_of(x + i, min_long(SEGMENT, n - i), &bad);
    if (here > list->largest) list->largest = here, best = i;
  }
  while (best < n - 1 && x[best] != list->largest) best++;
  list->best = (int32_t)best;
  list->finite = v_sum(bad) == 0.0f;
}

static void chunk(const void *args, const qd_step *step, int phase, long index, qd_thread *thread) {
  const qd_shortlist_args *a = args;
  qd_shortlist *list = a->lists + index;
  long n = a->vocab_size;
  float *weights = (float *)(void *)thread->scratch, *held = weights + round_up(n, LANES), floor;
  const float *logits = list->logits;
  (void)step, (void)phase;
  find_best(list, logits, n);
  list->count = -1;
  if (!list->finite) return;
  if (list->mask) {
    hold(logits, list->mask, n, -INFINITY, held);
    find_best(list, logits = held, n);
    list->finite = 1;
  }
  if (list->temperature <= 0.0f || list->largest == -INFINITY) return;
  list->total = 0.0;
  for (long i = 0; i < n; i += SEGMENT) list->total += weigh(list, logits, i, min_long(SEGMENT, n - i), weights);
  floor = floor_of(list, logits, n);
  if (list->mask) {
    /* No logit is so small that its weight would be less than FLT_MIN. */
    hold(weights, list->mask, n, 0.0f, weights);
    floor = floor > FLT_MIN ? floor : FLT_MIN;
  }
  list->count = collect(weights, n, floor, a->capacity, list);
}

static long scratch_bytes(const void *args, const qd_step *step) {
  (void)step;
  return 2 * round_up(((const qd_shortlist_args *)args)->vocab_size, LANES) * (long)sizeof(float);
}

static long num_chunks(const void *args, const qd_step *step, int phase, int num_threads) {
  (void)step, (void)phase, (void)num_threads;
  return ((const qd_shortlist_args *)args)->num_lists;
}

const qd_kernel shortlist_kernel = {
    .num_phases = 1, .scratch_bytes = scratch_bytes, .num_chunks = num_chunks, .chunk = chunk};
