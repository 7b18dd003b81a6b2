// y = function((x - mean) * inverse * weight + bias + added).
#pragma once

#include <cmath>

#include "normalization/units.h"

namespace normalization {

// Return 1 / sqrt(variance + eps), and 0 for 1 / 0.
inline float inverse_of(double variance, double eps) {
  return variance + eps == 0 ? 0 : float(1 / std::sqrt(variance + eps));
}

// The coefficients of lines, in the memory of each part.
class LineCoefficients {
 public:
  LineCoefficients(const Norm& norm, const Layout& layout, const Operands& operands)
      : layout_(layout),
        mean_(operands.mean.as<float>()),
        inverse_(operands.inverse.as<float>()),
        weight_({operands.weight.data, Element(norm.parameter_element)}, norm.c),
        bias_({operands.bias.data, Element(norm.parameter_element)}, norm.c),
        size_(layout.is_last ? layout.padded() : VL),
        floats_(norm.threads, Coefficients::COUNT * size_),
        units_(norm.threads, -1) {}

  float weight(int64_t channel) const { return weight_.data() ? weight_.data()[channel] : 1; }
  float inverse(int64_t set) const { return inverse_[set]; }

  // Return the coefficients of a line: with the channels last those of a unit, which are made at once. sums: the
  // offsets and the slopes of a gradient, or null.
  Coefficients of(const Line& line, int part, Sums* sums = nullptr) {
    const Coefficients to(size_, floats_.of(part));
    const double* const gradients = sums ? sums->of(line.unit, part) : nullptr;
    if (!layout_.is_last) {
      set(to, 0, line.unit, layout_.channel(line.unit, line.entry), line.entry, gradients);
    } else if (units_[part] != line.unit) {
      units_[part] = line.unit;
      for (int64_t i = 0; i < layout_.width;)
        for (int64_t channel = 0, of = line.unit * layout_.sets; channel < layout_.channels; ++of)
          for (int64_t rest = layout_.channels / layout_.sets; rest > 0; --rest, ++i, ++channel)
            set(to, i, of, channel, channel, gradients);
    }
    return to;
  }

 private:
  void set(const Coefficients& to, int64_t i, int64_t set, int64_t channel, int64_t entry,
           const double* gradients) const {
    const auto put = [&](float* row, float value) {
      if (layout_.is_last) return void(row[i] = value);
      store(row, broadcast(value));
    };
    put(to.mean, mean_[set]);
    put(to.scale, inverse_[set] * weight(channel));
    put(to.bias, bias_.data() ? bias_.data()[channel] : 0);
    if (!gradients) return;
    put(to.offset, float(gradients[entry]));
    put(to.slope, float(gradients[layout_.padded() + entry]));
  }

  const Layout& layout_;
  const float *mean_, *inverse_;
  AsFloats weight_, bias_;
  int64_t size_;
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

// Return whether a large tensor is written past the caches: if all vectors of a line are aligned.
inline bool streams(const Line& line, const void* first, int64_t bytes) {
  return is_large(bytes) && reinterpret_cast<uintptr_t>(first) % sizeof(Vec) == 0 && line.stride % VL == 0;
}

// What is read of a line.
template <class T>
struct Read {
  const T *x, *dy;
  const uint8_t* mask;
  bool fetches;

  Read(const Line& line, const Operands& operands)
      : x(operands.x.as<T>() + line.first),
        dy(operands.dy.as<T>() + line.first),
        mask(operands.mask ? operands.mask.as<uint8_t>() + line.mask : nullptr),
        fetches(is_fetched(operands.x.bytes)) {}

  INLINE_MEMBER void prefetch(ptrdiff_t next, int periods) const {
    if (periods == 1 || !fetches) return;
    normalization::prefetch(x + next, periods);
    normalization::prefetch(dy + next, periods);
  }
};

// x - mean, and dz.
struct Terms {
  Vec distance, dz;
};

// The coefficients of a vector.
struct Constants {
  Vec mean, scale, bias;

  template <class Reading>
  INLINE_MEMBER Constants(const Reading& reading, const Coefficients& with, ptrdiff_t i)
      : mean(reading.load(with.mean, i)), scale(reading.load(with.scale, i)), bias(reading.load(with.bias, i)) {}
};

template <class T, class Reading, class Function>
void normalize(const Layout& layout, const Reading& reading, const Line& line, const Coefficients& with,
               Function function, const Operands& operands) {
  const T* const x = operands.x.as<T>() + line.first;
  const T* const added = operands.added ? operands.added.as<T>() + line.first : nullptr;
  T* const y = operands.y.as<T>() + line.first;
  uint8_t* const mask = operands.mask ? operands.mask.as<uint8_t>() + line.mask : nullptr;
  const bool is_streamed = streams(line, y, operands.y.bytes), fetches = is_fetched(operands.x.bytes);
  reading.each_vector(layout, line,
                      [&](auto periods, ptrdiff_t at, ptrdiff_t i, int lanes, ptrdiff_t bits) INLINE_LAMBDA {
                        const ptrdiff_t next = at + (periods - 1) * i + periods * reading.width;
                        if (periods > 1 && fetches) {
                          prefetch(x + next, periods);
                          if (added) prefetch(added + next, periods);
                        }
                        const Constants constants(reading, with, i);
#pragma GCC unroll 4
                        for (int period = 0; period < decltype(periods)::value; ++period) {
                          const ptrdiff_t there = at + period * reading.width;
                          Vec z = (load_first(x + there, lanes) - constants.mean) * constants.scale + constants.bias;
                          if (added) z += load_first(added + there, lanes);
                          if (mask) store_bits(mask + bits + period * reading.bits_of_period, function.passes(z));
                          write(y + there, function.value(z), lanes, is_streamed);
                        }
                      });
}

}  // namespace normalization
