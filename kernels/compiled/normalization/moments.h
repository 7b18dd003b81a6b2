// Means and variances, in one reading: sums of x in double, and sums of (x - shift)^2 in float over a few elements, then
// in double. The shift of a channel is the mean of some of its elements, so that large means do not cancel; channels
// become sets as their means and squares are known (Chan, Golub and LeVeque, "Algorithms for computing the sample
// variance", 1983: shifted data, and the pairwise formula).
#pragma once

#include "normalization/pixels.h"

namespace normalization {

// Add the sums of x, and of (x - shift)^2, of the elements of a line to those of their places in the period.
template <class T>
void add_moments(const Layout& layout, const Line& line, const T* x, const float* shift, float* squares, double* sums) {
  const ptrdiff_t keep = Coefficients::kept(layout);
  x += line.first;
  each_vector(line.count, layout.width, [&](auto periods, ptrdiff_t at, ptrdiff_t i, int lanes, ptrdiff_t)
                                             INLINE_LAMBDA {
    if (periods > 1) prefetch(x + at + (periods - 1) * i + periods * layout.width, periods);
    const Vec from = load(shift + (i & keep));
    Doubles low{}, high{};
    Vec square{};
#pragma GCC unroll 4
    for (int period = 0; period < decltype(periods)::value; ++period) {
      const Vec value = load_first(x + at + period * layout.width, lanes), distance = value - from;
      const Halves halves(value);
      low += halves.low;
      high += halves.high;
      square += distance * distance;
    }
    *reinterpret_cast<Doubles*>(sums + i) += low;
    *reinterpret_cast<Doubles*>(sums + i + VL / 2) += high;
    store(squares + i, load(squares + i) + first_of(square, lanes));
  });
  flush(squares, layout.padded(), sums + layout.padded());
}

// Set the shifts of a row: means of elements that are spread over it.
template <class T>
void set_shifts(const Layout& layout, int64_t row, const T* x, float* shift) {
  constexpr int64_t SAMPLES = 8;
  std::fill_n(shift, layout.padded(), 0.f);
  const int64_t channels = layout.channels_of_row(), size = layout.size / channels, all = layout.planes * size;
  const int64_t samples = std::min(SAMPLES, all), step = all / samples;
  for (int64_t j = 0, plane = 0, pixel = 0; j < samples; ++j, pixel += step) {
    for (; pixel >= size; pixel -= size) ++plane;
    const T* from = x + layout.plane(row, plane) + pixel * channels;
    for (int64_t i = 0; i < channels; i += VL) {
      const Vec value = load_first(from + i, int(std::min<int64_t>(channels - i, VL))) / float(samples);
      store(shift + i, load(shift + i) + (value - value == 0 ? value : Vec{}));  // no infinity
    }
  }
  for (int64_t i = channels; i < layout.width; ++i) shift[i] = shift[i - channels];
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
  if (norm.sets == OF_PIXELS) return moments_of_pixels<T>(norm, operands);
  const Layout layout(norm);
  const int threads = int(norm.threads);
  Sums sums(layout, threads);
  const int64_t padded = layout.padded();
  Parts<float> shifts(threads, layout.rows * padded), squares(threads, padded);
  std::vector<int64_t> units(threads, -1);
  const bool has_running = bool(operands.running_mean);
  std::vector<double> means(has_running ? norm.statistics() : 0), variances(means.size());
  const T* const x = operands.x.as<T>();
  const auto shifts_of = [&](int64_t row, int part) {  // those of a unit at once
    const int64_t unit = row / layout.rows;
    for (int64_t i = 0; units[part] != unit && i < layout.rows; ++i)
      set_shifts(layout, unit * layout.rows + i, x, shifts.of(part) + i * padded);
    units[part] = unit;
    return shifts.of(part) + row % layout.rows * padded;
  };

  const auto reduce = [&](const Line& line, int part) {
    add_moments(layout, line, x, shifts_of(line.row, part), squares.of(part), sums.slot(line.row, part));
  };
  const double count = double(layout.set_elements);
  const auto finish = [&](int64_t unit, int part) {
    const double of_channel = double(layout.planes * layout.size / layout.channels_of_row());
    for (int64_t set = 0; set < layout.sets; ++set) {
      const Span span = layout.span(set);
      double sum = 0, squares = 0;
      for (int64_t row = unit * layout.rows + span.row; row < unit * layout.rows + span.end_row; ++row)
        sum = std::accumulate(sums.of(row, part) + span.begin, sums.of(row, part) + span.end, sum);
      const double mean = sum / count;
      for (int64_t row = unit * layout.rows + span.row; row < unit * layout.rows + span.end_row; ++row) {
        const double* const of_row = sums.of(row, part);
        const float* const shift = shifts_of(row, part);
        for (int64_t i = span.begin; i < span.end; ++i) {
          const double of = of_row[i] / of_channel, shifted = of - shift[i], between = of - mean;
          squares += of_row[padded + i] + of_channel * (between * between - shifted * shifted);
        }
      }
      const double variance = std::max(squares / count, 0.0);
      const int64_t place = unit * layout.sets + set;
      operands.mean.as<float>()[place] = float(mean);
      operands.inverse.as<float>()[place] = inverse_of(variance, norm.eps);
      if (has_running) means[place] = mean, variances[place] = variance * (count / (count - 1));
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
