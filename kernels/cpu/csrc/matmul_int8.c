/* Codes times INT8 rows, or `fine` ones of INT16. One or two rows multiply codes as they are unpacked. More rows
 * share a tile of fp32 scales and codes, one a byte or for INT16 rows as pairs. The first four or more unpack it as
 * they multiply, which hides the stores and the waiting for memory. */
#include "matmul.h"
#include "weights.h"

/* A block of a tile: codes in 1 or 2 planes of 8 chunks, or 8 chunks of pairs, then scales and offsets of each part. */
#define PLANE_BYTES (CHUNKS * CHUNK_BYTES)
#define MAX_TILE_BLOCK (2 * PLANE_BYTES + 2 * 2 * LANES * 4)
#define TILE_BLOCKS (MATMUL_SCRATCH / MAX_TILE_BLOCK)

#define LINE 64 /* bytes of a cache line */
#define PREFETCH_BYTES 2048
#define MAX_FEW 2 /* rows that multiply codes as they are unpacked */

/* What a tile holds: pairs for INT16 rows, or planes of codes; parts of a block with scales of their own. Constants. */
typedef struct {
  int fine, planes, parts;
} tile_form;

INLINE long tile_code_bytes(tile_form f) { return f.fine ? CHUNKS * (long)sizeof(paired) : f.planes * PLANE_BYTES; }
INLINE long tile_block_bytes(tile_form f) { return tile_code_bytes(f) + f.parts * 2 * LANES * 4; }

/* Where codes come from: a block of them, of `bits` bits (a constant), and the block of a tile that keeps them, or
 * NULL; with bits 0 the block of a tile. */
typedef struct {
  int bits;
  const uint8_t *block;
  uint8_t *tile;
} code_source;

INLINE paired source_pair(code_source from, int c) {
  paired *kept = (paired *)(void *)from.tile + c;
  if (!from.bits) return *kept;
  paired q = codes_pair(block_chunk(from.bits, from.block, c));
  if (from.tile) *kept = q;
  return q;
}

INLINE codes source_codes(code_source from, int planes, int plane, int c) {
  uint8_t *kept = from.tile + PLANE_BYTES * plane + CHUNK_BYTES * c;
  if (!from.bits) return codes_keep(codes_load(kept));
  codes q = block_chunk(from.bits, from.block, c);
  if (planes == 2) q = codes_field(q, 4 * plane, 15);
  codes_store(kept, q);
  return codes_keep(q);
}

/* Sums over chunks begin .. end - 1 of a block of codes, for each output and each of num_rows rows (a constant). */
INLINE void fine_dots(int num_rows, code_source from, int begin, int end, const int16_t *x, v16 *sums) {
  vi16 sum[TILE_ROWS];
  UNROLL
  for (int r = 0; r < num_rows; r++) sum[r] = vi_set1(0);
  UNROLL
  for (int c = begin; c < end; c++) {
    paired q = source_pair(from, c);
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
        fine_dots(num_rows, (code_source){bits, block, NULL}, 0, CHUNKS, x.q, sums);
      else
        packed_dots(num_rows, bits, block, x.q, sums);
      UNROLL
      for (int r = 0; r < num_rows; r++) acc[r] = accumulate(acc[r], s, sums[r], x.scale[r], x.sum[r]);
    }
  }
  UNROLL
  for (int r = 0; r < num_rows; r++) v_store(out + LANES * r, acc[r]);
}

/* Scales and offsets of one part of a block; both 0 where it is padding, which only a half can be. */
INLINE void unpack_scales(int header, const uint8_t *head, int is_padding, float *tile) {
  scales s = {v_zero(), v_zero()};
  if (!is_padding) s = header_load(header, head);
  v_store(tile, s.scale);
  v_store(tile + LANES, s.offset);
}

/* Where the next block of a panel lies, its header, and how far behind them what the next tile is made of. */
typedef struct {
  int bits, header;
  const uint8_t *block, *head;
  long k, num_inputs, group, group_end, ahead, headers_ahead;
} packed;

INLINE packed packed_at(const qd_weight *w, int bits, long panel, long first, long last) {
  long k = BLOCK * first, header = header_bytes(w->header);
  return (packed){.bits = bits,
                  .header = w->header,
                  .block = weight_block(w, bits, panel, first),
                  .head = weight_header(w, w->header, panel, k / w->group),
                  .k = k,
                  .num_inputs = w->k,
                  .group = w->group,
                  .group_end = round_up(k + 1, w->group),
                  .ahead = (last - first) * block_bytes(bits),
                  .headers_ahead = (last - first) * header * BLOCK / w->group};
}

