// One dimension of a convolution: which inputs its outputs read, and by which taps of the filter.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

// In forward, output o reads input o * stride + tap * dilation - pad by each tap. In backward data, outputs are
// elements of dx and inputs those of dy: the equation is solved for the element of dy, which is there for some taps
// only. Outputs of equal residue modulo `every`, a *phase*, read by the same taps.
struct Axis {
  int64_t taps, stride, pad, dilation;
  bool backward_data;

  int64_t every() const { return backward_data ? stride : 1; }
  int64_t step() const { return backward_data ? 1 : stride; }  // inputs, to the next output of a phase
  int64_t tap_every() const { return backward_data ? stride / std::gcd(stride, dilation) : 1; }  // taps of a phase
  int64_t tap_step() const { return backward_data ? dilation / std::gcd(stride, dilation) : dilation; }  // their inputs

  // Return the input that an output reads by a tap, times `every`.
  int64_t scaled_input(int64_t output, int64_t tap) const {
    return backward_data ? output + pad - tap * dilation : output * stride + tap * dilation - pad;
  }
  // Return whether an output reads an input by this tap; it may be outside the image.
  bool meets(int64_t output, int64_t tap, int64_t& input) const {
    input = scaled_input(output, tap);
    if (!backward_data) return true;
    const bool is_whole = input % stride == 0;
    input /= stride;
    return is_whole;
  }
  bool meets_image(int64_t output, int64_t tap, int64_t inputs, int64_t& input) const {
    return meets(output, tap, input) && input >= 0 && input < inputs;
  }
  // Return the phases that read by any tap, in ascending order.
  std::vector<int> phases() const {
    std::vector<int> residues;
    for (int64_t tap = 0; tap < taps; ++tap) {
      const int64_t remainder = -scaled_input(0, tap) % every();
      residues.push_back(int(remainder < 0 ? remainder + every() : remainder));
    }
    std::sort(residues.begin(), residues.end());
    residues.erase(std::unique(residues.begin(), residues.end()), residues.end());
    return residues;
  }
};
