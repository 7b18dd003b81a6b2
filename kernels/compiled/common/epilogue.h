// The epilogue of inference, applied when y is written: activation(y + added). As in torch, NaN stays NaN.
#pragma once

#include <limits>

#include "common/image.h"
#include "common/moments.h"

enum Activation : int64_t { IDENTITY, RELU, RELU6, SILU };

Vec silu(Vec y);  // not inlined, which takes 1.6 times as long: every register tile would contain a copy

struct Epilogue {
  Elements y, added;  // the first elements of both, in the same layout; added may be null
  Activation activation;
  Moments moments;  // of y as it is stored
  float least = -std::numeric_limits<float>::infinity(), most = std::numeric_limits<float>::infinity();

  Epilogue(Elements written, void* what_is_added, Activation last, const Moments& of_y)
      : y(written), added{what_is_added, written.type}, activation(last), moments(of_y) {
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
void apply(const Epilogue& epilogue, Elements there, float* row, int count);

// Apply the epilogue in place to a region's vectors, which are, or will become, those of y.
void apply(const Epilogue& epilogue, const Images& y, const Region& region, const Window& window);
