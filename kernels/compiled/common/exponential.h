// The exponential function of a vector, and reciprocals.
#pragma once

#include "common/elements.h"

// Return e^x as 2^n e^r with |r| <= ln(2) / 2, and e^r by a polynomial, with an error below 1e-8. Overflow is infinity.
static inline Vec exponential(Vec x) {
  constexpr float LOWEST = -87, HIGHEST = 104, TO_INTEGER = 3 << 22;  // a float whose unit in the last place is 1
  static constexpr float POLYNOMIAL[] = {0.00836874545f, 0.041668389f, 0.166665211f, 0.49999994f, 1, 1};
  x = at_most(HIGHEST, at_least(LOWEST, x));
  const Vec shifted = x * 1.44269504f + TO_INTEGER, n = shifted - TO_INTEGER;
  const Vec r = x - n * 0.693145752f - n * 1.42860677e-6f;  // ln(2) in two parts; n times the first is exact
  Vec sum = broadcast(0.00138145394f);
#pragma GCC unroll 6
  for (const float coefficient : POLYNOMIAL) sum = sum * r + coefficient;
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_scalef_ps(0xffff, (__m512)sum, (__m512)n);
#else
  const Bits exponent = (Bits)shifted - (Bits)broadcast(TO_INTEGER), half = (Bits)(Lanes(exponent) >> 1);
  return sum * (Vec)((half + 127) << 23) * (Vec)((exponent - half + 127) << 23);  // 2^n may overflow
#endif
}

INLINE Vec silu_inlined(Vec y) { return y / (1 + exponential(-y)); }

// Return 1 / x with an error of at most one unit in the last place.
INLINE Vec reciprocal(Vec x) {
#if defined(__AVX512F__)  // an estimate of 14 bits, and one step of Newton's method, but not of zero and infinity
  const __m512 estimate = _mm512_maskz_rcp14_ps(0xffff, (__m512)x);
  const __m512 rest = _mm512_fnmadd_ps((__m512)x, estimate, (__m512)broadcast(1));
  const __mmask16 is_number = _mm512_cmp_ps_mask(rest, rest, _CMP_ORD_Q);
  return (Vec)_mm512_mask3_fmadd_ps(estimate, rest, estimate, is_number);
#else
  return 1 / x;
#endif
}
