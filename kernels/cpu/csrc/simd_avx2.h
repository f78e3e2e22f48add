/* AVX2, F16C and FMA: two registers hold the lanes. maddubs adds byte products in saturating 16 bits, which codes of at
 * most 15 cannot reach: 8 dots of 2 * 15 * 127 are 30480. With AVX-VNNI a dot is one instruction. */
#include <immintrin.h>
#define TILE_ROWS 4
#define SHARED_ROWS 4
#define SHARED_VECTORS 1
#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define PATH_NAME "avx2-vnni"
#define DOT_TAKES_8_BITS 1
#else
#define PATH_NAME "avx2"
#define DOT_TAKES_8_BITS 0
#endif

typedef struct { __m256 a, b; } v16;
typedef struct { __m256i a, b; } vi16;
typedef vi16 codes;
typedef vi16 dot;
typedef struct { vi16 even, odd; } paired;

INLINE v16 v_pair(__m256 a, __m256 b) { return (v16){a, b}; }
INLINE vi16 vi_pair(__m256i a, __m256i b) { return (vi16){a, b}; }

INLINE v16 v_load(const float *p) { return v_pair(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
INLINE void v_store(float *p, v16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
INLINE v16 v_set1(float x) { return v_pair(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
INLINE v16 v_add(v16 x, v16 y) { return v_pair(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
INLINE v16 v_sub(v16 x, v16 y) { return v_pair(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
INLINE v16 v_mul(v16 x, v16 y) { return v_pair(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
INLINE v16 v_div(v16 x, v16 y) { return v_pair(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
INLINE v16 v_fma(v16 x, v16 y, v16 z) {
  return v_pair(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b));
}
INLINE v16 v_max(v16 x, v16 y) { return v_pair(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
INLINE v16 v_min(v16 x, v16 y) { return v_pair(_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)); }
INLINE v16 v_abs(v16 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return v_pair(_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b));
}
INLINE v16 v_round(v16 x) {
  return v_pair(_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

INLINE __m256 pow2_8(__m256 n) {
  __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_blendv_ps(_mm256_castsi256_ps(bits), n, _mm256_cmp_ps(n, n, _CMP_UNORD_Q));
}
INLINE v16 v_pow2(v16 n) { return v_pair(pow2_8(n.a), pow2_8(n.b)); }

INLINE __m256 keep_8(__m256 x, int first, int last, __m256 other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256i keep = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane),
                                     _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane));
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(keep));
}
INLINE v16 v_keep(v16 x, long first, long last, v16 other) {
  int a = first < 0 ? 0 : first > LANES ? LANES : (int)first, b = last < 0 ? 0 : last > LANES ? LANES : (int)last;
  return v_pair(keep_8(x.a, a, b, other.a), keep_8(x.b, a - 8, b - 8, other.b));
}

INLINE float v_sum(v16 x) {
  __m256 y = _mm256_add_ps(x.a, x.b);
  __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_add_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}

INLINE float v_max_lane(v16 x) {
  __m256 y = _mm256_max_ps(x.a, x.b);
  __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_max_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
}

INLINE __m128i load_128(const void *p, int i) { return _mm_loadu_si128((const __m128i *)p + i); }

INLINE v16 v_load_half(const void *p) {
  return v_pair(_mm256_cvtph_ps(load_128(p, 0)), _mm256_cvtph_ps(load_128(p, 1)));
}
INLINE void v_store_half(void *p, v16 x) {
  _mm_storeu_si128(p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128((__m128i *)p + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE __m256 bf16_8(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
INLINE v16 v_load_bf16(const void *p) { return v_pair(bf16_8(load_128(p, 0)), bf16_8(load_128(p, 1))); }
INLINE __m128i load_64(const void *p, int i) { return _mm_loadl_epi64((const void *)((const char *)p + 8 * i)); }
INLINE v16 v_load_u8(const uint8_t *p) {
  return v_pair(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_64(p, 0))),
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_64(p, 1))));
}
INLINE v16 v_load_i8(const int8_t *p) {
  return v_pair(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_64(p, 0))),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_64(p, 1))));
}
INLINE void v_store_i8(int8_t *p, v16 x) {
  __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  w = _mm256_permute4x64_epi64(w, 0xd8);
  _mm_storeu_si128((void *)p, _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}

INLINE __m128i order_pairs(__m128i x) { return _mm_shufflehi_epi16(_mm_shufflelo_epi16(x, 0xd8), 0xd8); }
INLINE void v_store_i16_paired(int16_t *p, v16 x) {
  __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  w = _mm256_permute4x64_epi64(w, 0xd8);
  _mm_storeu_si128((void *)p, order_pairs(_mm256_castsi256_si128(w)));
  _mm_storeu_si128((__m128i *)(void *)p + 1, order_pairs(_mm256_extracti128_si256(w, 1)));
}

INLINE vi16 vi_set1(int32_t x) { return vi_pair(_mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
INLINE vi16 vi_add(vi16 x, vi16 y) { return vi_pair(_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)); }
INLINE vi16 vi_shift4(vi16 x) { return vi_pair(_mm256_slli_epi32(x.a, 4), _mm256_slli_epi32(x.b, 4)); }
INLINE v16 vi_float(vi16 x) { return v_pair(_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)); }

INLINE codes codes_load(const uint8_t *p) {
  return vi_pair(_mm256_loadu_si256((const void *)p), _mm256_loadu_si256((const void *)(p + 32)));
}
INLINE void codes_store(uint8_t *p, codes x) {
  _mm256_storeu_si256((void *)p, x.a);
  _mm256_storeu_si256((void *)(p + 32), x.b);
}
INLINE codes codes_field(codes x, int shift, int mask) {
  const __m256i m = _mm256_set1_epi8((char)mask);
  return vi_pair(_mm256_and_si256(_mm256_srli_epi16(x.a, shift), m),
                 _mm256_and_si256(_mm256_srli_epi16(x.b, shift), m));
}
INLINE codes codes_join(codes low, codes high) {
  return vi_pair(_mm256_or_si256(low.a, _mm256_slli_epi16(high.a, 2)),
                 _mm256_or_si256(low.b, _mm256_slli_epi16(high.b, 2)));
}
INLINE v16 codes_byte(codes x, int j) {
  const __m256i m = _mm256_set1_epi32(255);
  return v_pair(_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x.a, 8 * j), m)),
                _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x.b, 8 * j), m)));
}

INLINE __m256i broadcast_4(const void *x) {
  int32_t x4;
  memcpy(&x4, x, 4);
  return _mm256_set1_epi32(x4);
}
/* The compiler would add in another order, for which it keeps all products of a block at once, most of them in memory. */
INLINE __m256i in_this_order(__m256i x) {
  __asm__("" : "+x"(x));
  return x;
}
#if defined(__AVXVNNI__) && !defined(__AVX512VNNI__)
#define DPWSSD _mm256_dpwssd_avx_epi32
#elif DOT_TAKES_8_BITS
#define DPWSSD _mm256_dpwssd_epi32
#else
#define DPWSSD(d, a, b) in_this_order(_mm256_add_epi32(d, _mm256_madd_epi16(a, b)))
#endif
INLINE paired codes_pair(codes c) {
  const __m256i low = _mm256_set1_epi16(255);
  return (paired){vi_pair(_mm256_and_si256(c.a, low), _mm256_and_si256(c.b, low)),
                  vi_pair(_mm256_srli_epi16(c.a, 8), _mm256_srli_epi16(c.b, 8))};
}
INLINE vi16 paired_dot_add(vi16 d, paired c, const int16_t *x) {
  __m256i even = broadcast_4(x), odd = broadcast_4(x + 2);
  return vi_pair(DPWSSD(DPWSSD(d.a, c.even.a, even), c.odd.a, odd), DPWSSD(DPWSSD(d.b, c.even.b, even), c.odd.b, odd));
}

INLINE codes codes_keep(codes x) { return vi_pair(in_this_order(x.a), in_this_order(x.b)); }

INLINE dot dot_zero(void) { return vi_set1(0); }
#if DOT_TAKES_8_BITS
#ifdef __AVXVNNI__
#define DPBUSD _mm256_dpbusd_avx_epi32
#else
#define DPBUSD _mm256_dpbusd_epi32
#endif
INLINE dot dot_add(dot d, codes c, const int8_t *x) {
  __m256i x4 = broadcast_4(x);
  return vi_pair(DPBUSD(d.a, c.a, x4), DPBUSD(d.b, c.b, x4));
}
INLINE vi16 dot_ints(dot d) { return d; }
#else
INLINE dot dot_add(dot d, codes c, const int8_t *x) {
  __m256i x4 = broadcast_4(x);
  return vi_pair(in_this_order(_mm256_add_epi16(d.a, _mm256_maddubs_epi16(c.a, x4))),
                 in_this_order(_mm256_add_epi16(d.b, _mm256_maddubs_epi16(c.b, x4))));
}
INLINE vi16 dot_ints(dot d) {
  const __m256i one = _mm256_set1_epi16(1);
  return vi_pair(_mm256_madd_epi16(d.a, one), _mm256_madd_epi16(d.b, one));
}
#endif

#if DOT_TAKES_8_BITS
#define KEY_SHIFT 128
INLINE codes keys_shifted(codes k) {
  const __m256i s = _mm256_set1_epi8((char)0x80);
  return vi_pair(_mm256_xor_si256(k.a, s), _mm256_xor_si256(k.b, s));
}
INLINE vi16 key_dot_add(vi16 d, codes k, const int8_t *x) { return dot_add(d, k, x); }
#else
#define KEY_SHIFT 0
INLINE codes keys_shifted(codes k) { return k; }
/* |x| times k with the sign of x: two products of at most 127 * 127 fit 16 bits. */
INLINE __m256i key_products(__m256i k, __m256i x, __m256i x_abs) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(x_abs, _mm256_sign_epi8(k, x)), _mm256_set1_epi16(1));
}
INLINE vi16 key_dot_add(vi16 d, codes k, const int8_t *x) {
  __m256i x4 = broadcast_4(x), x_abs = _mm256_abs_epi8(x4);
  return vi_pair(in_this_order(_mm256_add_epi32(d.a, key_products(k.a, x4, x_abs))),
                 in_this_order(_mm256_add_epi32(d.b, key_products(k.b, x4, x_abs))));
}
#endif

/* One 8 x 8 corner of it. */
INLINE void words_transpose_8(const uint8_t *const rows[8], int offset, uint8_t *out) {
  __m256i r[8], p[8], q[8];
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_si256((const void *)(rows[i] + offset));
  for (int i = 0; i < 8; i += 2) {
    p[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    p[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      q[i + 2 * j] = _mm256_unpacklo_epi64(p[i + j], p[i + 2 + j]);
      q[i + 2 * j + 1] = _mm256_unpackhi_epi64(p[i + j], p[i + 2 + j]);
    }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_si256((void *)(out + 64 * i), _mm256_permute2x128_si256(q[i], q[i + 4], 0x20));
    _mm256_storeu_si256((void *)(out + 64 * (i + 4)), _mm256_permute2x128_si256(q[i], q[i + 4], 0x31));
  }
}
INLINE void words_transpose(const uint8_t *const rows[LANES], uint8_t *out) {
  for (int i = 0; i < LANES; i += 8)
    for (int w = 0; w < LANES; w += 8) words_transpose_8(rows + i, 4 * w, out + 64 * w + 4 * i);
}

INLINE void cpu_relax(void) { _mm_pause(); }
