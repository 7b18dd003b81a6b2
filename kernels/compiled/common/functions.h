// Functions of elements, by their numbers in Python (FUNCTIONS in library.py). As in torch, NaN stays NaN.
#pragma once

#include <type_traits>

#include "common/checks.h"
#include "common/epilogue.h"
#include "common/exponential.h"

enum Function : int64_t {  // after those of epilogues
  SIGMOID = SILU + 1, HARD_SIGMOID, HARD_SWISH, LEAKY_RELU, GELU, GELU_TANH
};

INLINE Vec at_most_6(Vec value) { return at_most(6, at_least(0, value)); }

// The standard normal distribution at z, and its density.
struct Normal {
  Vec distribution, density;

  // The distribution at -|z| is e^(-z^2 / 2) times a polynomial in 1 / (1 + 0.35 |z|), as in Abramowitz and Stegun,
  // "Handbook of Mathematical Functions", 7.1.26, with a least relative error of 3.2e-8 where |z| < 14.
  INLINE_MEMBER explicit Normal(Vec z) {
    static constexpr float POLYNOMIAL[] = {0.143971657f, -0.25571417f, 0.159174063f, -0.0231097685f,
                                           0.105507976f, 0.119832875f, 0.139861869f, 0.139621404f};
    const Vec power = exponential(z * z * -0.5f), u = reciprocal(1 + (Vec)((Bits)z & 0x7fffffff) * 0.35f);
    Vec sum = broadcast(-0.029145922f);
#pragma GCC unroll 8
    for (const float coefficient : POLYNOMIAL) sum = sum * u + coefficient;
    sum *= u * power;
    distribution = z < 0 ? sum : 1 - sum;
    density = power * 0.398942280f;
  }
};

constexpr float TANH_SCALE = 1.59576912f, TANH_CUBE = 0.044715f;  // of GELU_TANH: 2 sqrt(2 / pi)

template <int64_t FUNCTION>
INLINE Vec computed(Vec value, float slope) {
  if constexpr (FUNCTION == RELU) return at_least(0, value);
  if constexpr (FUNCTION == RELU6) return at_most_6(value);
  if constexpr (FUNCTION == SILU) return value * computed<SIGMOID>(value, 0);
  if constexpr (FUNCTION == SIGMOID) return reciprocal(1 + exponential(-value));
  if constexpr (FUNCTION == HARD_SIGMOID) return at_most_6(value + 3) / 6;
  if constexpr (FUNCTION == HARD_SWISH) return value * at_most_6(value + 3) / 6;
  if constexpr (FUNCTION == LEAKY_RELU) return value < 0.f ? value * slope : value;
  if constexpr (FUNCTION == GELU) return value * Normal(value).distribution;
  if constexpr (FUNCTION == GELU_TANH)
    return value * computed<SIGMOID>(value * (1 + value * value * TANH_CUBE) * TANH_SCALE, 0);
  return value;
}

// Return the derivative of a smooth function.
template <int64_t FUNCTION>
INLINE Vec derivative(Vec value) {
  if constexpr (FUNCTION == HARD_SWISH) {
    const Vec inside = value < 3.f ? value / 3 + 0.5f : broadcast(1);
    return value <= -3.f ? Vec{} : inside;
  }
  if constexpr (FUNCTION == GELU) {
    const Normal normal(value);
    return normal.distribution + value * normal.density;
  }
  // SILU and GELU_TANH are value * sigmoid(inner).
  const Vec square = FUNCTION == GELU_TANH ? value * value * TANH_CUBE : Vec{};
  const float scale = FUNCTION == GELU_TANH ? TANH_SCALE : 1;
  const Vec inner = value * (1 + square) * scale;
  const Vec power = exponential(at_most(80, -inner)), sigmoid = reciprocal(1 + power);  // both are finite
  return sigmoid * (1 + value * (1 + 3 * square) * scale * (power * sigmoid));  // 1 - sigmoid would cancel
}

// Call body with the function as a constant.
template <class Body>
void with_function(int64_t function, Body body) {
  switch (function) {
    case IDENTITY: return body(std::integral_constant<int64_t, IDENTITY>());
    case RELU: return body(std::integral_constant<int64_t, RELU>());
    case RELU6: return body(std::integral_constant<int64_t, RELU6>());
    case SILU: return body(std::integral_constant<int64_t, SILU>());
    case SIGMOID: return body(std::integral_constant<int64_t, SIGMOID>());
    case HARD_SIGMOID: return body(std::integral_constant<int64_t, HARD_SIGMOID>());
    case HARD_SWISH: return body(std::integral_constant<int64_t, HARD_SWISH>());
    case LEAKY_RELU: return body(std::integral_constant<int64_t, LEAKY_RELU>());
    case GELU: return body(std::integral_constant<int64_t, GELU>());
    case GELU_TANH: return body(std::integral_constant<int64_t, GELU_TANH>());
    default: refuse(MISMATCH, "a function of elements that is not known");
  }
}
