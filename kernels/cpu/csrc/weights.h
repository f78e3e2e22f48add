/* The layout of a matrix in memory.
 *
 * Outputs come in panels of 16, inputs in blocks of 32. Codes of a panel and block are 8 chunks of 4 inputs; a chunk is
 * 64 bytes, byte 4 i + j the code of output i and input j, so that a 4-byte dot gives one sum per output:
 *   8 bits: the 8 chunks.  4 bits: 4 x 64 bytes, chunk 2 v in the low nibbles of the v-th, 2 v + 1 in the high ones.
 *   2 bits: 2 x 64 bytes, chunk 4 v + f in bits 2 f.  3 bits: as 2 bits, then 64 bytes with bit 2 of chunk c in bit c.
 *   floats: [32 inputs][16 outputs].
 * Headers: [panels][groups], each 16 scales, then 16 offsets or zero points. Padding has scale 0 and code 0. */
#ifndef QD_WEIGHTS_H
#define QD_WEIGHTS_H

#include "abi.h"
#include "simd.h"

#define BLOCK 32
#define CHUNKS 8
#define CHUNK_BYTES 64

INLINE long weight_panels(const qd_weight *w) { return ceil_div(w->n, LANES); }
INLINE long weight_blocks(const qd_weight *w) { return ceil_div(w->k, BLOCK); }
INLINE long block_bytes(int bits) { return (bits > 16 ? bits & ~1 : bits) * (BLOCK * LANES / 8); }
INLINE long header_bytes(int header) {
  return LANES * (header == QD_HALF ? 4 : header == QD_HALF_ZERO ? 3 : header == QD_FLOAT ? 8 : 5);
}
/* Halves of a block with scales of their own. */
INLINE int weight_parts(const qd_weight *w) { return w->group == 16 ? 2 : 1; }
INLINE const uint8_t *weight_block(const qd_weight *w, int bits, long panel, long block) {
  return w->codes + (panel * weight_blocks(w) + block) * block_bytes(bits);
}
INLINE const uint8_t *weight_header(const qd_weight *w, int header, long panel, long group) {
  return w->headers + (panel * ceil_div(w->k, w->group) + group) * header_bytes(header);
}

typedef struct {
  v16 scale, offset;
} scales;

INLINE scales header_load(int header, const uint8_t *p) {
  int half = header == QD_HALF || header == QD_HALF_ZERO;
  scales s = {.scale = half ? v_load_half(p) : v_load((const float *)(const void *)p)};
  const uint8_t *second = p + LANES * (half ? 2 : 4);
  if (header == QD_HALF)
    s.offset = v_load_half(second);
  else if (header == QD_FLOAT)
    s.offset = v_load((const float *)(const void *)second);
  else
    s.offset = v_mul(v_sub(v_zero(), v_load_u8(second)), s.scale);
  return s;
}

/* Chunk c of a block of codes, one code a byte. */
INLINE codes block_chunk(int bits, const uint8_t *block, int c) {
  if (bits == 8) return codes_load(block + CHUNK_BYTES * c);
  if (bits == 4) return codes_field(codes_load(block + CHUNK_BYTES * (c / 2)), 4 * (c % 2), 15);
  codes low = codes_field(codes_load(block + CHUNK_BYTES * (c / 4)), 2 * (c % 4), 3);
  if (bits == 2) return low;
  return codes_join(low, codes_field(codes_load(block + 2 * CHUNK_BYTES), c, 1));
}

/* The same for one byte, in plain C: codes are written through it and single rows read. */
INLINE int block_code(int bits, const uint8_t *block, int c, int byte) {
  if (bits == 8) return block[CHUNK_BYTES * c + byte];
  if (bits == 4) return block[CHUNK_BYTES * (c / 2) + byte] >> 4 * (c % 2) & 15;
  int low = block[CHUNK_BYTES * (c / 4) + byte] >> 2 * (c % 4) & 3;
  return bits == 2 ? low : low | (block[2 * CHUNK_BYTES + byte] >> c & 1) << 2;
}

INLINE v16 float_load(int bits, const uint8_t *p) {
  return bits == 16 ? v_load_half(p) : bits == 17 ? v_load_bf16(p) : v_load((const float *)(const void *)p);
}

#endif
