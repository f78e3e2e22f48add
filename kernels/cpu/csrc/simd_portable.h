/* Plain C: the definition of every lane operation, and the path for CPUs without a better one. */
#define PATH_NAME "portable"
#define DOT_TAKES_8_BITS 1
#define TILE_ROWS 4
#define SHARED_ROWS 2
#define SHARED_VECTORS 2

typedef struct { float v[LANES]; } v16;
typedef struct { int32_t v[LANES]; } vi16;
typedef struct { uint8_t v[4 * LANES]; } codes;
typedef vi16 dot;
typedef codes paired;

#define EACH_LANE(i) for (int i = 0; i < LANES; i++)

INLINE float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023, bits;
  float f;
  if (exponent == 0) {
    f = (float)mantissa * 0x1p-24f;
    memcpy(&bits, &f, 4);
    bits |= sign;
  } else {
    bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
  }
  memcpy(&f, &bits, 4);
  return f;
}

INLINE uint16_t half_from_float(float f) {
  uint32_t bits, sign;
  memcpy(&bits, &f, 4);
  sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (bits < 0x38800000) { /* subnormal: let the float adder round at 2^-24 */
    float t;
    memcpy(&t, &bits, 4);
    return (uint16_t)(sign | (uint32_t)nearbyintf(t * 0x1p24f));
  }
  bits += 0xfff + (bits >> 13 & 1);
  return (uint16_t)(sign | ((bits >> 13) - (112 << 10)));
}

INLINE v16 v_load(const float *p) { v16 r; memcpy(&r, p, sizeof r); return r; }
INLINE void v_store(float *p, v16 x) { memcpy(p, &x, sizeof x); }
INLINE v16 v_set1(float x) { v16 r; EACH_LANE(i) r.v[i] = x; return r; }
INLINE v16 v_add(v16 a, v16 b) { EACH_LANE(i) a.v[i] += b.v[i]; return a; }
INLINE v16 v_sub(v16 a, v16 b) { EACH_LANE(i) a.v[i] -= b.v[i]; return a; }
INLINE v16 v_mul(v16 a, v16 b) { EACH_LANE(i) a.v[i] *= b.v[i]; return a; }
INLINE v16 v_div(v16 a, v16 b) { EACH_LANE(i) a.v[i] /= b.v[i]; return a; }
INLINE v16 v_fma(v16 a, v16 b, v16 c) { EACH_LANE(i) c.v[i] = fmaf(a.v[i], b.v[i], c.v[i]); return c; }
/* A NaN in either operand gives the second. */
INLINE v16 v_max(v16 a, v16 b) { EACH_LANE(i) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
INLINE v16 v_min(v16 a, v16 b) { EACH_LANE(i) a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
INLINE v16 v_abs(v16 a) { EACH_LANE(i) a.v[i] = fabsf(a.v[i]); return a; }
INLINE v16 v_round(v16 a) { EACH_LANE(i) a.v[i] = nearbyintf(a.v[i]); return a; }

/* 2^n for whole n in -126..127. */
INLINE v16 v_pow2(v16 n) {
  v16 r;
  EACH_LANE(i) {
    uint32_t bits = n.v[i] >= -126.0f && n.v[i] <= 127.0f ? (uint32_t)((int32_t)n.v[i] + 127) << 23 : 0x7fc00000u;
    memcpy(&r.v[i], &bits, 4);
  }
  return r;
}

/* Lanes first..last-1 of x, the others of other. */
INLINE v16 v_keep(v16 x, long first, long last, v16 other) {
  EACH_LANE(i) x.v[i] = i >= first && i < last ? x.v[i] : other.v[i];
  return x;
}

/* Sums lanes i and i + 8, then i and i + 4, i + 2, i + 1. */
INLINE float v_sum(v16 x) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) x.v[i] += x.v[i + half];
  return x.v[0];
}

INLINE float v_max_lane(v16 x) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) x.v[i] = x.v[i] > x.v[i + half] ? x.v[i] : x.v[i + half];
  return x.v[0];
}

INLINE v16 v_load_half(const void *p) {
  v16 r;
  uint16_t h[LANES];
  memcpy(h, p, sizeof h);
  EACH_LANE(i) r.v[i] = half_to_float(h[i]);
  return r;
}

INLINE void v_store_half(void *p, v16 x) {
  uint16_t h[LANES];
  EACH_LANE(i) h[i] = half_from_float(x.v[i]);
  memcpy(p, h, sizeof h);
}

