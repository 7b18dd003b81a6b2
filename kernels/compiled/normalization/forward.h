// Lines of y = function((x - mean) * inverse * weight + bias + added).
#pragma once

#include <cmath>

#include "normalization/units.h"

namespace normalization {

// Return 1 / sqrt(variance + eps), and 0 for 1 / 0.
inline float inverse_of(double variance, double eps) {
  return variance + eps == 0 ? 0 : float(1 / std::sqrt(variance + eps));
}

// The coefficients of the rows of a call, in the memory of each part.
class RowCoefficients {
 public:
  RowCoefficients(const Norm& norm, const Layout& layout, const Operands& operands)
      : layout_(layout),
        mean_(operands.mean.as<float>()),
        inverse_(operands.inverse.as<float>()),
        weight_({operands.weight.data, Element(norm.parameter_element)}, norm.c),
        bias_({operands.bias.data, Element(norm.parameter_element)}, norm.c),
        floats_(norm.threads, layout.rows * Coefficients::COUNT * layout.padded()),
        units_(norm.threads, -1) {}

  float weight(int64_t channel) const { return weight_.data() ? weight_.data()[channel] : 1; }
  float inverse(int64_t set) const { return inverse_[set]; }

  // Return the coefficients of a row, those of whose unit are made at once; sums: the offsets and the slopes of a
  // gradient, or null.
  Coefficients of(int64_t row, int part, Sums* sums = nullptr) {
    const int64_t first = row / layout_.rows * layout_.rows;
    for (int64_t other = first; units_[part] != first && other < first + layout_.rows; ++other)
      set(other, at(other - first, part), sums ? sums->of(other, part) : nullptr);
    units_[part] = first;
    return at(row - first, part);
  }

 private:
  Coefficients at(int64_t row, int part) {
    return Coefficients(layout_, floats_.of(part) + row * Coefficients::COUNT * layout_.padded());
  }

  void set(int64_t row, const Coefficients& to, const double* gradients) const {
    layout_.each_entry(row, [&](int64_t i, int64_t channel, int64_t set) {
      to.mean[i] = mean_[set];
      to.scale[i] = inverse_[set] * weight(channel);
      to.bias[i] = bias_.data() ? bias_.data()[channel] : 0;
      if (!gradients) return;
      to.offset[i] = float(gradients[layout_.is_last ? channel : 0]);
      to.slope[i] = float(gradients[layout_.padded() + (layout_.is_last ? channel : 0)]);
    });
    if (layout_.is_last) return;
    for (float* const single : {to.mean, to.scale, to.bias, to.slope, to.offset}) store(single, broadcast(*single));
  }

  const Layout& layout_;
  const float *mean_, *inverse_;
  AsFloats weight_, bias_;
  Parts<float> floats_;
  std::vector<int64_t> units_;
};

// Write a vector of a result. streams: past the caches, if `to` is aligned.
template <class T>
INLINE void write(T* to, Vec value, int lanes, bool streams) {
  if constexpr (std::is_same_v<T, float>)
    if (streams && lanes == VL) return stream(to, value);
  store_first(to, value, lanes);
}

// Return whether a tensor is so large that none of it would be in the caches when it is read again. Then it is written
// past them, if all vectors of a line are aligned.
INLINE bool streams(int64_t width, const void* line, int64_t bytes) {
  constexpr int64_t LARGE = 8 << 20;
  const bool is_aligned = reinterpret_cast<uintptr_t>(line) % sizeof(Vec) == 0 && width % VL == 0;
  return bytes >= LARGE && is_aligned;
}

// What is read of a line.
template <class T>
struct Read {
  const T *x, *dy;
  const uint8_t* mask;

  Read(const Line& line, const Operands& operands)
      : x(operands.x.as<T>() + line.first),
        dy(operands.dy.as<T>() + line.first),
        mask(operands.mask ? operands.mask.as<uint8_t>() + line.mask : nullptr) {}

  INLINE_MEMBER void prefetch(ptrdiff_t next, int periods) const {
    normalization::prefetch(x + next, periods);
    normalization::prefetch(dy + next, periods);
  }
};

// x - mean, and dz.
struct Terms {
  Vec distance, dz;
};

template <class T, class Function>
void normalize(const Layout& layout, const Line& line, const Coefficients& with, Function function,
               const Operands& operands) {
  const T* const x = operands.x.as<T>() + line.first;
  const T* const added = operands.added ? operands.added.as<T>() + line.first : nullptr;
  T* const y = operands.y.as<T>() + line.first;
  uint8_t* const mask = operands.mask ? operands.mask.as<uint8_t>() + line.mask : nullptr;
  const bool is_streamed = streams(layout.width, y, operands.y.bytes);
  const ptrdiff_t bits_of_period = mask_bytes(layout.width);
  each_vector(line.count, layout.width, [&](auto periods, ptrdiff_t at, ptrdiff_t i, int lanes, ptrdiff_t bits)
                                             INLINE_LAMBDA {
    const ptrdiff_t next = at + (periods - 1) * i + periods * layout.width;
    if (periods > 1) prefetch(x + next, periods);
    if (periods > 1 && added) prefetch(added + next, periods);
    i &= with.keep;
    const Vec mean = load(with.mean + i), scale = load(with.scale + i), bias = load(with.bias + i);
#pragma GCC unroll 4
    for (int period = 0; period < decltype(periods)::value; ++period) {
      const ptrdiff_t there = at + period * layout.width;
      Vec z = (load_first(x + there, lanes) - mean) * scale + bias;
      if (added) z += load_first(added + there, lanes);
      if (mask) store_bits(mask + bits + period * bits_of_period, function.passes(z));
      write(y + there, function.value(z), lanes, is_streamed);
    }
  });
}

}  // namespace normalization
