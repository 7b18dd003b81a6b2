// Means and variances, in one reading: sums in double of x - shift and of its square, where the shift is the first
// element of the set, so that large means do not cancel (Chan, Golub and LeVeque, "Algorithms for computing the sample
// variance", 1983, section 3: shifted data).
#pragma once

#include <cmath>

#include "normalization/units.h"

namespace normalization {

// Add the sums of x - shift, and of its square, of the elements of a line to those of their places in the period.
template <class T>
void add_moments(const Layout& layout, const Line& line, const T* x, const float* shift, double* sums) {
  const ptrdiff_t keep = layout.is_last ? -1 : 0;
  const int64_t size = layout.entries();
  each_tile(line.count, layout.width, [&](auto vectors, ptrdiff_t first, ptrdiff_t i, ptrdiff_t periods, int lanes,
                                          ptrdiff_t) INLINE_LAMBDA {
    constexpr int V = vectors(), HALF = VL / 2;
    Doubles shifts[2 * V], sum[2 * V] = {}, square[2 * V] = {};
    for (int v = 0; v < 2 * V; ++v)
      for (int j = 0; j < HALF; ++j) shifts[v][j] = shift[((i + v * HALF) & keep) + j];
    const T* read = x + line.first + first;
    for (ptrdiff_t period = 0; period < periods; ++period, read += layout.width) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const Vec value = V > 1 ? load(read + v * VL) : load_first(read, lanes);
        HalfVec halves[2];
        std::memcpy(halves, &value, sizeof value);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const Doubles distance = __builtin_convertvector(halves[half], Doubles) - shifts[2 * v + half];
          sum[2 * v + half] += distance;
          square[2 * v + half] += distance * distance;
        }
      }
    }
    for (int j = 0; j < (V > 1 ? V * VL : lanes); ++j) {
      double* const to = sums + ((i + j) & keep);
      to[0] += sum[j / HALF][j % HALF];
      to[size] += square[j / HALF][j % HALF];
    }
  });
}

struct Moments {
  double mean, variance;
};

inline Moments moments_of(double shift, double sum, double squares, double count) {
  const double distance = sum / count;
  return {shift + distance, std::max(squares / count - distance * distance, 0.0)};
}

// Update running statistics with those of each channel, averaged over the samples if they have statistics of their own.
template <class T>
void update(T* running, const std::vector<double>& values, int64_t channels, double momentum) {
  const int64_t samples = int64_t(values.size()) / channels;
  for (int64_t c = 0; c < channels; ++c) {
    double sum = 0;
    for (int64_t n = 0; n < samples; ++n) sum += values[n * channels + c];
    const double updated = momentum * (sum / double(samples)) + (1 - momentum) * double(value_of(running[c]));
    store_first(running + c, broadcast(float(updated)), 1);
  }
}

// Compute mean and inverse, 1 / sqrt(variance + eps), and update the running statistics.
template <class T>
void moments(const Norm& norm, const Operands& operands, double momentum) {
  const Layout layout(norm);
  const int threads = int(norm.threads);
  Sums sums(layout, threads);
  Floats shifts(threads, layout.coefficients());
  std::vector<int64_t> rows(threads, -1);
  const bool has_running = bool(operands.running_mean);
  std::vector<double> means(has_running ? norm.statistics() : 0), variances(means.size());
  const T* const x = operands.x.as<T>();
  const auto shift_of = [&](int64_t set) {
    const float first = value_of(x[layout.first_of(set)]);
    return std::isfinite(first) ? first : 0;
  };

  const auto reduce = [&](const Line& line, int part) {
    float* const shift = shifts.of(part);
    if (rows[part] != line.row)
      layout.each_entry(rows[part] = line.row, [&](int64_t i, int64_t, int64_t set) {
        shift[i] = shift_of(set);
        if (!layout.is_last) std::fill_n(shift, VL, shift[0]);
      });
    add_moments(layout, line, x, shift, sums.slot(line.row, part));
  };
  const auto finish = [&](int64_t unit, int part) {
    for (int64_t set = unit * layout.sets; set < (unit + 1) * layout.sets; ++set) {
      double sum = 0, squares = 0;
      const int64_t of_set = layout.channels / layout.sets, size = layout.entries();
      for (int64_t row = unit * layout.rows; row < (unit + 1) * layout.rows; ++row) {
        const double* const of_row = sums.of(row, part);
        if (!layout.is_last) sum += of_row[0], squares += of_row[1];
        else
          for (int64_t first = set % layout.sets * of_set; first < size; first += layout.channels)
            for (int64_t i = first; i < first + of_set; ++i) sum += of_row[i], squares += of_row[size + i];
      }
      const double count = double(layout.set_elements);
      const Moments of = moments_of(shift_of(set), sum, squares, count);
      const double spread = of.variance + norm.eps;
      operands.mean.as<float>()[set] = float(of.mean);
      operands.inverse.as<float>()[set] = spread == 0 ? 0 : float(1 / std::sqrt(spread));
      if (has_running) means[set] = of.mean, variances[set] = of.variance * (count / (count - 1));
    }
  };
  each_unit(layout, sums, threads, reduce, finish, [](const Line&, int) {});
  if (!has_running) return;
  const Elements mean{operands.running_mean.data, Element(norm.running_element)};
  const Elements variance{operands.running_var.data, Element(norm.running_element)};
  mean.visit([&](auto* running) { update(running, means, norm.c, momentum); });
  variance.visit([&](auto* running) { update(running, variances, norm.c, momentum); });
}

}  // namespace normalization
