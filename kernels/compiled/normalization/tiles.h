// Loops over the vectors of a line, and coefficients of its elements.
#pragma once

#include <type_traits>
#include <vector>

#include "normalization/activation.h"

namespace normalization {

typedef double Doubles __attribute__((vector_size(VL * sizeof(float))));
typedef float HalfVec __attribute__((vector_size(VL * sizeof(float) / 2)));

// Floats of each thread, aligned to lines of the cache.
class Floats {
 public:
  Floats(int threads, int64_t of_thread) : of_thread_(of_thread), data_(times(threads, of_thread) + LINE_FLOATS) {}
  float* of(int thread) {
    const auto address = reinterpret_cast<uintptr_t>(data_.data());
    return data_.data() + (-address / sizeof(float)) % LINE_FLOATS + thread * of_thread_;
  }

 private:
  int64_t of_thread_;
  std::vector<float> data_;
};

// Coefficients of the elements of a period: y = function((x - mean) * scale + bias), and with dz, what the function
// makes of dy, dx = dz * scale + (x - mean) * slope + offset. step: 0 if they have a single value.
struct Coefficients {
  enum { COUNT = 5 };
  float *mean, *scale, *bias, *slope, *offset;
  ptrdiff_t keep;  // of the bits of an index

  Coefficients(const Layout& layout, float* floats) : keep(layout.is_last ? -1 : 0) {
    for (float** const each : {&mean, &scale, &bias, &slope, &offset}) *each = floats, floats += layout.coefficients();
  }
};

// Call body(index, i, lanes, bits) for the vectors of a line, with the index of their first element, its place in the
// period, and that of its bits.
template <bool BACKWARDS = false, class Body>
INLINE void each_vector(ptrdiff_t count, ptrdiff_t width, Body body) {
  const ptrdiff_t of_period = (width + VL - 1) / VL * MASK_BYTES;
  ptrdiff_t bits = 0;
  for (ptrdiff_t first = 0; first < count; first += width, bits += of_period) {
    const ptrdiff_t size = std::min(width, count - first);
    ptrdiff_t i = 0;
#pragma GCC unroll 2
    for (; i + VL <= size; i += VL) body(first + i, i, VL, bits + i / VL * MASK_BYTES);
    if (i < size) body(first + i, i, int(size - i), bits + i / VL * MASK_BYTES);
  }
}

// Call body(tile, index, i, periods, lanes, bits) for columns of up to TILE vectors of a line, in blocks of so few
// periods that a sum in float is as good as its addends; the type of tile has the number of vectors.
template <class Body>
INLINE void each_tile(ptrdiff_t count, ptrdiff_t width, Body body) {
  constexpr ptrdiff_t DEPTH = 64;
  using Whole = std::integral_constant<int, TILE>;
  using Single = std::integral_constant<int, 1>;
  const ptrdiff_t full = count / width, of_period = (width + VL - 1) / VL * MASK_BYTES;
  for (ptrdiff_t period = 0; period < full; period += DEPTH) {
    const ptrdiff_t first = period * width, bits = period * of_period, depth = std::min(DEPTH, full - period);
    ptrdiff_t i = 0;
    for (; i + TILE * VL <= width; i += TILE * VL) body(Whole(), first + i, i, depth, VL, bits + i / VL * MASK_BYTES);
    for (; i < width; i += VL)
      body(Single(), first + i, i, depth, int(std::min<ptrdiff_t>(VL, width - i)), bits + i / VL * MASK_BYTES);
  }
  const ptrdiff_t first = full * width;
  for (ptrdiff_t i = 0; first + i < count; i += VL) {
    const int lanes = int(std::min<ptrdiff_t>(VL, count - first - i));
    body(Single(), first + i, i, ptrdiff_t(1), lanes, full * of_period + i / VL * MASK_BYTES);
  }
}

}  // namespace normalization
