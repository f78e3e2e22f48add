/* Query and key norms, rotation, and writing keys and values into the pool: a chunk is a token and a key/value head
 * with the query heads that share it. */
#include "kv.h"
#include "norm.h"
#include "pool.h"

#define MAX_HEAD 1024

/* out = x rotated; cos, sin: the token's angles, element i paired with i + half. */
static void rotate(const float *x, const float *cos, const float *sin, long half, long head_dim, float *out) {
  for (long i = 0; i < half; i += LANES) {
    long n = half - i;
    v16 a = v_load_n(x + i, n), b = v_load_n(x + half + i, n), c = v_load_n(cos + i, n), s = v_load_n(sin + i, n);
    v_store_n(out + i, v_sub(v_mul(a, c), v_mul(b, s)), n);
    v_store_n(out + half + i, v_add(v_mul(b, c), v_mul(a, s)), n);
  }
  memcpy(out + 2 * half, x + 2 * half, (size_t)(head_dim - 2 * half) * sizeof(float));
}

static void norm_and_rotate(const qd_rope_args *a, const float *x, const float *norm, long position, float *out) {
  float normed[MAX_HEAD];
  long half = a->cos ? a->rotary_dim / 2 : 0, dim = a->heads.head_dim;
  if (norm) {
    rms_norm_row(x, norm, normed, dim, a->eps);
    x = normed;
  }
  rotate(x, a->cos + position * half, a->sin + position * half, half, dim, out);
}

static void write_vector(const qd_kv *kv, const float *x, long dim, void *data, const int64_t stride[3], float *scales,
                         const int64_t scale_stride[3], long slot, long head) {
  long block = slot / kv->block_size, token = slot % kv->block_size;
  uint8_t *to = (uint8_t *)data + kv_at(stride, block, head, token) * kv_element_bytes(kv->type);
  if (kv->type == KV_INT8) {
    scales[kv_at(scale_stride, block, head, token)] = kv_quantize(x, (int8_t *)to, dim);
    return;
  }
  for (long i = 0; i < dim; i += LANES)
    kv_store_floats(kv->type, to + i * kv_element_bytes(kv->type), v_load_n(x + i, dim - i),
                    min_long(LANES, dim - i));
}

static long num_chunks(const void *args, const qd_step *step, int phase, int num_threads) {
  (void)phase, (void)num_threads;
  return step->num_tokens * ((const qd_rope_args *)args)->heads.num_kv_heads;
}

static void chunk(const void *args, const qd_step *step, int phase, long index, qd_thread *thread) {
  const qd_rope_args *a = args;
  long kv_heads = a->heads.num_kv_heads, m = index / kv_heads, head = index % kv_heads, dim = a->heads.head_dim;
  long shared = a->heads.num_heads / kv_heads, position = step->positions[m], slot = step->slots[m];
  const float *row = a->qkv + m * (a->heads.num_heads + 2 * kv_heads) * dim;
  const float *key = row + (a->heads.num_heads + head) * dim, *value = key + kv_heads * dim;
  float rotated[MAX_HEAD];
  (void)phase, (void)thread;
  for (long i = head * shared; i < (head + 1) * shared; i++)
    norm_and_rotate(a, row + i * dim, a->q_norm, position, a->out + (m * a->heads.num_heads + i) * dim);
  norm_and_rotate(a, key, a->k_norm, position, rotated);
  write_vector(a->kv, rotated, dim, a->kv->k, a->kv->k_stride, a->kv->k_scale, a->kv->k_scale_stride, slot, head);
  write_vector(a->kv, value, dim, a->kv->v, a->kv->v_stride, a->kv->v_scale, a->kv->v_scale_stride, slot, head);
}

const qd_kernel rope_kernel = {.num_phases = 1, .num_chunks = num_chunks, .chunk = chunk};
