/* The inputs of a linear as kernels read them: rows rounded to INT8 per 32 inputs, or plain float rows. */
#ifndef QD_ROWS_H
#define QD_ROWS_H

#include "simd.h"

#define BLOCK 32

/* blocks: of 32 inputs, the last padded with zeros. INT8 rows: x = q * scale[block]; sum = scale * (sum of q in the
 * block), half_sum the same for each 16. Float rows use only x. One row follows the other in each array. */
typedef struct {
  long blocks;
  int8_t *q;
  float *scale, *sum, *half_sum, *x;
} qd_rows;

INLINE long rows_bytes(long num_rows, long blocks, int int8) {
  return round_up(num_rows * blocks * (int8 ? BLOCK + 4 * 4 : BLOCK * 4), 64);
}

INLINE qd_rows rows_at(uint8_t *memory, long num_rows, long blocks, int int8) {
  qd_rows r = {.blocks = blocks};
  if (!int8) {
    r.x = (float *)memory;
    return r;
  }
  r.q = (int8_t *)memory;
  r.scale = (float *)(memory + num_rows * blocks * BLOCK);
  r.sum = r.scale + num_rows * blocks;
  r.half_sum = r.sum + num_rows * blocks;
  return r;
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
INLINE void quantize_block(const float *x, int8_t *q, float *scale, float *sum, float *half_sum) {
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
  v_store_i8(q, a);
  v_store_i8(q + LANES, b);
  float sum_a = v_sum(a), sum_b = v_sum(b);
  *scale = s;
  *sum = s * (sum_a + sum_b);
  half_sum[0] = s * sum_a;
  half_sum[1] = s * sum_b;
}

/* Row m of rows from x, BLOCK * rows->blocks floats. */
INLINE void rows_quantize(const qd_rows *rows, long m, const float *x) {
  long first = m * rows->blocks;
  for (long i = 0; i < rows->blocks; i++) {
    long b = first + i;
    quantize_block(x + BLOCK * i, rows->q + BLOCK * b, rows->scale + b, rows->sum + b, rows->half_sum + 2 * b);
  }
}

#endif
