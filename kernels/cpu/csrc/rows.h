/* The inputs of a linear as kernels read them: rows rounded to INT8 or INT16 per 32 inputs, or plain float rows. */
#ifndef QD_ROWS_H
#define QD_ROWS_H

#include "weights.h"

/* blocks: of 32 inputs, the last padded with zeros. Float rows lie one after the other in x. Rounded rows lie in groups
 * of `tile` rows (1, or TILE_ROWS where there are several), block by block, so that a kernel has all of a group at small
 * constant offsets: [tile][32] codes, then [tile] each of scale, sum, sum of the first 16, sum of the others, with
 * x = code * scale and sums of x. Codes of `fine` rows are INT16, see paired_dot_add for their order. */
typedef struct {
  long blocks, tile;
  int fine;
  uint8_t *data;
  float *x;
} qd_rows;

/* q: the codes, INT8 or INT16. */
typedef struct {
  void *q;
  float *scale, *sum, *half_sum[2];
} qd_row_block;

/* Bytes of a block of one row: its codes, then four floats. */
INLINE long row_block_bytes(int fine) { return BLOCK * (fine ? 2 : 1) + 4 * 4; }

INLINE long rows_bytes(long num_rows, long blocks, int rounded, int fine) {
  if (!rounded) return num_rows * blocks * BLOCK * (long)sizeof(float);
  return (num_rows == 1 ? 1 : round_up(num_rows, TILE_ROWS)) * blocks * row_block_bytes(fine);
}

INLINE qd_rows rows_at(uint8_t *memory, long num_rows, long blocks, int fine) {
  return (qd_rows){blocks, num_rows == 1 ? 1 : TILE_ROWS, fine, memory, (float *)(void *)memory};
}

/* Block b of a row; tile and fine are those of rows, where possible as constants. */
INLINE qd_row_block row_block(const qd_rows *rows, long tile, int fine, long row, long b) {
  long i = row % tile, code_bytes = BLOCK * (fine ? 2 : 1);
  uint8_t *group = rows->data + (row / tile * rows->blocks + b) * tile * row_block_bytes(fine);
  float *floats = (float *)(void *)(group + tile * code_bytes) + i;
  return (qd_row_block){group + code_bytes * i, floats, floats + tile, {floats + 2 * tile, floats + 3 * tile}};
}

/* Scale of a vector whose largest |x| is absmax and shall have the code `largest`, and 1 / scale; both 0 where it is
 * (nearly) all zero. */
INLINE float code_scale(float absmax, float largest, float *inverse) {
  if (absmax < 1e-30f) {
    *inverse = 0.0f;
    return 0.0f;
  }
  *inverse = largest / absmax;
  return absmax / largest;
}

/* Codes of a block (whole numbers) and their scale s. */
INLINE void block_store(qd_row_block to, int fine, v16 a, v16 b, float s) {
  if (fine) {
    v_store_i16_paired((int16_t *)to.q, a);
    v_store_i16_paired((int16_t *)to.q + LANES, b);
  } else {
    v_store_i8((int8_t *)to.q, a);
    v_store_i8((int8_t *)to.q + LANES, b);
  }
  float sum_a = v_sum(a), sum_b = v_sum(b);
  *to.scale = s;
  *to.sum = s * (sum_a + sum_b);
  *to.half_sum[0] = s * sum_a;
  *to.half_sum[1] = s * sum_b;
}

/* bad: 0, or NaN where x holds a NaN or an infinity; then the scale is NaN and all codes 0, so that results are NaN. */
INLINE void quantize_block(const float *x, int fine, qd_row_block to) {
  v16 a = v_load(x), b = v_load(x + LANES), zero = v_zero();
  float bad = v_sum(v_fma(b, zero, v_mul(a, zero))), inverse;
  float s = code_scale(v_max_lane(v_max(v_abs(a), v_abs(b))), fine ? 32767.0f : 127.0f, &inverse);
  if (!(bad == 0.0f)) {
    s = bad;
    a = b = zero;
    inverse = 0.0f;
  }
  block_store(to, fine, v_round(v_mul(a, v_set1(inverse))), v_round(v_mul(b, v_set1(inverse))), s);
}

/* Row m of rows from x, BLOCK * rows->blocks floats, each block with a scale of its own. */
INLINE void rows_quantize_blocks(const qd_rows *rows, long m, const float *x) {
  int fine = rows->fine;
  for (long b = 0; b < rows->blocks; b++) quantize_block(x + BLOCK * b, fine, row_block(rows, rows->tile, fine, m, b));
}

/* x / scale as a code, -128..127. */
INLINE v16 whole_code(v16 x, v16 scale) {
  return v_max(v_set1(-128.0f), v_min(v_set1(127.0f), v_round(v_div(x, scale))));
}

/* The same with one scale, absmax / 127.5: 255 steps over twice the absmax, the rule of compressed-tensors. */
INLINE void rows_quantize_whole(const qd_rows *rows, long m, const float *x) {
  v16 largest = v_zero(), bad = v_zero(), zero = v_zero();
  for (long k = 0; k < BLOCK * rows->blocks; k += LANES) {
    v16 v = v_load(x + k);
    largest = v_max(largest, v_abs(v));
    bad = v_fma(v, zero, bad);
  }
  float not_finite = v_sum(bad), s = v_max_lane(largest) / 127.5f;
  if (s < 1.1920929e-7f) s = 1.1920929e-7f;
  v16 scale = v_set1(s);
  if (!(not_finite == 0.0f)) {
    s = not_finite;
    scale = v_set1(1.0f);
  }
  for (long b = 0; b < rows->blocks; b++) {
    v16 first = s == s ? v_load(x + BLOCK * b) : zero, second = s == s ? v_load(x + BLOCK * b + LANES) : zero;
    block_store(row_block(rows, rows->tile, 0, m, b), 0, whole_code(first, scale), whole_code(second, scale), s);
  }
}

#endif
