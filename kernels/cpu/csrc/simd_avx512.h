/* AVX-512 with VNNI: one register holds all lanes, one instruction is a dot of four bytes per lane. */
#include <immintrin.h>
#define PATH_NAME "avx512-vnni"
#define DOT_TAKES_8_BITS 1
#define TILE_ROWS 8
#define SHARED_ROWS 4
#define SHARED_VECTORS 4

typedef __m512 v16;
typedef __m512i vi16;
typedef __m512i codes;
typedef __m512i dot;
typedef struct { __m512i even, odd; } paired;

INLINE v16 v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, v16 x) { _mm512_storeu_ps(p, x); }
INLINE v16 v_set1(float x) { return _mm512_set1_ps(x); }
INLINE v16 v_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
INLINE v16 v_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
INLINE v16 v_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
INLINE v16 v_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
INLINE v16 v_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE v16 v_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
INLINE v16 v_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
INLINE v16 v_abs(v16 a) { return _mm512_abs_ps(a); }
INLINE v16 v_round(v16 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

INLINE v16 v_pow2(v16 n) {
  __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
  __mmask16 bad = _mm512_cmp_ps_mask(n, n, _CMP_UNORD_Q);
  return _mm512_mask_blend_ps(bad, _mm512_castsi512_ps(bits), n);
}

INLINE v16 v_keep(v16 x, long first, long last, v16 other) {
  long a = first < 0 ? 0 : first > LANES ? LANES : first, b = last < 0 ? 0 : last > LANES ? LANES : last;
  __mmask16 keep = (__mmask16)(((1u << b) - 1) & ~((1u << a) - 1));
  return _mm512_mask_blend_ps(keep, other, x);
}

INLINE float v_sum(v16 x) {
  __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_add_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}

INLINE float v_max_lane(v16 x) {
  __m256 y = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_max_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
}

INLINE v16 v_load_half(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
INLINE void v_store_half(void *p, v16 x) {
  _mm256_storeu_si256(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE v16 v_load_bf16(const void *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}
INLINE v16 v_load_u8(const uint8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p)));
}
INLINE v16 v_load_i8(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
}
INLINE void v_store_i8(int8_t *p, v16 x) {
  _mm_storeu_si128((void *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}

INLINE void v_store_i16_paired(int16_t *p, v16 x) {
  __m256i w = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x));
  _mm256_storeu_si256((void *)p, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(w, 0xd8), 0xd8));
}

INLINE vi16 vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vi16 vi_add(vi16 a, vi16 b) { return _mm512_add_epi32(a, b); }
INLINE vi16 vi_shift4(vi16 a) { return _mm512_slli_epi32(a, 4); }
INLINE v16 vi_float(vi16 a) { return _mm512_cvtepi32_ps(a); }

INLINE codes codes_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
INLINE void codes_store(uint8_t *p, codes x) { _mm512_storeu_si512(p, x); }
INLINE codes codes_field(codes x, int shift, int mask) {
  return _mm512_and_si512(_mm512_srli_epi16(x, (unsigned)shift), _mm512_set1_epi8((char)mask));
}
INLINE codes codes_join(codes low, codes high) { return _mm512_or_si512(low, _mm512_slli_epi16(high, 2)); }
INLINE v16 codes_byte(codes x, int j) {
  return _mm512_cvtepi32_ps(
      _mm512_and_si512(_mm512_srli_epi32(x, (unsigned)(8 * j)), _mm512_set1_epi32(255)));
}

INLINE codes codes_keep(codes x) { return x; }

INLINE dot dot_zero(void) { return _mm512_setzero_si512(); }
INLINE dot dot_add(dot d, codes c, const int8_t *x) {
  int32_t x4;
  memcpy(&x4, x, 4);
  return _mm512_dpbusd_epi32(d, c, _mm512_set1_epi32(x4));
}
INLINE vi16 dot_ints(dot d) { return d; }

INLINE __m512i broadcast_pair(const int16_t *x) {
  int32_t x2;
  memcpy(&x2, x, 4);
  return _mm512_set1_epi32(x2);
}
INLINE paired codes_pair(codes c) {
  return (paired){_mm512_and_si512(c, _mm512_set1_epi16(255)), _mm512_srli_epi16(c, 8)};
}
INLINE vi16 paired_dot_add(vi16 d, paired c, const int16_t *x) {
  return _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(d, c.even, broadcast_pair(x)), c.odd, broadcast_pair(x + 2));
}

#define KEY_SHIFT 128
INLINE codes keys_shifted(codes k) { return _mm512_xor_si512(k, _mm512_set1_epi8((char)0x80)); }
INLINE vi16 key_dot_add(vi16 d, codes k, const int8_t *x) { return dot_add(d, k, x); }

INLINE void words_transpose(const uint8_t *const rows[LANES], uint8_t *out) {
  __m512i r[16], p[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(rows[i]);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    p[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    p[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(p[i + j], p[i + 2 + j]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(p[i + j], p[i + 2 + j]);
    }
  /* r[4 g + c]: rows 4 g .. 4 g + 3 of words c, c + 4, c + 8, c + 12, one in each quarter. */
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x44), b = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xee);
    __m512i d = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x44), e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xee);
    _mm512_storeu_si512(out + 64 * c, _mm512_shuffle_i32x4(a, d, 0x88));
    _mm512_storeu_si512(out + 64 * (c + 4), _mm512_shuffle_i32x4(a, d, 0xdd));
    _mm512_storeu_si512(out + 64 * (c + 8), _mm512_shuffle_i32x4(b, e, 0x88));
    _mm512_storeu_si512(out + 64 * (c + 12), _mm512_shuffle_i32x4(b, e, 0xdd));
  }
}

INLINE void cpu_relax(void) { _mm_pause(); }