INLINE v16 v_load_bf16(const void *p) {
  v16 r;
  uint16_t h[LANES];
  memcpy(h, p, sizeof h);
  EACH_LANE(i) {
    uint32_t bits = (uint32_t)h[i] << 16;
    memcpy(&r.v[i], &bits, 4);
  }
  return r;
}

INLINE v16 v_load_u8(const uint8_t *p) { v16 r; EACH_LANE(i) r.v[i] = p[i]; return r; }
INLINE v16 v_load_i8(const int8_t *p) { v16 r; EACH_LANE(i) r.v[i] = p[i]; return r; }
/* Whole numbers in -128..127. */
INLINE void v_store_i8(int8_t *p, v16 x) { EACH_LANE(i) p[i] = (int8_t)x.v[i]; }

/* The same for -32767..32767, each four in the order that paired_dot_add wants. */
INLINE void v_store_i16_paired(int16_t *p, v16 x) {
  static const int order[4] = {0, 2, 1, 3};
  EACH_LANE(i) p[i] = (int16_t)x.v[i / 4 * 4 + order[i % 4]];
}

INLINE vi16 vi_set1(int32_t x) { vi16 r; EACH_LANE(i) r.v[i] = x; return r; }
INLINE vi16 vi_add(vi16 a, vi16 b) { EACH_LANE(i) a.v[i] += b.v[i]; return a; }
INLINE vi16 vi_shift4(vi16 a) { EACH_LANE(i) a.v[i] *= 16; return a; }
INLINE v16 vi_float(vi16 a) { v16 r; EACH_LANE(i) r.v[i] = (float)a.v[i]; return r; }

INLINE codes codes_load(const uint8_t *p) { codes r; memcpy(&r, p, sizeof r); return r; }
INLINE void codes_store(uint8_t *p, codes x) { memcpy(p, &x, sizeof x); }
/* (x >> shift) & mask per byte; mask < 2^(8 - shift). */
INLINE codes codes_field(codes x, int shift, int mask) {
  for (int i = 0; i < 4 * LANES; i++) x.v[i] = (uint8_t)(x.v[i] >> shift & mask);
  return x;
}
/* low | high << 2 per byte, for codes without common bits. */
INLINE codes codes_join(codes low, codes high) {
  for (int i = 0; i < 4 * LANES; i++) low.v[i] = (uint8_t)(low.v[i] | high.v[i] << 2);
  return low;
}
/* Byte j of each group of four, as float. */
INLINE v16 codes_byte(codes x, int j) { v16 r; EACH_LANE(i) r.v[i] = x.v[4 * i + j]; return r; }

/* x, where a path must hinder its compiler from loading it again and again. */
INLINE codes codes_keep(codes x) { return x; }

/* Lane i += sum of codes[4i + j] * x[j], j = 0..3. At most 8 of them between dot_zero and dot_ints. */
INLINE dot dot_zero(void) { return vi_set1(0); }
INLINE dot dot_add(dot d, codes c, const int8_t *x) {
  EACH_LANE(i) for (int j = 0; j < 4; j++) d.v[i] += c.v[4 * i + j] * x[j];
  return d;
}
INLINE vi16 dot_ints(dot d) { return d; }

/* Lane i += sum of codes[4i + j] * x_j, where x holds x_0, x_2, x_1, x_3: bytes become words by a mask and a shift then.
 * Sums of 32 products of codes up to 255 and INT16 fit. */
INLINE paired codes_pair(codes c) { return c; }
INLINE vi16 paired_dot_add(vi16 d, paired c, const int16_t *x) {
  EACH_LANE(i) d.v[i] += c.v[4 * i] * x[0] + c.v[4 * i + 2] * x[1] + c.v[4 * i + 1] * x[2] + c.v[4 * i + 3] * x[3];
  return d;
}

/* Signed bytes k in -127..127 as key_dot_add takes them: shifted by KEY_SHIFT where a path's dots want one factor
 * without a sign. Lane i += sum of (k + KEY_SHIFT)[4i + j] * x[j]. */
#define KEY_SHIFT 128
INLINE codes keys_shifted(codes k) {
  for (int i = 0; i < 4 * LANES; i++) k.v[i] ^= 0x80;
  return k;
}
INLINE vi16 key_dot_add(vi16 d, codes k, const int8_t *x) { return dot_add(d, k, x); }

/* 16 rows of 64 bytes, as 4-byte words: word w of row i becomes word i of the w-th 64 bytes of out. */
INLINE void words_transpose(const uint8_t *const rows[LANES], uint8_t *out) {
  for (int i = 0; i < LANES; i++)
    for (int w = 0; w < LANES; w++) memcpy(out + 64 * w + 4 * i, rows[i] + 4 * w, 4);
}

INLINE void cpu_relax(void) {}
