/* Gated activation. */
#ifndef QD_GLU_H
#define QD_GLU_H

#include "abi.h"
#include "vmath.h"

INLINE v16 glu(const qd_glu_args *a, v16 gate, v16 up) {
  return v_mul(a->activation ? v_gelu_tanh(gate) : v_silu(gate), up);
}

#endif
