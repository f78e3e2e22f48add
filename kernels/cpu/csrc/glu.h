/* Gated activation of a stretch of one row. */
#ifndef QD_GLU_H
#define QD_GLU_H

#include "abi.h"
#include "vmath.h"

/* Elements first..last-1 of row m. */
INLINE void glu_row(const qd_glu_args *a, long m, long first, long last) {
  const float *gate = a->gate_up + 2 * m * a->width, *up = gate + a->width;
  float *out = a->out + m * a->width;
  for (long i = first; i < last; i += LANES) {
    v16 g = v_load_n(gate + i, last - i);
    g = a->activation ? v_gelu_tanh(g) : v_silu(g);
    v_store_n(out + i, v_mul(g, v_load_n(up + i, last - i)), last - i);
  }
}

#endif
