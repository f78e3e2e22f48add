/* rms_norm and add_rms_norm: one chunk is a few rows. */
#include "norm.h"
#include "pool.h"

#define ROWS_PER_CHUNK 4

static long num_chunks(const void *args, const qd_step *step, int phase, int num_threads) {
  (void)args, (void)phase, (void)num_threads;
  return ceil_div(step->num_tokens, ROWS_PER_CHUNK);
}

static void chunk(const void *args, const qd_step *step, int phase, long index, qd_thread *thread) {
  const qd_norm_args *a = args;
  long last = min_long(step->num_tokens, (index + 1) * ROWS_PER_CHUNK);
  (void)phase, (void)thread;
  for (long m = index * ROWS_PER_CHUNK; m < last; m++)
    norm_row(a, m, a->out + m * a->width, a->residual ? a->sum + m * a->width : NULL);
}

const qd_kernel norm_kernel = {.num_phases = 1, .num_chunks = num_chunks, .chunk = chunk};
