/* The linear op: prepare the input rows (norm, permutation, rounding to INT8), multiply panels, finish the results.
 * One row is prepared by every thread for itself, which saves a barrier; more rows are prepared in chunks. */
#include "glu.h"
#include "matmul.h"
#include "norm.h"
#include "pool.h"
#include "vmath.h"
#include "weights.h"

#define ROWS_PER_CHUNK 4
#define CHUNKS_PER_THREAD 8
#define MAX_CHUNK_BYTES (96 * 1024)

/* A thread's scratch: tile, results of a panel and of one of a glu's other half, a float row, a norm's two outputs, and
 * its own prepared row. */
typedef struct {
  uint8_t *tile;
  float *out, *up, *row, *normed, *sum;
  qd_rows own;
} parts;

static int is_fine(const qd_linear_args *a) { return a->fine && a->weight->inputs == QD_INT8_BLOCKS; }

static long float_row_bytes(const qd_weight *w) { return weight_blocks(w) * BLOCK * (long)sizeof(float); }

static parts parts_of(const qd_linear_args *a, uint8_t *scratch) {
  long row = float_row_bytes(a->weight);
  parts p = {.tile = scratch, .out = (float *)(void *)(scratch + MATMUL_SCRATCH)};
  p.up = p.out + MATMUL_ROWS * LANES;
  p.row = p.up + MATMUL_ROWS * LANES;
  p.normed = p.row + row / 4;
  p.sum = p.normed + row / 4;
  p.own = rows_at((uint8_t *)p.sum + row, 1, weight_blocks(a->weight), is_fine(a));
  return p;
}

static long scratch_bytes(const void *args, const qd_step *step) {
  const qd_linear_args *a = args;
  const qd_weight *w = a->weight;
  (void)step;
  return MATMUL_SCRATCH + 2 * MATMUL_ROWS * LANES * 4 + 3 * float_row_bytes(w) +
         rows_bytes(1, weight_blocks(w), w->inputs, is_fine(a));
}

static long shared_bytes(const void *args, const qd_step *step, int num_threads) {
  const qd_linear_args *a = args;
  (void)num_threads;
  return rows_bytes(step->num_tokens, weight_blocks(a->weight), a->weight->inputs, is_fine(a));
}

static void quantize_row(const qd_weight *w, const float *x, const qd_rows *rows, long to) {
  if (w->inputs == QD_INT8_BLOCKS) rows_quantize_blocks(rows, to, x);
  if (w->inputs == QD_INT8_ROWS) rows_quantize_whole(rows, to, x);
}

/* Row `to` of rows from x: permuted, padded with zeros to whole blocks, rounded. */
static void prepare_row(const qd_weight *w, const float *x, const qd_rows *rows, long to, float *row) {
  float *target = w->inputs ? row : rows->x + to * rows->blocks * BLOCK;
  if (w->perm)
    for (long k = 0; k < w->k; k++) target[k] = x[w->perm[k]];
  else if (!w->inputs || w->k % BLOCK)
    memcpy(target, x, (size_t)w->k * sizeof(float));
  else
    target = (float *)x;
  for (long k = w->k; k < rows->blocks * BLOCK; k++) target[k] = 0.0f;
  quantize_row(w, target, rows, to);
}

static void enter(const void *args, const qd_step *step, qd_thread *thread) {
  const qd_linear_args *a = args;
  if (step->num_tokens != 1) return;
  parts p = parts_of(a, thread->scratch);
  const float *x = a->x;
  if (a->norm) {
    norm_row(a->norm, 0, p.normed, p.sum);
    x = p.normed;
  }
  prepare_row(a->weight, x, &p.own, 0, p.row);
}

/* What `enter` found as the norm of the only row, for other ops to read. */
static void keep_norm(const qd_norm_args *norm, const parts *p) {
  memcpy(norm->out, p->normed, (size_t)norm->width * sizeof(float));
  if (norm->residual) memcpy(norm->sum, p->sum, (size_t)norm->width * sizeof(float));
}

static void prepare_chunk(const qd_linear_args *a, const qd_step *step, long index, qd_thread *thread) {
  const qd_weight *w = a->weight;
  parts p = parts_of(a, thread->scratch);
  qd_rows rows = rows_at(thread->shared, step->num_tokens, weight_blocks(w), is_fine(a));
  long last = min_long(step->num_tokens, (index + 1) * ROWS_PER_CHUNK);
  for (long m = index * ROWS_PER_CHUNK; m < last; m++) {
    const float *x = a->x + m * w->k;
    if (a->norm) {
      float *out = a->norm->out + m * a->norm->width;
      norm_row(a->norm, m, out, a->norm->residual ? a->norm->sum + m * a->norm->width : NULL);
      x = out;
    }
    prepare_row(w, x, &rows, m, p.row);
  }
}

