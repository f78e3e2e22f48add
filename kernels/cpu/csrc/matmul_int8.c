/* Codes times INT8 rows, or `fine` ones of INT16. One or two rows multiply codes as they are unpacked; more rows share a
 * tile that is unpacked to one code a byte and fp32 scales once. */
#include "matmul.h"
#include "weights.h"

/* A block of a tile: codes in 1 or 2 planes of 8 chunks, then scales and offsets of each part. */
#define PLANE_BYTES (CHUNKS * CHUNK_BYTES)
#define MAX_TILE_BLOCK (WIDE_PLANES * PLANE_BYTES + 2 * 2 * LANES * 4)
#define TILE_BLOCKS (MATMUL_SCRATCH / MAX_TILE_BLOCK)

#define LINE 64 /* bytes of a cache line */
#define PREFETCH_BYTES 2048
#define MAX_FEW 2 /* rows that multiply codes as they are unpacked */

INLINE long tile_block_bytes(int planes, int parts) { return planes * PLANE_BYTES + parts * 2 * LANES * 4; }

/* Sums over chunks begin .. end - 1 of a block of codes, for each output and each of num_rows rows (a constant). */
INLINE void fine_dots(int num_rows, int bits, int begin, int end, const uint8_t *block, const int16_t *x, v16 *sums) {
  vi16 sum[TILE_ROWS];
  UNROLL
  for (int r = 0; r < num_rows; r++) sum[r] = vi_set1(0);
  UNROLL
  for (int c = begin; c < end; c++) {
    paired q = codes_pair(block_chunk(bits, block, c));
    UNROLL
    for (int r = 0; r < num_rows; r++) sum[r] = paired_dot_add(sum[r], q, x + BLOCK * r + 4 * c);
  }
  UNROLL
  for (int r = 0; r < num_rows; r++) sums[r] = vi_float(sum[r]);
}

/* The same for INT8 rows, over a whole block. */
INLINE void packed_dots(int num_rows, int bits, const uint8_t *block, const int8_t *x, v16 *sums) {
  dot low[MAX_FEW], high[MAX_FEW];
  int split = bits == 8 && WIDE_PLANES == 2;
  UNROLL
  for (int r = 0; r < num_rows; r++) low[r] = high[r] = dot_zero();
  UNROLL
  for (int c = 0; c < CHUNKS; c++) {
    codes q = block_chunk(bits, block, c);
    UNROLL
    for (int r = 0; r < num_rows; r++) {
      low[r] = dot_add(low[r], split ? codes_field(q, 0, 15) : q, x + BLOCK * r + 4 * c);
      if (split) high[r] = dot_add(high[r], codes_field(q, 4, 15), x + BLOCK * r + 4 * c);
    }
  }
  UNROLL
  for (int r = 0; r < num_rows; r++) {
    vi16 sum = dot_ints(low[r]);
    sums[r] = vi_float(split ? vi_add(sum, vi_shift4(dot_ints(high[r]))) : sum);
  }
}

INLINE v16 accumulate(v16 acc, scales s, v16 sum, float x_scale, float x_sum) {
  acc = v_fma(v_mul(s.scale, v_set1(x_scale)), sum, acc);
  return v_fma(s.offset, v_set1(x_sum), acc);
}

/* num_rows (a constant) rows from `row` on, in groups of `group`. Scales cover whole blocks here. */
INLINE void few_rows(int num_rows, long group, int fine, const qd_weight *w, int bits, long panel,
                     const qd_rows *rows, long row, float *out) {
  long blocks = rows->blocks, per_header = w->group / BLOCK;
  int header = w->header;
  const uint8_t *block = weight_block(w, bits, panel, 0), *head = weight_header(w, header, panel, 0);
  v16 acc[MAX_FEW], sums[MAX_FEW];
  UNROLL
  for (int r = 0; r < num_rows; r++) acc[r] = v_zero();
  for (long b = 0; b < blocks; head += header_bytes(header)) {
    scales s = header_load(header, head);
    for (long end = min_long(blocks, b + per_header); b < end; b++, block += block_bytes(bits)) {
      qd_row_block x = row_block(rows, group, fine, row, b);
      for (long i = 0; i < block_bytes(bits); i += LINE) __builtin_prefetch(block + PREFETCH_BYTES + i);
      if (fine)
        fine_dots(num_rows, bits, 0, CHUNKS, block, x.q, sums);
      else
        packed_dots(num_rows, bits, block, x.q, sums);
      UNROLL
      for (int r = 0; r < num_rows; r++) acc[r] = accumulate(acc[r], s, sums[r], x.scale[r], x.sum[r]);
    }
  }
  UNROLL
  for (int r = 0; r < num_rows; r++) v_store(out + LANES * r, acc[r]);
}

