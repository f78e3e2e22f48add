/* arm64 with the dot product extension: four registers hold the lanes. */
#include <arm_neon.h>
#define TILE_ROWS 4
#define SHARED_ROWS 2
#define SHARED_VECTORS 2
#ifdef __ARM_FEATURE_MATMUL_INT8
#define PATH_NAME "neon-i8mm"
#define DOT_TAKES_8_BITS 1
#else
#define PATH_NAME "neon-dotprod"
#define DOT_TAKES_8_BITS 0
#endif

typedef struct { float32x4_t v[4]; } v16;
typedef struct { int32x4_t v[4]; } vi16;
typedef struct { uint8x16_t v[4]; } codes;
typedef vi16 dot;
typedef struct { uint16x8_t even[4], odd[4]; } paired;

#define EACH(i) for (int i = 0; i < 4; i++)

INLINE v16 v_load(const float *p) { v16 r; EACH(i) r.v[i] = vld1q_f32(p + 4 * i); return r; }
INLINE void v_store(float *p, v16 x) { EACH(i) vst1q_f32(p + 4 * i, x.v[i]); }
INLINE v16 v_set1(float x) { v16 r; EACH(i) r.v[i] = vdupq_n_f32(x); return r; }
INLINE v16 v_add(v16 a, v16 b) { EACH(i) a.v[i] = vaddq_f32(a.v[i], b.v[i]); return a; }
INLINE v16 v_sub(v16 a, v16 b) { EACH(i) a.v[i] = vsubq_f32(a.v[i], b.v[i]); return a; }
INLINE v16 v_mul(v16 a, v16 b) { EACH(i) a.v[i] = vmulq_f32(a.v[i], b.v[i]); return a; }
INLINE v16 v_div(v16 a, v16 b) { EACH(i) a.v[i] = vdivq_f32(a.v[i], b.v[i]); return a; }
INLINE v16 v_fma(v16 a, v16 b, v16 c) { EACH(i) c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]); return c; }
/* vmaxq would give NaN for a NaN in either operand; the contract is the second operand. */
INLINE float32x4_t max_4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE v16 v_max(v16 a, v16 b) { EACH(i) a.v[i] = max_4(a.v[i], b.v[i]); return a; }
INLINE v16 v_min(v16 a, v16 b) { EACH(i) a.v[i] = vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); return a; }
INLINE v16 v_abs(v16 a) { EACH(i) a.v[i] = vabsq_f32(a.v[i]); return a; }
INLINE v16 v_round(v16 a) { EACH(i) a.v[i] = vrndnq_f32(a.v[i]); return a; }

INLINE v16 v_pow2(v16 n) {
  EACH(i) {
    int32x4_t bits = vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23);
    n.v[i] = vbslq_f32(vceqq_f32(n.v[i], n.v[i]), vreinterpretq_f32_s32(bits), n.v[i]);
  }
  return n;
}

