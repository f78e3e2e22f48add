/* One head vector in the pool: where it lies and how it is read and written. */
#ifndef QD_KV_H
#define QD_KV_H

#include "abi.h"
#include "rows.h"

enum { KV_FP32, KV_FP16, KV_BF16, KV_INT8 };

INLINE long kv_at(const int64_t stride[3], long block, long head, long token) {
  return block * stride[0] + head * stride[1] + token * stride[2];
}

INLINE long kv_element_bytes(int type) { return type == KV_FP32 ? 4 : type == KV_INT8 ? 1 : 2; }

INLINE uint16_t bf16_from_float(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* n <= 16 elements from x, as `type`. */
INLINE void kv_store_floats(int type, uint8_t *to, v16 x, long n) {
  uint16_t half[LANES];
  float lanes[LANES];
  if (type == KV_FP32) {
    v_store_n((float *)(void *)to, x, n);
    return;
  }
  if (type == KV_FP16) {
    v_store_half(half, x);
  } else {
    v_store(lanes, x);
    for (int i = 0; i < LANES; i++) half[i] = bf16_from_float(lanes[i]);
  }
  memcpy(to, half, (size_t)n * 2);
}

/* n <= 16 elements as floats, codes unscaled; the other lanes read as zero. */
INLINE v16 kv_load(int type, const uint8_t *from, long n) {
  uint8_t bytes[4 * LANES] = {0};
  if (n < LANES) {
    memcpy(bytes, from, (size_t)(n * kv_element_bytes(type)));
    from = bytes;
  }
  switch (type) {
    case KV_INT8: return v_load_i8((const int8_t *)from);
    case KV_FP16: return v_load_half(from);
    case KV_BF16: return v_load_bf16(from);
    default: return v_load((const float *)(const void *)from);
  }
}

/* codes = round(x / scale), scale = absmax / 127; NaN or infinite x: scale NaN, codes 0. Returns the scale. */
INLINE float kv_quantize(const float *x, int8_t *to, long n) {
  v16 largest = v_zero(), bad = v_zero();
  for (long i = 0; i < n; i += LANES) {
    v16 v = v_load_n(x + i, n - i);
    largest = v_max(largest, v_abs(v));
    bad = v_fma(v, v_zero(), bad);
  }
  float absmax = v_max_lane(largest), scale = absmax / 127.0f, not_finite = v_sum(bad);
  int usable = not_finite == 0.0f && scale > 0.0f;
  for (long i = 0; i < n; i += LANES) {
    int8_t lanes[LANES];
    v16 q = usable ? v_round(v_div(v_load_n(x + i, n - i), v_set1(scale))) : v_zero();
    v_store_i8(lanes, v_max(v_set1(-127.0f), v_min(v_set1(127.0f), q)));
    memcpy(to + i, lanes, (size_t)min_long(LANES, n - i));
  }
  return not_finite == 0.0f ? scale : not_finite;
}

#endif
