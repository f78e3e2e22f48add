/* Bringing a matrix into panels, and reading single rows back for the embedding: a chunk is a panel, or a token. */
#include "pool.h"
#include "weights.h"

static void set_code(int bits, uint8_t *block, int c, int byte, int code) {
  if (bits == 8) {
    block[CHUNK_BYTES * c + byte] = (uint8_t)code;
  } else if (bits == 4) {
    block[CHUNK_BYTES * (c / 2) + byte] |= (uint8_t)(code << 4 * (c % 2));
  } else {
    block[CHUNK_BYTES * (c / 4) + byte] |= (uint8_t)((code & 3) << 2 * (c % 4));
    if (bits == 3) block[2 * CHUNK_BYTES + byte] |= (uint8_t)(code >> 2 << c);
  }
}

INLINE void pack_codes(const qd_weight *w, int bits, const uint8_t *source, long panel) {
  for (long b = 0; b < weight_blocks(w); b++) {
    uint8_t *block = (uint8_t *)weight_block(w, bits, panel, b);
    long rows = min_long(LANES, w->n - LANES * panel), columns = min_long(BLOCK, w->k - BLOCK * b);
    memset(block, 0, (size_t)block_bytes(bits));
    for (long i = 0; i < rows; i++) {
      const uint8_t *from = source + (LANES * panel + i) * w->k + BLOCK * b;
      for (long j = 0; j < columns; j++) set_code(bits, block, (int)(j / 4), (int)(4 * i + j % 4), from[j]);
    }
  }
}

static void pack_floats(const qd_weight *w, const uint8_t *source, long panel) {
  long size = block_bytes(w->bits) / (BLOCK * LANES);
  for (long b = 0; b < weight_blocks(w); b++) {
    uint8_t *block = (uint8_t *)weight_block(w, w->bits, panel, b);
    long rows = min_long(LANES, w->n - LANES * panel), columns = min_long(BLOCK, w->k - BLOCK * b);
    memset(block, 0, (size_t)block_bytes(w->bits));
    for (long i = 0; i < rows; i++)
      for (long j = 0; j < columns; j++)
        memcpy(block + (LANES * j + i) * size, source + ((LANES * panel + i) * w->k + BLOCK * b + j) * size,
               (size_t)size);
  }
}

static long pack_chunks(const void *args, const qd_step *step, int phase, int num_threads) {
  (void)step, (void)phase, (void)num_threads;
  return weight_panels(((const qd_pack_args *)args)->target);
}

static void pack_chunk(const void *args, const qd_step *step, int phase, long index, qd_thread *thread) {
  const qd_pack_args *a = args;
  (void)step, (void)phase, (void)thread;
  switch (a->target->bits) {
    case 2: pack_codes(a->target, 2, a->source, index); break;
    case 3: pack_codes(a->target, 3, a->source, index); break;
    case 4: pack_codes(a->target, 4, a->source, index); break;
    case 8: pack_codes(a->target, 8, a->source, index); break;
    default: pack_floats(a->target, a->source, index);
  }
}

static float float_at(const qd_weight *w, long panel, long lane, long k) {
  float lanes[LANES];
  const uint8_t *block = weight_block(w, w->bits, panel, k / BLOCK);
  v_store(lanes, float_load(w->bits, block + k % BLOCK * block_bytes(w->bits) / BLOCK));
  return lanes[lane];
}

static void embed_row(const qd_embedding_args *a, long row, float *out) {
  const qd_weight *w = a->weight;
  long panel = row / LANES, lane = row % LANES;
  float scale[LANES], offset[LANES];
  for (long k = 0; k < w->k; k++) {
    float value;
    if (w->bits >= 16) {
      value = float_at(w, panel, lane, k);
    } else {
      if (k % w->group == 0) {
        scales s = header_load(w->header, weight_header(w, w->header, panel, k / w->group));
        v_store(scale, s.scale);
        v_store(offset, s.offset);
      }
      const uint8_t *block = weight_block(w, w->bits, panel, k / BLOCK);
      int code = block_code(w->bits, block, (int)(k % BLOCK / 4), (int)(4 * lane + k % 4));
      value = (float)code * scale[lane] + offset[lane];
    }
    out[w->perm ? w->perm[k] : k] = value * a->scale;
  }
}

static long embedding_chunks(const void *args, const qd_step *step, int phase, int num_threads) {
  (void)args, (void)phase, (void)num_threads;
  return step->num_tokens;
}

static void embedding_chunk(const void *args, const qd_step *step, int phase, long index, qd_thread *thread) {
  const qd_embedding_args *a = args;
  (void)phase, (void)thread;
  embed_row(a, step->token_ids[index], a->out + index * a->weight->k);
}

const qd_kernel pack_kernel = {.num_phases = 1, .num_chunks = pack_chunks, .chunk = pack_chunk};
const qd_kernel embedding_kernel = {.num_phases = 1, .num_chunks = embedding_chunks, .chunk = embedding_chunk};
