/* Sixteen lanes of float, and the small integer dot products, on whatever the CPU has.
 *
 * Every kernel is written once on these types. Each operation is one correctly rounded IEEE operation per lane
 * (or exact integer arithmetic), and sums across lanes have one fixed order, so all back ends give the same bits. */
#ifndef QD_SIMD_H
#define QD_SIMD_H

#include <stdint.h>
#include <string.h>
#include <math.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

#if defined(QD_PORTABLE)
#include "simd_portable.h"
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif

/* Before short loops of constant length over registers. Plain C is left rolled: it would take a minute to compile. */
#if defined(EACH_LANE)
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

/* 8-bit codes are kept as one plane where `dot_add` takes all of 0..255, else as low and high nibbles. */
#define WIDE_PLANES (DOT_TAKES_8_BITS ? 1 : 2)

INLINE v16 v_zero(void) { return v_set1(0.0f); }

/* Back ends also say what fits their registers: TILE_ROWS rows of a matrix product, and in attention SHARED_ROWS rows
 * over the same keys or SHARED_VECTORS vectors of the same values. */

/* n <= 16 floats; the other lanes read as zero and are not written. */
INLINE v16 v_load_n(const float *p, long n) {
  float t[LANES] = {0};
  if (n >= LANES) return v_load(p);
  for (long i = 0; i < n; i++) t[i] = p[i];
  return v_load(t);
}

INLINE void v_store_n(float *p, v16 x, long n) {
  float t[LANES];
  if (n >= LANES) {
    v_store(p, x);
    return;
  }
  v_store(t, x);
  for (long i = 0; i < n; i++) p[i] = t[i];
}

INLINE long ceil_div(long a, long b) { return (a + b - 1) / b; }
INLINE long round_up(long a, long b) { return ceil_div(a, b) * b; }
INLINE long min_long(long a, long b) { return a < b ? a : b; }
INLINE long max_long(long a, long b) { return a > b ? a : b; }

#endif
