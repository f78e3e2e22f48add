/* Bringing queries, keys and values of the pool into the shape that attention computes on. */
#include "attention_tile.h"
#include "kv.h"

#define LINE 64 /* bytes of a cache line */

/* A query rounded to INT8 as one vector, and what the shift of the keys adds to its dots. */
static void quantize_query(tile *t, long row, const float *q) {
  int8_t *to = t->q_codes + row * t->padded_dim;
  memset(to, 0, (size_t)t->padded_dim);
  t->q_scale[row] = kv_quantize(q, to, t->a->heads.head_dim) * t->a->scale;
  int32_t sum = 0;
  for (long i = 0; i < t->a->heads.head_dim; i++) sum += to[i];
  t->q_sum[row] = -KEY_SHIFT * sum;
}

static void copy_query(tile *t, long row, const float *q) {
  long dim = t->a->heads.head_dim;
  float *to = t->queries + row * t->padded_dim;
  memcpy(to, q, (size_t)dim * sizeof(float));
  memset(to + dim, 0, (size_t)(t->padded_dim - dim) * sizeof(float));
}

void load_queries(tile *t) {
  const qd_attention_args *a = t->a;
  long dim = a->heads.head_dim;
  for (long row = 0; row < t->num_rows; row++) {
    long token = t->first_token + row / t->shared, head = t->head * t->shared + row % t->shared;
    const float *q = a->q + (token * a->heads.num_heads + head) * dim;
    if (a->int8_queries)
      quantize_query(t, row, q);
    else
      copy_query(t, row, q);
  }
}

/* Where `count` tokens of a block lie, from `token` on, and their scales. */
static void locate_in_block(const tile *t, const void *data, const int64_t stride[3], const float *scale_data,
                            const int64_t scale_stride[3], long id, long token, long count, const uint8_t **rows,
                            float *scales) {
  long step = stride[2] * kv_element_bytes(t->a->kv->type);
  const uint8_t *row = (const uint8_t *)data + kv_at(stride, id, t->head, 0) * kv_element_bytes(t->a->kv->type);
  for (long i = 0; i < count; i++) rows[i] = row + (token + i) * step;
  if (!scale_data) return;
  const float *scale = scale_data + kv_at(scale_stride, id, t->head, token);
  if (count == GROUP && scale_stride[2] == 1)
    v_store(scales, v_load(scale));
  else
    for (long i = 0; i < count; i++) scales[i] = scale[i * scale_stride[2]];
}

/* Where tokens first .. first + count - 1 of the request lie, and their scales (0 for the others). */
static void locate(const tile *t, const void *data, const int64_t stride[3], const float *scale_data,
                   const int64_t scale_stride[3], long first, long count, const uint8_t *rows[GROUP], float *scales) {
  long block_size = t->a->kv->block_size, block = first / block_size, token = first - block * block_size;
  if (scale_data) v_store(scales, v_zero());
  for (long i = 0; i < count; block++, token = 0) {
    long some = min_long(count - i, block_size - token);
    locate_in_block(t, data, stride, scale_data, scale_stride, t->table[block], token, some, rows + i, scales + i);
    i += some;
  }
}

void prefetch_group(const tile *t, long start, long end) {
  const qd_kv *kv = t->a->kv;
  if (start >= end) return;
  long block = start / kv->block_size, token = start - block * kv->block_size, id = t->table[block];
  long size = kv_element_bytes(kv->type), bytes = min_long(GROUP, end - start) * t->a->heads.head_dim * size;
  const uint8_t *k = (const uint8_t *)kv->k + kv_at(kv->k_stride, id, t->head, token) * size;
  const uint8_t *v = (const uint8_t *)kv->v + kv_at(kv->v_stride, id, t->head, token) * size;
  for (long at = 0; at < bytes; at += LINE) __builtin_prefetch(k + at), __builtin_prefetch(v + at);
  if (!kv->k_scale) return;
  __builtin_prefetch(kv->k_scale + kv_at(kv->k_scale_stride, id, t->head, token));
  __builtin_prefetch(kv->v_scale + kv_at(kv->v_scale_stride, id, t->head, token));
}

/* k_tile = keys of a group, shifted, as chunks of 4 elements x 16 tokens. */
static void load_keys_int8(tile *t, const uint8_t *rows[GROUP], long count) {
  long dim = t->a->heads.head_dim;
  uint8_t zeros[64] = {0}, ends[GROUP][64];
  for (long d = 0; d < dim; d += 64) {
    const uint8_t *parts[GROUP];
    for (long i = 0; i < GROUP; i++) {
      parts[i] = i < count ? rows[i] + d : zeros;
      if (dim - d < 64) parts[i] = memcpy(memset(ends[i], 0, 64), parts[i], (size_t)(dim - d));
    }
    words_transpose(parts, t->k_tile + GROUP * d);
  }
  if (!KEY_SHIFT) return;
  for (long at = 0; at < t->padded_dim * GROUP; at += 64)
    codes_store(t->k_tile + at, keys_shifted(codes_load(t->k_tile + at)));
}

/* k_tile = keys of a group as floats [padded_dim][16 tokens]. */
INLINE void load_keys_float(tile *t, int type, const uint8_t *rows[GROUP], long count) {
  float *to = (float *)(void *)t->k_tile, lanes[LANES];
  long dim = t->a->heads.head_dim;
  memset(to, 0, (size_t)(t->padded_dim * GROUP) * sizeof(float));
  for (long i = 0; i < count; i++)
    for (long d = 0; d < dim; d += LANES) {
      long n = min_long(LANES, dim - d);
      v_store(lanes, kv_load(type, rows[i] + d * kv_element_bytes(type), n));
      for (long j = 0; j < n; j++) to[GROUP * (d + j) + i] = lanes[j];
    }
}

void load_key_group(tile *t, long start, long count) {
  const qd_kv *kv = t->a->kv;
  const uint8_t *rows[GROUP];
  locate(t, kv->k, kv->k_stride, kv->k_scale, kv->k_scale_stride, start, count, rows, t->k_scales);
  if (t->a->int8_queries)
    load_keys_int8(t, rows, count);
  else
    load_keys_float(t, kv->type, rows, count);
}

void locate_values(const tile *t, long start, long count, const uint8_t *rows[GROUP], float *scales) {
  const qd_kv *kv = t->a->kv;
  locate(t, kv->v, kv->v_stride, kv->v_scale, kv->v_scale_stride, start, count, rows, scales);
}

INLINE void load_value_rows(tile *t, int type, const uint8_t *rows[GROUP], long count) {
  long dim = t->a->heads.head_dim, size = kv_element_bytes(type), stride = t->padded_dim;
  float *to = t->v_tile;
  for (long i = 0; i < count; i++, to += stride) {
    const uint8_t *row = rows[i];
    long d = 0;
    for (; d + LANES <= dim; d += LANES) v_store(to + d, kv_load(type, row + d * size, LANES));
    if (d < dim) v_store(to + d, kv_load(type, row + d * size, dim - d)), d += LANES;
    if (d < stride) v_store(to + d, v_zero());
  }
}

void load_value_group(tile *t, const uint8_t *rows[GROUP], long count) {
  switch (t->a->kv->type) {
    case KV_INT8: load_value_rows(t, KV_INT8, rows, count); break;
    case KV_FP16: load_value_rows(t, KV_FP16, rows, count); break;
    case KV_BF16: load_value_rows(t, KV_BF16, rows, count); break;
    default: load_value_rows(t, KV_FP32, rows, count);
  }
}
