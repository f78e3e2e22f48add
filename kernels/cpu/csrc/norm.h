/* RMSNorm of one row. */
#ifndef QD_NORM_H
#define QD_NORM_H

#include "abi.h"
#include "simd.h"

/* out = x / sqrt(mean(x^2) + eps) * weight; lane i sums the squares of elements i, i + 16, ... in order. */
INLINE void rms_norm_row(const float *x, const float *weight, float *out, long width, float eps) {
  v16 squares = v_zero();
  for (long i = 0; i < width; i += LANES) {
    v16 v = v_load_n(x + i, width - i);
    squares = v_fma(v, v, squares);
  }
  v16 factor = v_set1(1.0f / sqrtf(v_sum(squares) / (float)width + eps));
  for (long i = 0; i < width; i += LANES) {
    v16 v = v_mul(v_load_n(x + i, width - i), factor);
    v_store_n(out + i, v_mul(v, v_load_n(weight + i, width - i)), width - i);
  }
}

/* The residual sum and its norm, of row m; sum is written only where there is a residual. */
INLINE void norm_row(const qd_norm_args *a, long m, float *out, float *sum) {
  const float *x = a->x + m * a->width;
  if (a->residual) {
    const float *residual = a->residual + m * a->width;
    v16 scale = v_set1(a->scale);
    for (long i = 0; i < a->width; i += LANES) {
      v16 v = v_mul(v_load_n(x + i, a->width - i), scale);
      v_store_n(sum + i, v_add(v_load_n(residual + i, a->width - i), v), a->width - i);
    }
    x = sum;
  }
  rms_norm_row(x, a->weight, out, a->width, a->eps);
}

#endif