/* The next block's scales, into a tile, and where its codes come from. The rows' products take long and read no memory:
 * so that it has work meanwhile, what lies there for the next tile is asked for. */
INLINE code_source unpack_next(packed *from, tile_form f, uint8_t *tile) {
  code_source source = {from->bits, from->block, tile};
  float *tile_scales = (float *)(void *)(tile + tile_code_bytes(f));
  for (long i = 0; i < block_bytes(from->bits); i += LINE) __builtin_prefetch(from->block + from->ahead + i, 0, 2);
  __builtin_prefetch(from->head + from->headers_ahead, 0, 2);
  for (int part = 0; part < f.parts; part++, from->k += BLOCK / f.parts) {
    if (from->k >= from->group_end) from->group_end += from->group, from->head += header_bytes(from->header);
    unpack_scales(from->header, from->head, from->k >= from->num_inputs, tile_scales + 2 * LANES * part);
  }
  from->block += block_bytes(from->bits);
  return source;
}

INLINE void unpack_tile(packed from, tile_form f, long num_blocks, uint8_t *tile) {
  for (long b = 0; b < num_blocks; b++, tile += tile_block_bytes(f)) {
    code_source source = unpack_next(&from, f, tile);
    UNROLL
    for (int c = 0; c < CHUNKS; c++) {
      if (f.fine) source_pair(source, c);
      for (int plane = 0; !f.fine && plane < f.planes; plane++) source_codes(source, f.planes, plane, c);
    }
  }
}