INLINE void unpack_block(int bits, int planes, const uint8_t *block, uint8_t *tile) {
  UNROLL
  for (int c = 0; c < CHUNKS; c++) {
    codes q = block_chunk(bits, block, c);
    codes_store(tile + CHUNK_BYTES * c, planes == 2 ? codes_field(q, 0, 15) : q);
    if (planes == 2) codes_store(tile + PLANE_BYTES + CHUNK_BYTES * c, codes_field(q, 4, 15));
  }
}

/* Scales and offsets of one part of a block; both 0 where it is padding, which only a half can be. */
INLINE void unpack_scales(int header, const uint8_t *head, int is_padding, float *tile) {
  scales s = {v_zero(), v_zero()};
  if (!is_padding) s = header_load(header, head);
  v_store(tile, s.scale);
  v_store(tile + LANES, s.offset);
}

/* The rows' products, which come next, take long and read no memory. So that it has work meanwhile, the tile behind this
 * one, which lies there, is asked for. */
INLINE void unpack_tile(const qd_weight *w, int bits, int planes, int parts, long panel, long first, long last,
                        uint8_t *tile) {
  int header = w->header;
  long part_len = BLOCK / parts, k = BLOCK * first, group_end = round_up(k + 1, w->group);
  long ahead = (last - first) * block_bytes(bits);
  long headers_ahead = (last - first) * header_bytes(header) * BLOCK / w->group;
  const uint8_t *block = weight_block(w, bits, panel, first), *head = weight_header(w, header, panel, k / w->group);
  for (long b = first; b < last; b++, block += block_bytes(bits), tile += tile_block_bytes(planes, parts)) {
    float *tile_scales = (float *)(void *)(tile + planes * PLANE_BYTES);
    for (long i = 0; i < block_bytes(bits); i += LINE) __builtin_prefetch(block + ahead + i, 0, 2);
    __builtin_prefetch(head + headers_ahead, 0, 2);
    unpack_block(bits, planes, block, tile);
    for (int part = 0; part < parts; part++, k += part_len) {
      if (k >= group_end) group_end += w->group, head += header_bytes(header);
      unpack_scales(header, head, k >= w->k, tile_scales + 2 * LANES * part);
    }
  }
}

/* Sums over chunks begin .. end - 1 of a block of a tile, for num_rows INT8 rows (a constant). */
INLINE void part_dots(int num_rows, int planes, int begin, int end, const uint8_t *tile, const int8_t *x, v16 *sums) {
  dot low[TILE_ROWS], high[TILE_ROWS];
  UNROLL
  for (int r = 0; r < num_rows; r++) low[r] = high[r] = dot_zero();
  UNROLL
  for (int c = begin; c < end; c++) {
    codes q = codes_keep(codes_load(tile + CHUNK_BYTES * c)), q_high = q;
    if (planes == 2) q_high = codes_keep(codes_load(tile + PLANE_BYTES + CHUNK_BYTES * c));
    UNROLL
    for (int r = 0; r < num_rows; r++) {
      low[r] = dot_add(low[r], q, x + BLOCK * r + 4 * c);
      if (planes == 2) high[r] = dot_add(high[r], q_high, x + BLOCK * r + 4 * c);
    }
  }
  UNROLL
  for (int r = 0; r < num_rows; r++) {
    vi16 sum = dot_ints(low[r]);
    if (planes == 2) sum = vi_add(sum, vi_shift4(dot_ints(high[r])));
    sums[r] = vi_float(sum);
  }
}

/* One part (of `parts`) of a block for num_rows rows (a constant) of a group, from x on. */
INLINE void tile_part(int num_rows, int fine, int planes, int parts, int part, const uint8_t *tile, qd_row_block x,
                      v16 *acc) {
  int begin = part * CHUNKS / 2, end = parts == 2 ? begin + CHUNKS / 2 : CHUNKS;
  const float *tile_scales = (const float *)(const void *)(tile + planes * PLANE_BYTES) + 2 * LANES * part;
  v16 sums[TILE_ROWS];
  if (fine)
    fine_dots(num_rows, 8, begin, end, tile, x.q, sums);
  else
    part_dots(num_rows, planes, begin, end, tile, x.q, sums);
  scales s = {v_load(tile_scales), v_load(tile_scales + LANES)};
  const float *x_sum = parts == 2 ? x.half_sum[part] : x.sum;
  UNROLL
  for (int r = 0; r < num_rows; r++) acc[r] = accumulate(acc[r], s, sums[r], x.scale[r], x_sum[r]);
}

/* Blocks first..last-1, in tile, of num_rows rows (a constant) of one group of `group` from row on; adds to out. */
INLINE void tile_rows(int num_rows, long group, int fine, int planes, int parts, const uint8_t *tile, long first, long last,
                      const qd_rows *rows, long row, float *out) {
  v16 acc[TILE_ROWS];
  UNROLL
  for (int r = 0; r < num_rows; r++) acc[r] = v_load(out + LANES * r);
  for (long b = first; b < last; b++, tile += tile_block_bytes(planes, parts)) {
    qd_row_block x = row_block(rows, group, fine, row, b);
    tile_part(num_rows, fine, planes, parts, 0, tile, x, acc);
    if (parts == 2) tile_part(num_rows, fine, planes, parts, 1, tile, x, acc);
  }
  UNROLL
  for (int r = 0; r < num_rows; r++) v_store(out + LANES * r, acc[r]);
}

