// Loops over the vectors of a line, and coefficients of its elements.
#pragma once

#include <type_traits>
#include <vector>

#include "normalization/activation.h"

namespace normalization {

typedef double Doubles __attribute__((vector_size(VL * sizeof(float))));
typedef float HalfVec __attribute__((vector_size(VL * sizeof(float) / 2)));

struct Halves {
  Doubles low, high;

  INLINE_MEMBER explicit Halves(Vec value) {
    HalfVec halves[2];
    std::memcpy(halves, &value, sizeof value);
#if defined(__AVX512F__)  // GCC would convert quarters
    low = (Doubles)_mm512_maskz_cvtps_pd(0xff, (__m256)halves[0]);
    high = (Doubles)_mm512_maskz_cvtps_pd(0xff, (__m256)halves[1]);
#elif defined(__AVX2__)
    low = (Doubles)_mm256_cvtps_pd((__m128)halves[0]);
    high = (Doubles)_mm256_cvtps_pd((__m128)halves[1]);
#else
    low = __builtin_convertvector(halves[0], Doubles);
    high = __builtin_convertvector(halves[1], Doubles);
#endif
  }
};

INLINE double total(Doubles value) {
  double sums[VL / 2];
  std::memcpy(sums, &value, sizeof value);
#pragma GCC unroll 4
  for (int half = VL / 4; half > 0; half /= 2)
#pragma GCC unroll 4
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

INLINE double total(Vec value) {
  const Halves halves(value);
  return total(halves.low + halves.high);
}

// Return a vector with zeros behind the first lanes.
INLINE Vec first_of(Vec value, int lanes) {
  Lanes index;
  for (int i = 0; i < VL; ++i) index[i] = i;
  return lanes >= VL ? value : index < lanes ? value : Vec{};
}

// Numbers of each part of a call, zeros at first, aligned to lines of the cache.
template <class Number>
class Parts {
 public:
  Parts(int64_t parts, int64_t of_part)
      : of_part_(ceil_divide(of_part, OF_LINE) * OF_LINE), data_(plus(times(parts, of_part_), OF_LINE)) {}
  Number* of(int64_t part) {
    const auto address = reinterpret_cast<uintptr_t>(data_.data());
    return data_.data() + -address / sizeof(Number) % OF_LINE + part * of_part_;
  }

 private:
  static constexpr int64_t OF_LINE = LINE_FLOATS * sizeof(float) / sizeof(Number);

  int64_t of_part_;
  std::vector<Number> data_;
};

// Add sums in float to sums in double, and set them to zero.
INLINE void flush(float* from, int64_t count, double* to) {
  for (int64_t i = 0; i < count; i += VL) {
    const Halves halves(load(from + i));
    *reinterpret_cast<Doubles*>(to + i) += halves.low;
    *reinterpret_cast<Doubles*>(to + i + VL / 2) += halves.high;
    store(from + i, Vec{});
  }
}

// Coefficients of entries: y = function((x - mean) * scale + bias), and with dz, what the function makes of dy,
// dx = dz * scale + (x - mean) * slope + offset.
struct Coefficients {
  enum { COUNT = 5 };
  float *mean, *scale, *bias, *slope, *offset;

  Coefficients(int64_t entries, float* floats) {
    for (float** const each : {&mean, &scale, &bias, &slope, &offset}) *each = floats, floats += entries;
  }
};

template <int COUNT>
using Periods = std::integral_constant<int, COUNT>;
constexpr ptrdiff_t MANY = 4;  // periods at a time, so that coefficients and sums are read once for all

// Return whether a tensor is so large that none of it would be in the caches when it is read again.
inline bool is_large(int64_t bytes) { return bytes >= 8 << 20; }

// Return whether so much is read beside that it may come from memory.
inline bool is_fetched(int64_t bytes) { return bytes >= 4 << 20; }

// Fetch the vectors of the next periods, in their order in memory, of which processors foresee only one at a time.
template <class T>
INLINE void prefetch(const T* next, int periods) {
#pragma GCC unroll 4
  for (int period = 0; period < periods; ++period) __builtin_prefetch(next + period * VL);
}

// Call body(periods, index, i, lanes, bits) for the vectors of lines of periods, with the index of their first element,
// its place in the period, and that of its bits: of some periods at a time, of which each is `width` elements behind
// the one before. Of the next ones, `prefetch` may get those from index + (periods - 1) * i + periods * width on. Of
// long periods, whose coefficients and sums would not stay in the first-level cache, it is some columns after others.
template <class Body>
INLINE void each_vector(ptrdiff_t count, ptrdiff_t width, Body body) {
  constexpr ptrdiff_t COLUMNS = 1024;
  const ptrdiff_t bits_of_period = mask_bytes(width);
  for (ptrdiff_t column = 0; column < width; column += COLUMNS) {
    ptrdiff_t first = 0, bits = 0;
    for (; first + MANY * width <= count; first += MANY * width, bits += MANY * bits_of_period) {
      const ptrdiff_t end = std::min(width, column + COLUMNS);
      ptrdiff_t i = column;
      for (; i + VL <= end; i += VL) body(Periods<MANY>(), first + i, i, VL, bits + i / VL * MASK_BYTES);
      for (ptrdiff_t period = 0; i < end && period < MANY; ++period)
        body(Periods<1>(), first + period * width + i, i, int(end - i),
             bits + period * bits_of_period + i / VL * MASK_BYTES);
    }
    for (; first < count; first += width, bits += bits_of_period) {
      const ptrdiff_t end = std::min(std::min(width, count - first), column + COLUMNS);
      ptrdiff_t i = column;
      for (; i + VL <= end; i += VL) body(Periods<1>(), first + i, i, VL, bits + i / VL * MASK_BYTES);
      if (i < end) body(Periods<1>(), first + i, i, int(end - i), bits + i / VL * MASK_BYTES);
    }
  }
}

// How the lines of a call are read. With the channels last, the elements of a period have an entry each: their
// coefficients and sums are in memory. Otherwise a line has a single one, and its vectors are its periods.
template <bool LAST>
struct Reading {
  static constexpr bool IS_LAST = LAST;
  const ptrdiff_t width, bits_of_period;

  explicit Reading(const Layout& layout)
      : width(IS_LAST ? layout.width : VL), bits_of_period(IS_LAST ? mask_bytes(width) : MASK_BYTES) {}

  INLINE_MEMBER Vec load(const float* coefficients, ptrdiff_t i) const {
    return ::load(coefficients + (IS_LAST ? i : 0));
  }

  template <class Body>
  INLINE_MEMBER void each_vector(const Layout& layout, const Line& line, Body body) const {
    if constexpr (IS_LAST) return normalization::each_vector(line.count, width, body);
    for (ptrdiff_t plane = 0; plane < line.planes; ++plane) {
      const ptrdiff_t first = plane * line.stride, bits = plane * layout.channels * layout.plane_mask;
      ptrdiff_t i = 0;
      for (; i + MANY * VL <= line.count; i += MANY * VL)
        body(Periods<MANY>(), first + i, 0, VL, bits + i / VL * MASK_BYTES);
      for (; i < line.count; i += VL)
        body(Periods<1>(), first + i, 0, int(std::min<ptrdiff_t>(VL, line.count - i)), bits + i / VL * MASK_BYTES);
    }
  }
};

// Call body with the reading of a layout, of a type that is a constant.
template <class Body>
void with_reading(const Layout& layout, Body body) {
  layout.is_last ? body(Reading<true>(layout)) : body(Reading<false>(layout));
}

}  // namespace normalization
