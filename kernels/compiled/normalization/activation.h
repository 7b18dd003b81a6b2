// Activations of vectors, and what they make of gradients. Comparisons leave NaN as it is, as torch's do.
#pragma once

#include "common/functions.h"
#include "normalization/lines.h"

namespace normalization {

// A bit of a mask tells whether the activation passes an element.
INLINE void store_bits(uint8_t* to, Lanes passes) {
#if defined(__AVX512F__)
  const __mmask16 bits = _mm512_movepi32_mask((__m512i)passes);
  std::memcpy(to, &bits, sizeof bits);
#elif defined(__AVX2__)
  *to = uint8_t(_mm256_movemask_ps((__m256)passes));
#else
  uint8_t bits = 0;
  for (int i = 0; i < VL; ++i) bits |= (passes[i] & 1) << i;
  *to = bits;
#endif
}

INLINE Lanes load_bits(const uint8_t* from) {
#if defined(__AVX512F__)
  __mmask16 bits;
  std::memcpy(&bits, from, sizeof bits);
  return (Lanes)_mm512_movm_epi32(bits);
#else
  Lanes bits;
  for (int i = 0; i < VL; ++i) bits[i] = 1 << i;
  return (int32_t(*from) & bits) != 0;
#endif
}

enum Kind { CLAMPED, LEAKY, SMOOTH, MASKED };

// One function of each kind: with bounds, of which NaN is none; with a slope below zero; smooth; or whose derivative is
// 1 where a bit of a mask is set, elsewhere the slope.
template <Kind OF_KIND, int64_t FUNCTION = IDENTITY>
struct Activation {
  static constexpr Kind KIND = OF_KIND;
  float slope;

  explicit Activation(const Norm& norm) : slope(norm.function == LEAKY_RELU ? float(norm.slope) : 0) {}

  INLINE_MEMBER Vec value(Vec z) const {
    if constexpr (KIND == LEAKY) return z > 0 ? z : z * slope;
    return computed<FUNCTION>(z, 0);
  }

  INLINE_MEMBER Lanes passes(Vec z) const {
    if constexpr (KIND == LEAKY) return z > 0;
    if constexpr (FUNCTION == RELU) return ~(z <= 0);
    if constexpr (FUNCTION == RELU6) return ~((z <= 0) | (z >= 6));
    return ~Lanes{};
  }

  // Return dz; passed: bits of a mask if it is of the kind MASKED.
  INLINE_MEMBER Vec gradient(Vec dy, Vec z, Lanes passed) const {
    if constexpr (KIND == SMOOTH) return dy * derivative<FUNCTION>(z);
    if constexpr (KIND == LEAKY) return z > 0 ? dy : dy * slope;
    if constexpr (KIND == CLAMPED && FUNCTION == IDENTITY) return dy;
    if constexpr (KIND == CLAMPED) passed = passes(z);
    const Vec stopped = KIND == MASKED && slope != 0 ? dy * slope : Vec{};
    return passed ? dy : stopped;
  }
};

// Call body with the activation of a norm as its argument, of a type that is a constant.
template <class Body>
void with_activation(const Norm& norm, bool is_masked, Body body) {
  if (is_masked) return body(Activation<MASKED>(norm));
  switch (norm.function) {
    case IDENTITY: return body(Activation<CLAMPED>(norm));
    case RELU: return body(Activation<CLAMPED, RELU>(norm));
    case RELU6: return body(Activation<CLAMPED, RELU6>(norm));
    case LEAKY_RELU: return body(Activation<LEAKY>(norm));
    case SILU: return body(Activation<SMOOTH, SILU>(norm));
    case HARD_SWISH: return body(Activation<SMOOTH, HARD_SWISH>(norm));
    case GELU: return body(Activation<SMOOTH, GELU>(norm));
    default: return body(Activation<SMOOTH, GELU_TANH>(norm));
  }
}

}  // namespace normalization
