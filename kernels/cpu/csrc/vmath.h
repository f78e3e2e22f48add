/* exp, tanh and the activations on sixteen lanes: within 2 ulp of the true value, the same bits on every path. */
#ifndef QD_VMATH_H
#define QD_VMATH_H

#include "simd.h"

/* x = n ln 2 + r with |r| <= ln 2 / 2; gives 2^n and exp(r) - 1. NaN passes through; x is held in -87..88. */
INLINE v16 exp_parts(v16 x, v16 *power) {
  static const float taylor[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f};
  x = v_min(v_set1(88.0f), v_max(v_set1(-87.0f), x));
  v16 n = v_round(v_mul(x, v_set1(1.44269504f)));
  v16 r = v_fma(n, v_set1(-0.693359375f), x); /* ln 2 in two parts, the first exact in few bits */
  r = v_fma(n, v_set1(2.12194440e-4f), r);
  v16 p = v_set1(taylor[0]);
  for (int i = 1; i < 6; i++) p = v_fma(p, r, v_set1(taylor[i]));
  *power = v_pow2(n);
  return v_fma(v_mul(r, r), p, r);
}

INLINE v16 v_exp(v16 x) {
  v16 power, p = exp_parts(x, &power);
  return v_fma(power, p, power);
}

INLINE v16 v_tanh(v16 x) {
  v16 power, p = exp_parts(v_add(x, x), &power);
  v16 e = v_fma(power, p, v_sub(power, v_set1(1.0f))); /* exp(2x) - 1 without cancellation near 0 */
  return v_div(e, v_add(e, v_set1(2.0f)));
}

/* x / (1 + exp(-u)) */
INLINE v16 v_times_sigmoid(v16 x, v16 u) {
  return v_div(x, v_add(v_set1(1.0f), v_exp(v_sub(v_zero(), u))));
}

INLINE v16 v_silu(v16 x) { return v_times_sigmoid(x, x); }

/* x/2 (1 + tanh(t)) = x sigmoid(2t), t = sqrt(2 / pi) (x + 0.044715 x^3) */
INLINE v16 v_gelu_tanh(v16 x) {
  v16 t = v_mul(v_mul(x, v_set1(1.59576912f)), v_fma(v_mul(x, x), v_set1(0.044715f), v_set1(1.0f)));
  return v_times_sigmoid(x, t);
}

#endif
