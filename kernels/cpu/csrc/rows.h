/* The inputs of a linear as kernels read them: rows rounded to INT8 per 32 inputs, or plain float rows. */
#ifndef QD_ROWS_H
#define QD_ROWS_H

#include "simd.h"

#define BLOCK 32

#define ROW_BLOCK_BYTES (BLOCK + 4 * 4)

/* blocks: of 32 inputs, the last padded with zeros. Float rows lie one after the other in x. INT8 rows lie in groups of
 * `tile` rows (1, or TILE_ROWS where there are several), block by block, so that a kernel has all of a group at small
 * constant offsets: [tile][32] codes, then [tile] each of scale, sum, sum of the first 16, sum of the others, with
 * x = code * scale and sums of x. */
typedef struct {
  long blocks, tile;
  uint8_t *data;
  float *x;
} qd_rows;

typedef struct {
  int8_t *q;
  float *scale, *sum, *half_sum[2];
} qd_row_block;

INLINE long rows_bytes(long num_rows, long blocks, int int8) {
  if (!int8) return num_rows * blocks * BLOCK * (long)sizeof(float);
  return (num_rows == 1 ? 1 : round_up(num_rows, TILE_ROWS)) * blocks * ROW_BLOCK_BYTES;
}

INLINE qd_rows rows_at(uint8_t *memory, long num_rows, long blocks) {
  return (qd_rows){blocks, num_rows == 1 ? 1 : TILE_ROWS, memory, (float *)(void *)memory};
}

/* Block b of a row; tile is rows->tile, where possible as a constant. */
INLINE qd_row_block row_block(const qd_rows *rows, long tile, long row, long b) {
  long i = row % tile;
  uint8_t *group = rows->data + (row / tile * rows->blocks + b) * tile * ROW_BLOCK_BYTES;
  float *floats = (float *)(void *)(group + tile * BLOCK) + i;
  return (qd_row_block){(int8_t *)group + BLOCK * i, floats, floats + tile, {floats + 2 * tile, floats + 3 * tile}};
}

/* Scale of a vector whose largest |x| is absmax, and 1 / scale; both 0 where it is (nearly) all zero. */
INLINE float int8_scale(float absmax, float *inverse) {
  if (absmax < 1e-30f) {
    *inverse = 0.0f;
    return 0.0f;
  }
  *inverse = 127.0f / absmax;
  return absmax / 127.0f;
}

/* bad: 0, or NaN where x holds a NaN or an infinity; then the scale is NaN and all codes 0, so that results are NaN. */
INLINE void quantize_block(const float *x, qd_row_block to) {
  v16 a = v_load(x), b = v_load(x + LANES), zero = v_zero();
  float bad = v_sum(v_fma(b, zero, v_mul(a, zero))), inverse;
  float s = int8_scale(v_max_lane(v_max(v_abs(a), v_abs(b))), &inverse);
  if (!(bad == 0.0f)) {
    s = bad;
    a = b = zero;
    inverse = 0.0f;
  }
  a = v_round(v_mul(a, v_set1(inverse)));
  b = v_round(v_mul(b, v_set1(inverse)));
  v_store_i8(to.q, a);
  v_store_i8(to.q + LANES, b);
  float sum_a = v_sum(a), sum_b = v_sum(b);
  *to.scale = s;
  *to.sum = s * (sum_a + sum_b);
  *to.half_sum[0] = s * sum_a;
  *to.half_sum[1] = s * sum_b;
}

/* Row m of rows from x, BLOCK * rows->blocks floats. */
INLINE void rows_quantize(const qd_rows *rows, long m, const float *x) {
  for (long b = 0; b < rows->blocks; b++) quantize_block(x + BLOCK * b, row_block(rows, rows->tile, m, b));
}

#endif
