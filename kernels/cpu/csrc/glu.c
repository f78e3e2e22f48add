/* The gated activation as an op of its own: a chunk is a stretch of one row. */
#include "glu.h"
#include "pool.h"

#define WIDTH_PER_CHUNK 1024

static long num_chunks(const void *args, const qd_step *step, int phase, int num_threads) {
  const qd_glu_args *a = args;
  (void)phase, (void)num_threads;
  return step->num_tokens * ceil_div(a->width, WIDTH_PER_CHUNK);
}

static void chunk(const void *args, const qd_step *step, int phase, long index, qd_thread *thread) {
  const qd_glu_args *a = args;
  long parts = ceil_div(a->width, WIDTH_PER_CHUNK), m = index / parts, first = index % parts * WIDTH_PER_CHUNK;
  long last = min_long(a->width, first + WIDTH_PER_CHUNK);
  const float *gate = a->gate_up + 2 * m * a->width, *up = gate + a->width;
  (void)step, (void)phase, (void)thread;
  for (long i = first; i < last; i += LANES)
    v_store_n(a->out + m * a->width + i, glu(a, v_load_n(gate + i, last - i), v_load_n(up + i, last - i)), last - i);
}

const qd_kernel glu_kernel = {.num_phases = 1, .num_chunks = num_chunks, .chunk = chunk};
