/* One panel of 16 outputs times some rows. For an output n and a row, with K in blocks of 32 and in this order:
 *   INT8 rows:  acc = fma(scale[n] * row.scale, (float)sum(code * q), acc), then acc = fma(offset[n], row.sum, acc),
 *               for each block, or for each half of it where scales cover 16;
 *   float rows: acc += sum over the block of (code * scale[n] + offset[n]) * x, each term one fma onto the last.
 * Whatever the number of rows, so a row's result does not depend on its neighbours. */
#ifndef QD_MATMUL_H
#define QD_MATMUL_H

#include "abi.h"
#include "rows.h"

/* Bytes of scratch that the two below need. */
#define MATMUL_SCRATCH (32 * 1024)
/* Rows that one call may have. */
#define MATMUL_ROWS 128

/* out: [num_rows][16], rows first .. first + num_rows - 1. */
void matmul_int8(const qd_weight *w, long panel, const qd_rows *rows, long first, long num_rows, float *out,
                 uint8_t *scratch);
void matmul_float(const qd_weight *w, long panel, const qd_rows *rows, long first, long num_rows, float *out,
                  uint8_t *scratch);

#endif