INLINE v16 v_keep(v16 x, long first, long last, v16 other) {
  static const int32_t lanes[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  long a = first < 0 ? 0 : first > LANES ? LANES : first, b = last < 0 ? 0 : last > LANES ? LANES : last;
  EACH(i) {
    int32x4_t lane = vld1q_s32(lanes + 4 * i);
    uint32x4_t keep = vandq_u32(vcgeq_s32(lane, vdupq_n_s32((int32_t)a)), vcltq_s32(lane, vdupq_n_s32((int32_t)b)));
    x.v[i] = vbslq_f32(keep, x.v[i], other.v[i]);
  }
  return x;
}

INLINE float v_sum(v16 x) {
  float32x4_t y = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
  float32x2_t z = vadd_f32(vget_low_f32(y), vget_high_f32(y));
  return vget_lane_f32(z, 0) + vget_lane_f32(z, 1);
}

/* The pairs of v_sum. */
INLINE float v_max_lane(v16 x) {
  float32x4_t y = max_4(max_4(x.v[0], x.v[2]), max_4(x.v[1], x.v[3]));
  y = max_4(y, vextq_f32(y, y, 2));
  return vgetq_lane_f32(max_4(y, vextq_f32(y, y, 1)), 0);
}

INLINE v16 v_load_half(const void *p) {
  v16 r;
  EACH(i) r.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p + 4 * i)));
  return r;
}
INLINE void v_store_half(void *p, v16 x) {
  EACH(i) vst1_u16((uint16_t *)p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.v[i])));
}
INLINE v16 v_load_bf16(const void *p) {
  v16 r;
  EACH(i) r.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)p + 4 * i), 16));
  return r;
}
INLINE v16 v_load_u8(const uint8_t *p) {
  v16 r;
  uint8x16_t x = vld1q_u8(p);
  uint16x8_t lo = vmovl_u8(vget_low_u8(x)), hi = vmovl_u8(vget_high_u8(x));
  r.v[0] = vcvtq_f32_u32(vmovl_u16(vget_low_u16(lo)));
  r.v[1] = vcvtq_f32_u32(vmovl_u16(vget_high_u16(lo)));
  r.v[2] = vcvtq_f32_u32(vmovl_u16(vget_low_u16(hi)));
  r.v[3] = vcvtq_f32_u32(vmovl_u16(vget_high_u16(hi)));
  return r;
}
INLINE v16 v_load_i8(const int8_t *p) {
  v16 r;
  int8x16_t x = vld1q_s8(p);
  int16x8_t lo = vmovl_s8(vget_low_s8(x)), hi = vmovl_s8(vget_high_s8(x));
  r.v[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo)));
  r.v[1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(lo)));
  r.v[2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi)));
  r.v[3] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(hi)));
  return r;
}
INLINE void v_store_i8(int8_t *p, v16 x) {
  int16x8_t lo = vcombine_s16(vmovn_s32(vcvtq_s32_f32(x.v[0])), vmovn_s32(vcvtq_s32_f32(x.v[1])));
  int16x8_t hi = vcombine_s16(vmovn_s32(vcvtq_s32_f32(x.v[2])), vmovn_s32(vcvtq_s32_f32(x.v[3])));
  vst1q_s8(p, vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
}

INLINE void v_store_i16_paired(int16_t *p, v16 x) {
  EACH(i) {
    int16x4_t w = vmovn_s32(vcvtq_s32_f32(x.v[i]));
    int16x4x2_t pairs = vuzp_s16(w, w);
    vst1_s16(p + 4 * i, vreinterpret_s16_s32(vzip_s32(vreinterpret_s32_s16(pairs.val[0]),
                                                      vreinterpret_s32_s16(pairs.val[1])).val[0]));
  }
}

INLINE vi16 vi_set1(int32_t x) { vi16 r; EACH(i) r.v[i] = vdupq_n_s32(x); return r; }
INLINE vi16 vi_add(vi16 a, vi16 b) { EACH(i) a.v[i] = vaddq_s32(a.v[i], b.v[i]); return a; }
INLINE vi16 vi_shift4(vi16 a) { EACH(i) a.v[i] = vshlq_n_s32(a.v[i], 4); return a; }
INLINE v16 vi_float(vi16 a) { v16 r; EACH(i) r.v[i] = vcvtq_f32_s32(a.v[i]); return r; }

INLINE codes codes_load(const uint8_t *p) { codes r; EACH(i) r.v[i] = vld1q_u8(p + 16 * i); return r; }
INLINE void codes_store(uint8_t *p, codes x) { EACH(i) vst1q_u8(p + 16 * i, x.v[i]); }
INLINE codes codes_field(codes x, int shift, int mask) {
  EACH(i) x.v[i] = vandq_u8(vshlq_u8(x.v[i], vdupq_n_s8((int8_t)-shift)), vdupq_n_u8((uint8_t)mask));
  return x;
}
INLINE codes codes_join(codes low, codes high) {
  EACH(i) low.v[i] = vorrq_u8(low.v[i], vshlq_n_u8(high.v[i], 2));
  return low;
}
INLINE v16 codes_byte(codes x, int j) {
  v16 r;
  EACH(i) {
    uint32x4_t word = vshlq_u32(vreinterpretq_u32_u8(x.v[i]), vdupq_n_s32(-8 * j));
    r.v[i] = vcvtq_f32_u32(vandq_u32(word, vdupq_n_u32(255)));
  }
  return r;
}

INLINE codes codes_keep(codes x) { return x; }

INLINE dot dot_zero(void) { return vi_set1(0); }
INLINE dot dot_add(dot d, codes c, const int8_t *x) {
  int32_t word;
  memcpy(&word, x, 4);
  int8x16_t x4 = vreinterpretq_s8_s32(vdupq_n_s32(word));
#if DOT_TAKES_8_BITS
  EACH(i) d.v[i] = vusdotq_s32(d.v[i], c.v[i], x4);
#else
  EACH(i) d.v[i] = vdotq_s32(d.v[i], vreinterpretq_s8_u8(c.v[i]), x4);
#endif
  return d;
}
INLINE vi16 dot_ints(dot d) { return d; }

INLINE paired codes_pair(codes c) {
  paired r;
  EACH(i) {
    r.even[i] = vandq_u16(vreinterpretq_u16_u8(c.v[i]), vdupq_n_u16(255));
    r.odd[i] = vshrq_n_u16(vreinterpretq_u16_u8(c.v[i]), 8);
  }
  return r;
}
INLINE int32x4_t pair_sums(uint16x8_t c, const int16_t *x) {
  int32_t x2;
  memcpy(&x2, x, 4);
  int16x8_t a = vreinterpretq_s16_u16(c), b = vreinterpretq_s16_s32(vdupq_n_s32(x2));
  return vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
}
INLINE vi16 paired_dot_add(vi16 d, paired c, const int16_t *x) {
  EACH(i) d.v[i] = vaddq_s32(d.v[i], vaddq_s32(pair_sums(c.even[i], x), pair_sums(c.odd[i], x + 2)));
  return d;
}

#define KEY_SHIFT 0
INLINE codes keys_shifted(codes k) { return k; }
INLINE vi16 key_dot_add(vi16 d, codes k, const int8_t *x) {
  int32_t word;
  memcpy(&word, x, 4);
  EACH(i) d.v[i] = vdotq_s32(d.v[i], vreinterpretq_s8_u8(k.v[i]), vreinterpretq_s8_s32(vdupq_n_s32(word)));
  return d;
}

INLINE void words_transpose(const uint8_t *const rows[LANES], uint8_t *out) {
  for (int i = 0; i < LANES; i += 4)
    for (int w = 0; w < LANES; w += 4) {
      uint32x4x4_t words;
      for (int j = 0; j < 4; j++) words.val[j] = vreinterpretq_u32_u8(vld1q_u8(rows[i + j] + 4 * w));
      uint32x4x2_t a = vzipq_u32(words.val[0], words.val[2]), b = vzipq_u32(words.val[1], words.val[3]);
      uint32x4x2_t low = vzipq_u32(a.val[0], b.val[0]), high = vzipq_u32(a.val[1], b.val[1]);
      vst1q_u8(out + 64 * w + 4 * i, vreinterpretq_u8_u32(low.val[0]));
      vst1q_u8(out + 64 * (w + 1) + 4 * i, vreinterpretq_u8_u32(low.val[1]));
      vst1q_u8(out + 64 * (w + 2) + 4 * i, vreinterpretq_u8_u32(high.val[0]));
      vst1q_u8(out + 64 * (w + 3) + 4 * i, vreinterpretq_u8_u32(high.val[1]));
    }
}

INLINE void cpu_relax(void) { __asm__ __volatile__("yield"); }
