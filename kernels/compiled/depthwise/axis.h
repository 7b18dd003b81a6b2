// The phases of one dimension, and the filter elements by which each reads.
#pragma once

#include <vector>

#include "common/abi.h"

namespace depthwise {

// The elements of a filter row or column, in classes modulo `period`. If reversed, the last of a class comes first.
struct TapClasses {
  int elements, period;
  bool reversed;

  // In backward data, the elements of a class contribute to the same residues of dx; in forward there is one class.
  explicit TapClasses(const Axis& axis)
      : elements(int(axis.taps)), period(int(axis.tap_every())), reversed(axis.backward_data) {}

  int count() const { return std::min(period, elements); }
  int size(int which) const { return ceil_div(elements - which, period); }
  int element(int which, int t) const { return which + (reversed ? size(which) - 1 - t : t) * period; }
  int before(int which) const {  // the number of elements in earlier classes
    int sum = 0;
    for (int i = 0; i < which; ++i) sum += size(i);
    return sum;
  }
};

// Outputs with the same taps: output o reads input o * stride + first + t * step for tap t, the t-th of its class.
struct Phase {
  int taps, first, step, tap_class;
};

// The phases of one dimension of `outputs` outputs. Phase p has outputs p, p + every, ...
struct PhasedAxis {
  TapClasses classes;
  std::vector<Phase> phases;
  int stride, every;
  int lowest = 0, extent = 1;  // output 0 of every phase reads only among the `extent` inputs from `lowest` on

  PhasedAxis(const Axis& axis, int64_t outputs)
      : classes(axis), stride(int(axis.step())), every(int(axis.every())) {
    const int step = int(axis.tap_step());
    int first = INT32_MAX, last = INT32_MIN;
    for (int64_t phase = 0; phase < std::min(axis.every(), outputs); ++phase) {
      phases.push_back({0, 0, step, 0});
      for (int c = 0; c < classes.count(); ++c) {
        int64_t input;
        if (!axis.meets(phase, classes.element(c, 0), input)) continue;
        phases.back() = {classes.size(c), int(input), step, c};
        first = std::min(first, int(input));
        last = std::max(last, int(input) + (classes.size(c) - 1) * step);
      }
    }
    if (first > last) return;  // no phase has taps
    lowest = first;
    extent = last - first + 1;
  }

  // Return the number of inputs that outputs 0 ... outputs - 1 of all phases span.
  int64_t inputs(int64_t outputs) const { return (outputs - 1) * stride + extent; }
  int outputs_of(int phase, int size) const { return phase < size ? ceil_div(size - phase, every) : 0; }
};

struct Axes {
  PhasedAxis rows, columns;
};

// out: its data is not used.
inline Axes axes_of(const Geometry& g, bool backward_data, const TensorArgument& out) {
  return {{g.rows(backward_data), out.h}, {g.columns(backward_data), out.w}};
}

}  // namespace depthwise