INLINE void tile_all_rows(int fine, int planes, int parts, const uint8_t *tile, long first, long last, const qd_rows *rows,
                          long row, long num_rows, float *out) {
  for (; num_rows >= TILE_ROWS; num_rows -= TILE_ROWS, row += TILE_ROWS, out += LANES * TILE_ROWS)
    tile_rows(TILE_ROWS, TILE_ROWS, fine, planes, parts, tile, first, last, rows, row, out);
#define TAIL(n, group)                                                                               \
  if (n < TILE_ROWS && num_rows >= n) {                                                              \
    tile_rows(n < TILE_ROWS ? n : 1, group, fine, planes, parts, tile, first, last, rows, row, out); \
    num_rows -= n, row += n, out += LANES * n;                                                       \
  }
  TAIL(4, TILE_ROWS) TAIL(2, TILE_ROWS) TAIL(1, rows->tile)
#undef TAIL
}

typedef void tile_kernel(const uint8_t *tile, long first, long last, const qd_rows *rows, long row, long num_rows,
                         float *out);

#define TILE_KERNEL(name, fine, planes, parts)                                                                               \
  static void name(const uint8_t *tile, long first, long last, const qd_rows *rows, long row, long num_rows,           \
                   float *out) {                                                                                       \
    tile_all_rows(fine, planes, parts, tile, first, last, rows, row, num_rows, out);                                   \
  }
TILE_KERNEL(tile_narrow, 0, 1, 1)
TILE_KERNEL(tile_narrow_halves, 0, 1, 2)
TILE_KERNEL(tile_wide, 0, WIDE_PLANES, 1)
TILE_KERNEL(tile_wide_halves, 0, WIDE_PLANES, 2)
TILE_KERNEL(tile_fine, 1, 1, 1)
TILE_KERNEL(tile_fine_halves, 1, 1, 2)

/* Planes of a tile: INT16 rows meet codes of 8 bits as they are. */
INLINE int tile_planes(int bits, int fine) { return bits == 8 && !fine ? WIDE_PLANES : 1; }

static tile_kernel *kernel_of(int bits, int fine, int parts) {
  if (fine) return parts == 2 ? tile_fine_halves : tile_fine;
  if (tile_planes(bits, fine) == 1) return parts == 2 ? tile_narrow_halves : tile_narrow;
  return parts == 2 ? tile_wide_halves : tile_wide;
}

INLINE void many_rows(const qd_weight *w, int bits, int planes, long panel, const qd_rows *rows, long first,
                      long num_rows, float *out, uint8_t *tile) {
  int parts = weight_parts(w);
  tile_kernel *kernel = kernel_of(bits, rows->fine, parts);
  memset(out, 0, (size_t)(num_rows * LANES) * sizeof(float));
  for (long b = 0; b < rows->blocks; b += TILE_BLOCKS) {
    long last = min_long(rows->blocks, b + TILE_BLOCKS);
    unpack_tile(w, bits, planes, parts, panel, b, last, tile);
    kernel(tile, b, last, rows, first, num_rows, out);
  }
}

INLINE void matmul_rows(const qd_weight *w, int bits, int fine, long panel, const qd_rows *rows, long first,
                        long num_rows, float *out, uint8_t *scratch) {
  if (rows->tile == 1 && weight_parts(w) == 1)
    few_rows(1, 1, fine, w, bits, panel, rows, first, out);
  else if (num_rows == 2 && weight_parts(w) == 1)
    few_rows(2, TILE_ROWS, fine, w, bits, panel, rows, first, out);
  else
    many_rows(w, bits, tile_planes(bits, fine), panel, rows, first, num_rows, out, scratch);
}

INLINE void matmul_bits(const qd_weight *w, int bits, long panel, const qd_rows *rows, long first, long num_rows,
                        float *out, uint8_t *scratch) {
  if (rows->fine)
    matmul_rows(w, bits, 1, panel, rows, first, num_rows, out, scratch);
  else
    matmul_rows(w, bits, 0, panel, rows, first, num_rows, out, scratch);
}

void matmul_int8(const qd_weight *w, long panel, const qd_rows *rows, long first, long num_rows, float *out,
                 uint8_t *scratch) {
  switch (w->bits) {
    case 2: matmul_bits(w, 2, panel, rows, first, num_rows, out, scratch); break;
    case 3: matmul_bits(w, 3, panel, rows, first, num_rows, out, scratch); break;
    case 4: matmul_bits(w, 4, panel, rows, first, num_rows, out, scratch); break;
    default: matmul_bits(w, 8, panel, rows, first, num_rows, out, scratch);
  }
}
