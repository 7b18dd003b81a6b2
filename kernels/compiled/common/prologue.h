// Normalization and activation of x, in training: a convolution reads x and computes function((x - mean) * scale +
// bias) of what it copies to its buffers, so that the result of the layer before is never in memory.
#pragma once

#include "common/checks.h"
#include "common/pairs.h"

// Which numbers are the two of a pair of bfloat16 numbers.
enum PairsOf { NO_PAIRS, PAIRS_OF_CHANNELS, PAIRS_OF_PIXELS };

struct Prologue {
  static constexpr int PADDING = 2 * VL;  // zeros, since vectors may pass the ends of coefficients

  const float* coefficients = nullptr;  // means, scales and biases of channels; null if x is read as it is
  ptrdiff_t row = 0;                    // from one to the next
  int64_t function = 0;
  float slope = 0;

  explicit operator bool() const { return coefficients != nullptr; }
  Prologue operator+(ptrdiff_t channels) const {
    return {coefficients ? coefficients + channels : nullptr, row, function, slope};
  }
};

// Normalize `pixels` pixels of neighbouring channels, which are rows. channels: or pairs of channels, in floats. `from`
// may be `to`.
void normalize_rows(const Prologue& prologue, PairsOf pairs, const float* from, ptrdiff_t from_row, int channels,
                    int64_t pixels, float* to, ptrdiff_t to_row);

// Normalize `segments` segments of `count` pixels of one channel in place, `row` floats apart.
void normalize_segments(const Prologue& prologue, float* data, int count, int segments, ptrdiff_t row);

// Normalize pixels of neighbouring channels in place: vector v of channel c is at data[(v * stride + c) * VL].
void normalize_planes(const Prologue& prologue, PairsOf pairs, float* data, int channels, int vectors, int stride);
