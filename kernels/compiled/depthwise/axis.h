// The inputs that outputs read along one dimension, and the filter elements by which they are multiplied.
#pragma once

#include <numeric>
#include <vector>

#include "common/abi.h"

namespace depthwise {

// The elements of a filter row or column, in classes modulo `period`. If reversed, the last of a class comes first.
struct TapClasses {
  int elements, period;
  bool reversed;

  int count() const { return std::min(period, elements); }
  int size(int which) const { return ceil_div(elements - which, period); }
  int element(int which, int t) const { return which + (reversed ? size(which) - 1 - t : t) * period; }
  int before(int which) const {  // the number of elements in earlier classes
    int sum = 0;
    for (int i = 0; i < which; ++i) sum += size(i);
    return sum;
  }
};

// Return one class in forward. In backward data, the elements of a class contribute to the same residues of dx.
inline TapClasses tap_classes(bool backward_data, int64_t taps, int64_t stride, int64_t dilation) {
  return {int(taps), backward_data ? int(stride / std::gcd(stride, dilation)) : 1, backward_data};
}

// Outputs with the same taps: output o reads input o * stride + first + t * step for tap t, the t-th of its class.
struct Phase {
  int taps, first, step, tap_class;
};

// The phases of one dimension: in forward there is one; in backward data there is one for each residue of dx modulo the
// stride, with stride 1 over dy. Phase p has outputs p, p + every, ...
struct Axis {
  TapClasses classes;
  std::vector<Phase> phases;
  int stride, every;
  int lowest, extent;  // output 0 of every phase reads only among the `extent` inputs from `lowest` on

  // Return the number of inputs that outputs 0 ... outputs - 1 of all phases span.
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

// dx[a + stride * i] is the sum of w[r] dy[i + (a + pad - r * dilation) / stride] over the r for which this is whole.
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

// dx: its data is not used.
inline Axes backward_axes(const Geometry& g, const TensorArgument& dx) {
  return {backward_axis(g.r, g.stride_h, g.pad_h, g.dilation_h, dx.h),
          backward_axis(g.s, g.stride_w, g.pad_w, g.dilation_w, dx.w)};
}

}  // namespace depthwise