/* Sums over chunks begin .. end - 1 of a block of a tile, for num_rows INT8 rows (a constant). */
INLINE void part_dots(int num_rows, code_source from, int planes, int begin, int end, const int8_t *x, v16 *sums) {
  dot low[TILE_ROWS], high[TILE_ROWS];
  UNROLL
  for (int r = 0; r < num_rows; r++) low[r] = high[r] = dot_zero();
  UNROLL
  for (int c = begin; c < end; c++) {
    codes q = source_codes(from, planes, 0, c), q_high = q;
    if (planes == 2) q_high = source_codes(from, planes, 1, c);
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

/* One part of a block for num_rows rows (a constant) of a group, from x on. */
INLINE void tile_part(int num_rows, code_source from, tile_form f, int part, qd_row_block x, v16 *acc) {
  int begin = part * CHUNKS / 2, end = f.parts == 2 ? begin + CHUNKS / 2 : CHUNKS;
  const float *tile_scales = (const float *)(const void *)(from.tile + tile_code_bytes(f)) + 2 * LANES * part;
  v16 sums[TILE_ROWS];
  if (f.fine)
    fine_dots(num_rows, from, begin, end, x.q, sums);
  else
    part_dots(num_rows, from, f.planes, begin, end, x.q, sums);
  scales s = {v_load(tile_scales), v_load(tile_scales + LANES)};
  const float *x_sum = f.parts == 2 ? x.half_sum[part] : x.sum;
  UNROLL
  for (int r = 0; r < num_rows; r++) acc[r] = accumulate(acc[r], s, sums[r], x.scale[r], x_sum[r]);
}

/* Blocks first..last-1, in tile, or unpacked to it where `from` is given, of num_rows rows (a constant) of one group of
 * `group` from row on; adds to out. */
INLINE void tile_rows(int num_rows, long group, packed *from, tile_form f, uint8_t *tile, long first, long last,
                      const qd_rows *rows, long row, float *out) {
  v16 acc[TILE_ROWS];
  const qd_rows inputs = *rows; /* which the compiler would read again after each store to the tile */
  UNROLL
  for (int r = 0; r < num_rows; r++) acc[r] = v_load(out + LANES * r);
  for (long b = first; b < last; b++, tile += tile_block_bytes(f)) {
    qd_row_block x = row_block(&inputs, group, f.fine, row, b);
    code_source source = from ? unpack_next(from, f, tile) : (code_source){0, NULL, tile};
    tile_part(num_rows, source, f, 0, x, acc);
    if (f.parts == 2) tile_part(num_rows, source, f, 1, x, acc);
  }
  UNROLL
  for (int r = 0; r < num_rows; r++) v_store(out + LANES * r, acc[r]);
}

INLINE void tile_all_rows(tile_form f, uint8_t *tile, long first, long last, const qd_rows *rows, long row,
                          long num_rows, float *out) {
  for (; num_rows >= TILE_ROWS; num_rows -= TILE_ROWS, row += TILE_ROWS, out += LANES * TILE_ROWS)
    tile_rows(TILE_ROWS, TILE_ROWS, NULL, f, tile, first, last, rows, row, out);
#define TAIL(n, group)                                                                      \
  if (n < TILE_ROWS && num_rows >= n) {                                                     \
    tile_rows(n < TILE_ROWS ? n : 1, group, NULL, f, tile, first, last, rows, row, out);    \
    num_rows -= n, row += n, out += LANES * n;                                              \
  }
  TAIL(4, TILE_ROWS) TAIL(2, TILE_ROWS) TAIL(1, rows->tile)
#undef TAIL
}

typedef void tile_kernel(uint8_t *tile, long first, long last, const qd_rows *rows, long row, long num_rows,
                         float *out);

#define TILE_KERNEL(name, fine, planes, parts)                                                                       \
  static void name(uint8_t *tile, long first, long last, const qd_rows *rows, long row, long num_rows, float *out) { \
    tile_all_rows((tile_form){fine, planes, parts}, tile, first, last, rows, row, num_rows, out);                    \
  }
TILE_KERNEL(tile_narrow, 0, 1, 1)
TILE_KERNEL(tile_narrow_halves, 0, 1, 2)
TILE_KERNEL(tile_wide, 0, WIDE_PLANES, 1)
TILE_KERNEL(tile_wide_halves, 0, WIDE_PLANES, 2)
TILE_KERNEL(tile_fine, 1, 1, 1)
TILE_KERNEL(tile_fine_halves, 1, 1, 2)

/* Planes of a tile: INT16 rows meet codes of 8 bits as they are. */
INLINE int tile_planes(int bits, int fine) { return bits == 8 && !fine ? WIDE_PLANES : 1; }

static tile_kernel *kernel_of(tile_form f) {
  if (f.fine) return f.parts == 2 ? tile_fine_halves : tile_fine;
  if (f.planes == 1) return f.parts == 2 ? tile_narrow_halves : tile_narrow;
  return f.parts == 2 ? tile_wide_halves : tile_wide;
}

/* All rows over one tile. */
INLINE void multiply_tile(packed from, tile_form f, long first, long last, const qd_rows *rows, long row, long num_rows,
                          float *out, uint8_t *tile) {
  long done = f.parts == 2 || num_rows < 4 ? 0 : num_rows < TILE_ROWS ? 4 : TILE_ROWS;
  if (done == 0)
    unpack_tile(from, f, last - first, tile);
  else if (done == TILE_ROWS)
    tile_rows(TILE_ROWS, TILE_ROWS, &from, f, tile, first, last, rows, row, out);
  else
    tile_rows(4, TILE_ROWS, &from, f, tile, first, last, rows, row, out);
  kernel_of(f)(tile, first, last, rows, row + done, num_rows - done, out + LANES * done);
}

INLINE void many_rows(const qd_weight *w, int bits, int fine, long panel, const qd_rows *rows, long first,
                      long num_rows, float *out, uint8_t *tile) {
  int planes = tile_planes(bits, fine);
  memset(out, 0, (size_t)(num_rows * LANES) * sizeof(float));
  for (long b = 0; b < rows->blocks; b += TILE_BLOCKS) {
    long last = min_long(rows->blocks, b + TILE_BLOCKS);
    packed from = packed_at(w, bits, panel, b, last);
    if (weight_parts(w) == 1)
      multiply_tile(from, (tile_form){fine, planes, 1}, b, last, rows, first, num_rows, out, tile);
    else
      multiply_tile(from, (tile_form){fine, planes, 2}, b, last, rows, first, num_rows, out, tile);
  }
}

INLINE void matmul_rows(const qd_weight *w, int bits, int fine, long panel, const qd_rows *rows, long first,
                        long num_rows, float *out, uint8_t *scratch) {
  if (rows->tile == 1 && weight_parts(w) == 1)
    few_rows(1, 1, fine, w, bits, panel, rows, first, out);
  else if (num_rows == 2 && weight_parts(w) == 1)
    few_rows(2, TILE_ROWS, fine, w, bits, panel, rows, first, out);
  else
    many_rows(w, bits, fine, panel, rows, first, num_rows, out, scratch);
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