static void finish(const qd_linear_args *a, long panel, long num_rows, float *results) {
  const qd_weight *w = a->weight;
  if (!w->bias && a->scale == 1.0f && !(a->softcap > 0.0f)) return;
  v16 bias = w->bias ? v_load_n(w->bias + LANES * panel, w->n - LANES * panel) : v_zero(), scale = v_set1(a->scale);
  for (long r = 0; r < num_rows; r++) {
    v16 y = v_load(results + LANES * r);
    if (w->bias) y = v_add(y, bias);
    if (a->scale != 1.0f) y = v_mul(y, scale);
    if (a->softcap > 0.0f) y = v_mul(v_tanh(v_div(y, v_set1(a->softcap))), v_set1(a->softcap));
    v_store(results + LANES * r, y);
  }
}

static void multiply(const qd_linear_args *a, const qd_rows *rows, long first, long num_rows, long panel,
                     float *results, uint8_t *tile) {
  if (a->weight->inputs)
    matmul_int8(a->weight, panel, rows, first, num_rows, results, tile);
  else
    matmul_float(a->weight, panel, rows, first, num_rows, results, tile);
  finish(a, panel, num_rows, results);
}

/* A panel's results to where they belong. */
static void write(const qd_linear_args *a, long panel, long first, long num_rows, const float *results) {
  long n = a->weight->n;
  for (long r = 0; r < num_rows; r++)
    v_store_n(a->out + (first + r) * n + LANES * panel, v_load(results + LANES * r), n - LANES * panel);
}

static void write_gated(const qd_glu_args *a, long panel, long first, long num_rows, const float *gate,
                        const float *up) {
  for (long r = 0; r < num_rows; r++)
    v_store(a->out + (first + r) * a->width + LANES * panel, glu(a, v_load(gate + LANES * r), v_load(up + LANES * r)));
}

/* One panel, or with a glu one of the gate and that of up. */
static void multiply_panel(const qd_linear_args *a, const qd_rows *rows, long first, long num_rows, long panel,
                           const parts *p) {
  multiply(a, rows, first, num_rows, panel, p->out, p->tile);
  if (!a->glu) {
    write(a, panel, first, num_rows, p->out);
    return;
  }
  multiply(a, rows, first, num_rows, weight_panels(a->weight) / 2 + panel, p->up, p->tile);
  write_gated(a->glu, panel, first, num_rows, p->out, p->up);
}

/* Panels that are divided into chunks: with a glu, those of the gate; the same of up go with them. */
static long divided_panels(const qd_linear_args *a) {
  long panels = weight_panels(a->weight);
  return a->glu ? panels / 2 : panels;
}

static long panels_per_chunk(const qd_linear_args *a, int num_threads) {
  long panels = divided_panels(a), bytes = weight_blocks(a->weight) * block_bytes(a->weight->bits);
  long fair = panels / (CHUNKS_PER_THREAD * num_threads), limit = MAX_CHUNK_BYTES / bytes;
  return max_long(1, min_long(fair, limit));
}

static void multiply_chunk(const qd_linear_args *a, const qd_step *step, long index, qd_thread *thread) {
  long panels = divided_panels(a), per_chunk = panels_per_chunk(a, thread->num_threads);
  long panel_chunks = ceil_div(panels, per_chunk), first = index / panel_chunks * MATMUL_ROWS;
  long panel = index % panel_chunks * per_chunk, last = min_long(panels, panel + per_chunk);
  long all_rows = step->num_tokens, num_rows = min_long(MATMUL_ROWS, all_rows - first);
  parts p = parts_of(a, thread->scratch);
  qd_rows rows = p.own;
  if (all_rows > 1) rows = rows_at(thread->shared, all_rows, weight_blocks(a->weight), is_fine(a));
  if (a->norm && all_rows == 1 && index == 0) keep_norm(a->norm, &p);
  for (; panel < last; panel++) multiply_panel(a, &rows, first, num_rows, panel, &p);
}

static long num_chunks(const void *args, const qd_step *step, int phase, int num_threads) {
  const qd_linear_args *a = args;
  if (phase == 0) return step->num_tokens == 1 ? 0 : ceil_div(step->num_tokens, ROWS_PER_CHUNK);
  return ceil_div(divided_panels(a), panels_per_chunk(a, num_threads)) * ceil_div(step->num_tokens, MATMUL_ROWS);
}

static void chunk(const void *args, const qd_step *step, int phase, long index, qd_thread *thread) {
  if (phase == 0)
    prepare_chunk(args, step, index, thread);
  else
    multiply_chunk(args, step, index, thread);
}

const qd_kernel linear_kernel = {
    .num_phases = 2,
    .shared_bytes = shared_bytes,
    .scratch_bytes = scratch_bytes,
    .num_chunks = num_chunks,
    .enter = enter,
    .chunk = chunk,
};
