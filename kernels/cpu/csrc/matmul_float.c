/* Codes or floats times float rows: a tile is turned into fp32 [inputs][16] once, then every row runs over it. */
#include "matmul.h"
#include "weights.h"

#define TILE_BLOCKS (MATMUL_SCRATCH / (BLOCK * LANES * 4))

INLINE void tile_floats(const qd_weight *w, int bits, long panel, long block, float *tile) {
  const uint8_t *from = weight_block(w, bits, panel, block);
  for (int k = 0; k < BLOCK; k++) v_store(tile + LANES * k, float_load(bits, from + block_bytes(bits) / BLOCK * k));
}

INLINE void tile_codes(const qd_weight *w, int bits, long panel, long block, float *tile) {
  const uint8_t *from = weight_block(w, bits, panel, block);
  scales s = {v_zero(), v_zero()};
  for (int c = 0; c < CHUNKS; c++) {
    codes q = block_chunk(bits, from, c);
    long k = BLOCK * block + 4 * c;
    if (c % 4 == 0 && k < w->k) s = header_load(w->header, weight_header(w, w->header, panel, k / w->group));
    for (int j = 0; j < 4; j++) v_store(tile + LANES * (4 * c + j), v_add(v_mul(codes_byte(q, j), s.scale), s.offset));
  }
}

static void tile_block(const qd_weight *w, long panel, long block, float *tile) {
  switch (w->bits) {
    case 2: tile_codes(w, 2, panel, block, tile); break;
    case 3: tile_codes(w, 3, panel, block, tile); break;
    case 4: tile_codes(w, 4, panel, block, tile); break;
    case 8: tile_codes(w, 8, panel, block, tile); break;
    case 16: tile_floats(w, 16, panel, block, tile); break;
    case 17: tile_floats(w, 17, panel, block, tile); break;
    default: tile_floats(w, 32, panel, block, tile);
  }
}

/* num_rows is a constant; x: the rows' inputs of these blocks, a row every `stride` floats. Adds to out. */
INLINE void tile_rows(int num_rows, const float *tile, long blocks, const float *x, long stride, float *out) {
  v16 acc[TILE_ROWS];
  for (int r = 0; r < num_rows; r++) acc[r] = v_load(out + LANES * r);
  for (long b = 0; b < blocks; b++, tile += BLOCK * LANES, x += BLOCK) {
    v16 part[TILE_ROWS];
    UNROLL
    for (int r = 0; r < num_rows; r++) part[r] = v_zero();
    for (int k = 0; k < BLOCK; k++) {
      v16 weights = v_load(tile + LANES * k);
      UNROLL
      for (int r = 0; r < num_rows; r++) part[r] = v_fma(weights, v_set1(x[r * stride + k]), part[r]);
    }
    UNROLL
    for (int r = 0; r < num_rows; r++) acc[r] = v_add(acc[r], part[r]);
  }
  for (int r = 0; r < num_rows; r++) v_store(out + LANES * r, acc[r]);
}

void matmul_float(const qd_weight *w, long panel, const qd_rows *rows, long first, long num_rows, float *out,
                  uint8_t *scratch) {
  float *tile = (float *)(void *)scratch;
  long stride = rows->blocks * BLOCK;
  memset(out, 0, (size_t)(num_rows * LANES) * sizeof(float));
  for (long b = 0; b < rows->blocks; b += TILE_BLOCKS) {
    long blocks = min_long(rows->blocks - b, TILE_BLOCKS), r = 0;
    const float *x = rows->x + first * stride + BLOCK * b;
    for (long i = 0; i < blocks; i++) tile_block(w, panel, b + i, tile + i * BLOCK * LANES);
    for (; r + TILE_ROWS <= num_rows; r += TILE_ROWS)
      tile_rows(TILE_ROWS, tile, blocks, x + r * stride, stride, out + LANES * r);
    for (; r < num_rows; r++) tile_rows(1, tile, blocks, x + r * stride, stride, out + LANES * r);
  }
}
