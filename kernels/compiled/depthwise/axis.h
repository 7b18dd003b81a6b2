// Which inputs the outputs of a convolution meet along one dimension, and by which elements of the filter.
#pragma once

#include <numeric>
#include <vector>

#include "common/abi.h"

namespace depthwise {

// The elements of a filter's row, or column, in classes modulo `period`; reversed, the last of a class comes first.
struct TapClasses {
  int elements, period;
  bool reversed;

  int count() const { return std::min(period, elements); }
  int size(int which) const { return ceil_div(elements - which, period); }
  int element(int which, int t) const { return which + (reversed ? size(which) - 1 - t : t) * period; }
  int before(int which) const {  // elements of the classes before
    int sum = 0;
    for (int i = 0; i < which; ++i) sum += size(i);
    return sum;
  }
};

// Forward all elements are one class. In backward data those of a class meet the same residues of dx.
inline TapClasses tap_classes(bool backward_data, int64_t taps, int64_t stride, int64_t dilation) {
  return {int(taps), backward_data ? int(stride / std::gcd(stride, dilation)) : 1, backward_data};
}

// Output o of a phase meets input o * stride + first + t * step for each of its taps t, the t-th element of a class.
struct Phase {
  int taps, first, step, tap_class;
};

// Forward there is one phase. In backward data each residue of dx modulo the stride is one, and its stride over dy is
// 1. Outputs p, p + every, ... are those of phase p.
struct Axis {
  TapClasses classes;
  std::vector<Phase> phases;
  int stride, every;
  int lowest, extent;  // all that output 0 of any phase meets: `extent` inputs from `lowest` on

  // Inputs that the outputs 0 ... outputs - 1 of every phase meet, and what lies between them.
  int64_t inputs(int64_t outputs) const { return (outputs - 1) * stride + extent; }
  int outputs_of(int phase, int size) const { return phase < size ? ceil_div(size - phase, every) : 0; }
};

inline Axis forward_axis(int64_t taps, int64_t stride, int64_t pad, int64_t dilation) {
  const int extent = int(dilation * (taps - 1) + 1);
  return {tap_classes(false, taps, stride, dilation),
          {{int(taps), int(-pad), int(dilation), 0}},
          int(stride),
          1,
          int(-pad),
          extent};
}

// dx[a + stride * i] is the sum over elements r of w[r] dy[i + (a + pad - r * dilation) / stride] where that is whole.
inline Axis backward_axis(int64_t taps, int64_t stride, int64_t pad, int64_t dilation, int64_t size) {
  Axis axis{tap_classes(true, taps, stride, dilation), {}, 1, int(stride), 0, 1};
  const int step = int(dilation / std::gcd(stride, dilation));
  int lowest = INT32_MAX, highest = INT32_MIN;
  for (int64_t a = 0; a < std::min(stride, size); ++a) {
    Phase phase{0, 0, step, 0};
    for (int c = 0; c < axis.classes.count(); ++c) {
      if ((a + pad - c * dilation) % stride != 0) continue;
      phase = {axis.classes.size(c), int((a + pad - axis.classes.element(c, 0) * dilation) / stride), step, c};
      lowest = std::min(lowest, phase.first);
      highest = std::max(highest, phase.first + (phase.taps - 1) * step);
    }
    axis.phases.push_back(phase);
  }
  if (lowest <= highest) {
    axis.lowest = lowest;
    axis.extent = highest - lowest + 1;
  }
  return axis;
}

struct Axes {
  Axis rows, columns;
};

inline Axes forward_axes(const Geometry& g) {
  return {forward_axis(g.r, g.stride_h, g.pad_h, g.dilation_h), forward_axis(g.s, g.stride_w, g.pad_w, g.dilation_w)};
}

// dx: without data.
inline Axes backward_axes(const Geometry& g, const TensorArgument& dx) {
  return {backward_axis(g.r, g.stride_h, g.pad_h, g.dilation_h, dx.h),
          backward_axis(g.s, g.stride_w, g.pad_w, g.dilation_w, dx.w)};
}

}  // namespace depthwise
