// Normalization over rows, in two passes: sums and sums of squares of all rows, then a factor and an addend of each
// channel. Normalization of pixels.
#pragma once

#include <cmath>
#include <vector>

#include "program/elementwise.h"

namespace program {

// Add to out (N, groups, 2), of doubles, the sums and the sums of squares of groups of channels of x, row after row, so
// that the sums do not depend on the bands.
template <class T>
void moments(const Step& step, char* const* bases, int threads) {
  const View& x = step.x;
  const Rows<T> from(x, bases);
  const int64_t groups = step.numbers[0], of_group = x.c / groups;
  std::vector<double> of_rows(times(times(x.n, x.h), 2 * groups));
  each_row(x, threads, [&](int64_t n, int64_t h) {
    double* of_row = of_rows.data() + (n * x.h + h) * 2 * groups;
    for (int64_t c = 0; c < x.c; c += VL) {
      const int count = int(std::min<int64_t>(x.c - c, VL));
      const T* read = from.at(n, h) + c;
      double sums[VL] = {}, squares[VL] = {};
      for (int64_t w = 0; w < x.w; ++w, read += x.c) {
        const Vec values = load_first(read, count);
        for (int i = 0; i < VL; ++i) {
          sums[i] += values[i];
          squares[i] += double(values[i]) * values[i];
        }
      }
      for (int i = 0; i < count; ++i) {
        of_row[(c + i) / of_group * 2] += sums[i];
        of_row[(c + i) / of_group * 2 + 1] += squares[i];
      }
    }
  });
  double* const totals = step.out.place.in<double>(bases);
  for (int64_t n = 0; n < x.n; ++n)
    for (int64_t h = 0; h < x.h; ++h)
      for (int64_t i = 0; i < 2 * groups; ++i) totals[n * 2 * groups + i] += of_rows[(n * x.h + h) * 2 * groups + i];
}

// The reciprocal of the L2 norm of a pixel over its channels, or of epsilon, if that is larger.
template <class T>
INLINE float reciprocal_norm(const T* pixel, int64_t channels, double epsilon) {
  Vec squares{};
  for (int64_t c = 0; c < channels; c += VL) {
    const Vec value = load_first(pixel + c, int(std::min<int64_t>(channels - c, VL)));
    squares += value * value;
  }
  double sum = 0;
  for (int i = 0; i < VL; ++i) sum += squares[i];
  return float(1 / std::max(std::sqrt(sum), epsilon));
}

// The mean of a pixel over its channels, and the reciprocal of its standard deviation.
struct Standard {
  float mean, factor;
};

template <class T>
INLINE Standard standard_of(const T* pixel, int64_t channels, double epsilon) {
  const auto sum_of = [&](auto of) INLINE_LAMBDA {
    Vec sums{};
    for (int64_t c = 0; c < channels; c += VL) {
      const int count = int(std::min<int64_t>(channels - c, VL));
      Vec value = of(load_first(pixel + c, count));
      for (int i = count; i < VL; ++i) value[i] = 0;
      sums += value;
    }
    double sum = 0;
    for (int i = 0; i < VL; ++i) sum += sums[i];
    return sum;
  };
  const float mean = float(sum_of([](Vec value) INLINE_LAMBDA { return value; }) / double(channels));
  const double squares = sum_of([&](Vec value) INLINE_LAMBDA { return (value - mean) * (value - mean); });
  return {mean, float(1 / std::sqrt(squares / double(channels) + epsilon))};
}

// Multiply x by factors and add addends, of each channel of a sample, and apply a function. least_norm: 0 or above if
// pixels are divided by their norms first; epsilon: 0 or above if they are standardized first.
template <class T>
void scale(const Step& step, const float* factors, const float* addends, int64_t stride_n, double least_norm,
           double epsilon, char* const* bases, int threads) {
  const View& out = step.out;
  const Rows<T> to(out, bases), from(step.x, bases);
  with_function(step.numbers[0], [&](auto function) {
    each_row(out, threads, [&](int64_t n, int64_t h) {
      const T* x = from.at(n, h);
      const float *factor = factors + n * stride_n, *addend = addends + n * stride_n;
      T* y = to.at(n, h);
      for (int64_t w = 0; w < out.w; ++w, x += out.c, y += out.c) {
        Standard of{0, least_norm < 0 ? 1 : reciprocal_norm(x, out.c, least_norm)};
        if (epsilon >= 0) of = standard_of(x, out.c, epsilon);
        for (int64_t c = 0; c < out.c; c += VL) {
          const int count = int(std::min<int64_t>(out.c - c, VL));
          const Vec value = (load_first(x + c, count) - of.mean) * of.factor * load_first(factor + c, count);
          store_first(y + c, computed<function()>(value + load_first(addend + c, count), 0), count);
        }
      }
    });
  });
}

// The floats of a number for each channel, which are of the type of x; null if there are none.
inline AsFloats of_channels(const Step& step, int place, char* const* bases) {
  return AsFloats({step.places[place].in(bases), Element(step.x.element)}, step.x.c);
}

template <class T>
void scale(const Step& step, char* const* bases, int threads) {
  const AsFloats factors = of_channels(step, 0, bases), addends = of_channels(step, 1, bases);
  scale<T>(step, factors.data(), addends.data(), 0, step.values[0], step.values[1], bases, threads);
}

// Group norm with the sums of `moments`: places: these, the weight and the bias, which may be null.
template <class T>
void normalize(const Step& step, char* const* bases, int threads) {
  const View& out = step.out;
  const int64_t groups = step.numbers[1], of_group = out.c / groups;
  const double *totals = step.places[0].in<double>(bases), count = double(step.numbers[2]);
  const AsFloats weights = of_channels(step, 1, bases), biases = of_channels(step, 2, bases);
  const float *weight = weights.data(), *bias = biases.data();
  std::vector<float> factors(times(out.n, out.c)), addends(factors.size());
  for (int64_t n = 0; n < out.n; ++n)
    for (int64_t c = 0; c < out.c; ++c) {
      const double* of = totals + (n * groups + c / of_group) * 2;
      const double mean = of[0] / count, variance = std::max(of[1] / count - mean * mean, 0.0);
      const double factor = (weight ? weight[c] : 1) / std::sqrt(variance + step.values[0]);
      factors[n * out.c + c] = float(factor);
      addends[n * out.c + c] = float((bias ? bias[c] : 0) - mean * factor);
    }
  scale<T>(step, factors.data(), addends.data(), out.c, -1, -1, bases, threads);
}

}  // namespace program
