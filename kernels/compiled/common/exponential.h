// The exponential function of a vector.
#pragma once

#include "common/elements.h"

// Return e^x as 2^n e^r with |r| <= ln(2) / 2, and e^r by its series, with an error below 1e-8. Overflow is infinity.
static inline Vec exponential(Vec x) {
  constexpr float LOWEST = -87, HIGHEST = 104, TO_INTEGER = 3 << 22;  // a float whose unit in the last place is 1
  constexpr float SERIES[] = {1.f / 5040, 1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1, 1};
  x = x < LOWEST ? broadcast(LOWEST) : x;
  x = x > HIGHEST ? broadcast(HIGHEST) : x;
  const Vec shifted = x * 1.44269504f + TO_INTEGER, n = shifted - TO_INTEGER;
  const Vec r = x - n * 0.693145752f - n * 1.42860677e-6f;  // ln(2) in two parts; n times the first is exact
  Vec sum = {};
  for (const float coefficient : SERIES) sum = sum * r + coefficient;
  const Bits exponent = (Bits)shifted - (Bits)broadcast(TO_INTEGER), half = (Bits)(Lanes(exponent) >> 1);
  return sum * (Vec)((half + 127) << 23) * (Vec)((exponent - half + 127) << 23);  // 2^n may overflow
}
