// The epilogue of inference, applied when y is written: activation(y + added). As in torch, NaN stays NaN.
#pragma once

#include <limits>

#include "common/image.h"

enum Activation : int64_t { IDENTITY, RELU, RELU6, SILU };

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

// Not inlined: every register tile would contain a copy.
__attribute__((noinline)) static Vec silu(Vec y) { return y / (1 + exponential(-y)); }

struct Epilogue {
  Elements y, added;  // the first elements of both, in the same layout; added may be null
  Activation activation;
  float least = -std::numeric_limits<float>::infinity(), most = std::numeric_limits<float>::infinity();

  Epilogue(Elements written, void* what_is_added, Activation last)
      : y(written), added{what_is_added, written.type}, activation(last) {
    if (last == RELU || last == RELU6) least = 0;
    if (last == RELU6) most = 6;
  }

  explicit operator bool() const { return added || activation != IDENTITY; }

  INLINE_MEMBER Vec activated(Vec value) const {
    if (activation == SILU) return silu(value);
    value = value < least ? broadcast(least) : value;
    return value > most ? broadcast(most) : value;
  }

  // Return the addends of the elements of y from `there` on, or null.
  Elements beside(Elements there) const { return added + (there - y); }

  // Apply the epilogue to the first `count` lanes of a vector of y, in float, that will be written to `there`.
  INLINE_MEMBER Vec of(Vec value, const float* there, int count) const {
    if (added) value += load_first(added.as<const float>() + (there - y.as<const float>()), count);
    return activated(value);
  }
};

// The last steps before outputs are written: add a bias, which may be null, and apply the epilogue.
struct Finish {
  Elements bias;
  const Epilogue& epilogue;
};

// Apply the epilogue in place to `count` floats that are, or will become, the elements of y from `there` on.
static inline void apply(const Epilogue& epilogue, Elements there, float* row, int count) {
  const Elements added = epilogue.beside(there);
  for (int i = 0; i < count; i += VL) {
    const Vec value = load_first(row + i, count - i);
    store_first(row + i, epilogue.activated(added ? value + load_first(added + i, count - i) : value), count - i);
  }
}

// Apply the epilogue in place to a region's vectors, which are, or will become, those of y.
static inline void apply(const Epilogue& epilogue, const Images& y, const Region& region, const Window& window) {
  constexpr int PIECE = 32;  // columns at a time; the buffer holds their addends
  alignas(64) float buffer[PIECE * VL];
  Images added = y;
  added.data = epilogue.beside(y.data);
  for (int i = 0; i < region.rows; ++i)
    for (int j = 0; j < region.columns; j += PIECE) {
      const int columns = std::min(PIECE, region.columns - j);
      const Region part{region.image, region.channel, region.top + i, region.left + j, 1, columns};
      float* at = window.data + i * window.row + j * window.column;
      const Window addends = added.data ? gather(added, part, buffer) : Window{};
      for (int column = 0; column < columns; ++column, at += window.column) {
        const Vec value = load(at);
        store(at, epilogue.activated(added.data ? value + load(addends.data + column * addends.column) : value));
      }
    }
}
