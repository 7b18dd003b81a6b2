// The arithmetic of implicit GEMM: register tiles of one kind of Step, compiled in a file of its own (singles.cpp,
// pairs.cpp).
#pragma once

#include "common/pairs.h"
#include "implicit_gemm/windows.h"

namespace implicit_gemm {

struct Plan;
struct FilterGradient;
struct Unit;

// The part of an image that is computed from one window.
struct BandOfImage {
  int64_t image;
  int top, left, height, width;
};

template <class Step>
struct Arithmetic {
  // Compute the outputs of one filled window. result: a buffer for vectors that cannot be computed in y itself.
  static void multiply_band(const Plan& plan, const BandOfImage& band, const std::vector<ptrdiff_t>& offsets,
                            const float* window, const float* filter, ptrdiff_t filter_stream, const Finish& finish,
                            const Images& y, float* result);
  // Do the same with pixels in the vectors, for planar windows and images at least VL columns wide. result: used if y
  // is in half precision.
  static void multiply_pixels(const Plan& plan, const BandOfImage& band, const std::vector<ptrdiff_t>& offsets,
                              const float* window, const float* filter, ptrdiff_t filter_stream, const Finish& finish,
                              const Images& y, float* result);

  // Accumulate one task, a (channel block, tap) pair, in the blocked accumulator [C / VL][tap][K / VL][VL][VL].
  // offset: of the tap's first pixel in the unit's window.
  static void add_blocked(const FilterGradient& f, const Unit& unit, ptrdiff_t offset, float* sum);
  // Accumulate a unit in the planar accumulator [K / VL][C * taps][VL].
  static void add_planar(const FilterGradient& f, const Unit& unit, const std::vector<ptrdiff_t>& offsets, float* sums);
};

extern template struct Arithmetic<Singles>;
extern template struct Arithmetic<Pairs>;

}  // namespace implicit_gemm
