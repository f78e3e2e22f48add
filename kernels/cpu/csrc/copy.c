/* One part of a concatenation: a chunk is a row. */
#include "pool.h"

static long num_chunks(const void *args, const qd_step *step, int phase, int num_threads) {
  (void)args, (void)phase, (void)num_threads;
  return step->num_tokens;
}

static void chunk(const void *args, const qd_step *step, int phase, long index, qd_thread *thread) {
  const qd_copy_args *a = args;
  (void)step, (void)phase, (void)thread;
  memcpy(a->out + index * a->out_width + a->column, a->x + index * a->width, (size_t)a->width * sizeof(float));
}

const qd_kernel copy_kernel = {.num_phases = 1, .num_chunks = num_chunks, .chunk = chunk};
